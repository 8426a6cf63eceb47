"""Clients that stream from a server, in a process of their own: a load on stdin, what they saw on stdout.

`benchmarks.server_load` starts it, over and over; what takes long to import stays out.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Asked:
    """One request as its client saw it. Times in seconds from when it asked; tokens: of the response; opening: whether
    it was its client's first.
    """

    first: float
    ended: float
    tokens: int
    opening: bool = False


async def in_turns(count: int, clients: int, think: float, ask: Any) -> list[Asked]:
    """Requests 0 to count, by so many clients that each ask for the next one when they have the last.

    Args:
        think: seconds in the mean that a client pauses before a request, drawn for each (exponential).
    """
    left, draw = iter(range(count)), random.Random(0)
    pauses = [draw.expovariate(1 / think) if think else 0.0 for _ in range(count)]
    done: list[Asked] = []

    async def client() -> None:
        opening = True
        for place in left:
            if think:
                await asyncio.sleep(pauses[place])
            done.append(replace(await ask(place), opening=opening))
            opening = False

    await asyncio.gather(*(client() for _ in range(clients)))
    return done


async def over_http(host: str, port: int, content: bytes) -> Asked:
    """One request on a connection of its own, with as little work as can be: this machine serves, too."""
    began, first = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection(host, port)
    head = ["POST /v1/completions HTTP/1.1", f"Host: {host}:{port}", "Content-Type: application/json"]
    head += ["Connection: close"]
    writer.write("\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content)
    text = b""
    while piece := await reader.read(1 << 16):
        text += piece
        if not first and b'"text":"' in text:
            first = time.perf_counter() - began
    writer.close()
    if b"data: [DONE]" not in text:
        raise RuntimeError(f"a stream was cut: {text[:200]!r}")
    usage = json.loads(text[text.rindex(b'"usage":') + len(b'"usage":') :].partition(b"}\n\n")[0])
    return Asked(first, time.perf_counter() - began, usage["completion_tokens"])


def main() -> None:
    """Read the load, ask, write."""
    load = json.loads(sys.stdin.read())
    host, port = load["url"].removeprefix("http://").split(":")
    common = {"stream": True, "stream_options": {"include_usage": True}}
    contents = [json.dumps({**body, **common}).encode() for body in load["bodies"]]

    async def ask(place: int) -> Asked:
        return await over_http(host, int(port), contents[place])

    began = time.perf_counter()
    asked = asyncio.run(in_turns(len(contents), load["clients"], load["think"], ask))
    print(json.dumps({"seconds": time.perf_counter() - began, "asked": [list(asdict(one).values()) for one in asked]}))


if __name__ == "__main__":
    main()
