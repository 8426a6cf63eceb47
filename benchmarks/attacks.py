"""Clients that ask for more than a server should give, each in a thread: an address on stdin, what they were told on
stdout.

`benchmarks.hostile_clients` starts it, in a process of its own.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

PAUSE = 0.5
"""Seconds between two requests of one attack."""
IDLE = 300
HALVES = 50
UNREAD = 8
WAIT = 10.0
"""Seconds after which an attack gives up on an answer."""

Outcome = Callable[[str], None]


class Server:
    """An address, and the time until which it is attacked."""

    def __init__(self, url: str, seconds: float):
        self.host, port = url.removeprefix("http://").split(":")
        self.port, self.end = int(port), time.perf_counter() + seconds

    @property
    def over(self) -> bool:
        """True once it is time to stop."""
        return time.perf_counter() > self.end

    def line(self) -> socket.socket:
        """A connection."""
        return socket.create_connection((self.host, self.port), timeout=WAIT)

    def post(self, path: str, body: bytes) -> str:
        """The status of an answer, or the error in its place."""
        client = http.client.HTTPConnection(self.host, self.port, timeout=WAIT)
        try:
            client.request("POST", f"/v1/{path}", body, {"Content-Type": "application/json"})
            answer = client.getresponse()
            answer.read()
            return str(answer.status)
        except OSError as error:
            return type(error).__name__
        finally:
            client.close()


def long_texts(server: Server, told: Outcome) -> None:
    """Texts of 1 and 4 MB, in every field that has a text."""
    while not server.over:
        for megabytes in (1, 4):
            text = "a " * (megabytes << 19)
            for path, body in (
                ("chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 4}),
                ("completions", {"prompt": text, "max_tokens": 4}),
                ("completions", {"prompt": "a", "canvas": [text, 4]}),
                ("decisions", {"input": text, "questions": [{"type": "predicate", "instructions": "?"}]}),
            ):
                told(server.post(path, json.dumps(body).encode()))
                time.sleep(PAUSE)


def fitting_texts(server: Server, told: Outcome) -> None:
    """Chats as long as a server reads at all."""
    while not server.over:
        body = {"messages": [{"role": "user", "content": "ab " * 7_000}], "max_tokens": 4}
        told(server.post("chat/completions", json.dumps(body).encode()))
        time.sleep(PAUSE)


def many_values(server: Server, told: Outcome) -> None:
    """Bodies of very many values: right ones, wrong ones, nested ones."""
    messages = [{"role": "user", "content": ""}] * 60_000
    bodies = [
        ("completions", json.dumps({"prompt": [1] * 200_000}).encode()),
        ("completions", json.dumps({"prompt": [-1] * 200_000}).encode()),
        ("completions", json.dumps({"prompt": "a", "stop": [""] * 200_000}).encode()),
        ("completions", b'{"prompt": "a", "x": ' + b"[" * 1_000_000),
        ("completions", b'{"prompt": "a", "x": [' + b"[]," * 300_000 + b"1]}"),
        ("chat/completions", json.dumps({"messages": messages}).encode()),
        ("chat/completions", json.dumps({"messages": messages[:800], "max_tokens": 4}).encode()),
    ]
    while not server.over:
        for path, body in bodies:
            told(server.post(path, body))
            time.sleep(PAUSE)


def endless_headers(server: Server, told: Outcome) -> None:
    """Headers, one after the other, until the server ends that."""
    while not server.over:
        with server.line() as line:
            try:
                line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
                for _ in range(1000):
                    line.sendall(b"X-a: " + b"a" * 60_000 + b"\r\n")
                told(line.recv(100)[9:12].decode())
            except OSError as error:
                told(type(error).__name__)
        time.sleep(PAUSE)


def silent_sockets(server: Server, told: Outcome) -> None:
    """Hundreds of connections without a word, half a head or half a body, until the server closes them."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    sent = [b""] * IDLE + [head] * HALVES + [head + b"Content-Length: 100\r\n\r\n{"] * HALVES
    while not server.over:
        lines = []
        for part in sent:
            try:
                lines.append(server.line())
                lines[-1].sendall(part)
            except OSError as error:
                told(type(error).__name__)
        for line in lines:
            line.settimeout(max(0.01, min(WAIT, server.end - time.perf_counter())))
            try:
                told(line.recv(100)[9:12].decode() or "closed")
            except TimeoutError:
                told("still open")
            except OSError as error:
                told(type(error).__name__)
            line.close()


def unread_streams(server: Server, told: Outcome) -> None:
    """Streams with drafts that are asked for and never read."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 512, "ignore_eos": True, "stream": True}
    content = json.dumps({**body, "stream_mode": "draft", "return_step_map": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    lines = []
    for _ in range(UNREAD):
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect((server.host, server.port))
        line.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        lines.append(line)
    while not server.over:
        time.sleep(PAUSE)
    for line in lines:
        told("asked")
        line.close()


ATTACKS = (long_texts, fitting_texts, many_values, endless_headers, silent_sockets, unread_streams)


def attack(url: str, seconds: float, attacks: Sequence[str]) -> dict[str, dict[str, int]]:
    """Run the attacks of these names at once; count what each was told."""
    server, found = Server(url, seconds), {name: Counter[str]() for name in attacks}

    def noting(name: str) -> Outcome:
        def told(outcome: str) -> None:
            found[name][outcome] += 1

        return told

    threads = [
        threading.Thread(target=one, args=(server, noting(one.__name__))) for one in ATTACKS if one.__name__ in found
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: dict(sorted(counts.items())) for name, counts in found.items()}


if __name__ == "__main__":
    given = json.loads(sys.stdin.read())
    print(json.dumps(attack(given["url"], given["seconds"], given["attacks"])))
