"""Clients that stream and note how long they wait between two pieces, in a process of their own: what to do on stdin,
what they saw on stdout.

`benchmarks.hostile_clients` starts it; what takes long to import stays out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field

TICK = 0.02
"""Seconds between two looks at how late this process itself is."""
PROBE = 0.25
"""Seconds between two requests for /health."""
BEGIN = b"data: "


@dataclass
class Seen:
    """The waits of all clients. Times in seconds.

    Attributes:
        gaps: between two pieces of a stream with text in them.
        health: from asking for /health to its answer; failed: how often there was none.
        late: the most by which this process was late itself, which gaps have in them.
        streams: that ended; cut: that ended without their last line.
    """

    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    failed: int = 0
    late: float = 0.0
    streams: int = 0
    cut: int = 0


async def stream(host: str, port: int, body: bytes, end: float, seen: Seen) -> None:
    """Ask for one stream after another until it is time."""
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
    ]
    asked = "\r\n".join([*head, "", ""]).encode() + body
    while time.perf_counter() < end:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(asked)
        last, tail = 0.0, b""
        while time.perf_counter() < end and (piece := await reader.read(1 << 16)):
            now = time.perf_counter()
            if BEGIN in piece:
                if last:
                    seen.gaps.append(now - last)
                last = now
            tail = (tail + piece)[-100:]
        else:
            if time.perf_counter() < end:
                seen.streams += 1
                seen.cut += b"[DONE]" not in tail
        writer.close()


async def probe(host: str, port: int, end: float, seen: Seen) -> None:
    """Ask for /health, over and over, each time on a new connection."""
    asked = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
    while time.perf_counter() < end:
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(asked)
            well = (await reader.read(100)).startswith(b"HTTP/1.1 200")
            writer.close()
        except OSError:
            well = False
        if well:
            seen.health.append(time.perf_counter() - began)
        else:
            seen.failed += 1
        await asyncio.sleep(PROBE)


async def watch(end: float, seen: Seen) -> None:
    """Note how late this process is."""
    while (began := time.perf_counter()) < end:
        await asyncio.sleep(TICK)
        seen.late = max(seen.late, time.perf_counter() - began - TICK)


async def clients(told: dict[str, object]) -> Seen:
    """Run all of them for `told["seconds"]` seconds."""
    host, port = str(told["url"]).removeprefix("http://").split(":")
    body, seen = json.dumps(told["body"]).encode(), Seen()
    end = time.perf_counter() + float(str(told["seconds"]))
    streams = (stream(host, int(port), body, end, seen) for _ in range(int(str(told["streams"]))))
    await asyncio.gather(probe(host, int(port), end, seen), watch(end, seen), *streams)
    return seen


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(clients(json.loads(sys.stdin.read()))))))
