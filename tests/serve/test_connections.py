"""Clients that are slow, silent or hostile: each loses its connection, and the others keep theirs."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from dgraph.serve import connections
from dgraph.serve.connections import Crowd, raise_file_limit, room_for
from dgraph.serve.host import bind
from dgraph.serve.lifetime import Lifetime
from dgraph.serve.running import BEHIND, HttpStream
from dgraph.serve.settings import ServerConfig
from tests.serve.asking import complete, refused
from tests.serve.live import WAIT, Held, taken, until

LIMITS: dict[str, Any] = {
    "max_header_bytes": 2000,
    "max_headers": 20,
    "header_timeout": 0.2,
    "body_timeout": 0.2,
    "idle_timeout": 0.2,
    "send_timeout": 0.2,
}
HEAD = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with Held(LIMITS, max_tokens=64) as server:
        yield server
        assert server.live.settled()


def line_to(held: Held) -> socket.socket:
    host, port = held.live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)


def told(line: socket.socket) -> bytes:
    """All that comes until the server closes."""
    return b"".join(iter(lambda: line.recv(1 << 16), b""))


def answered(held: Held, *sent: bytes) -> bytes:
    with line_to(held) as line:
        for part in sent:
            line.sendall(part)
        return told(line)


def error_of(answer: bytes) -> tuple[int, str]:
    """The status of an answer that refuses, and the code of its error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"x-a: " + b"a" * 3000,
        HEAD + b"x-a: " + b"a" * 3000 + b"\r\n\r\n",
        HEAD + b"".join(b"x-%d: a\r\n" % i for i in range(20)) + b"\r\n",
        b"GET /" + b"a" * 3000,
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n",
        b"x" * 3000,
        b"\r\n" * 2000,
    ],
    ids=["endless header", "long header", "many headers", "endless line", "long line", "no method", "empty lines"],
)
def test_a_head_without_bound_is_refused(held: Held, head: bytes) -> None:
    assert error_of(answered(held, head)) in ((431, "headers_too_large"), (400, "http_invalid"))
    before = held.live.host.lifetime.refused[431]
    assert error_of(answered(held, HEAD, *[b"x-a: " + b"a" * 500 + b"\r\n"] * 9)) == (431, "headers_too_large")
    assert held.live.host.lifetime.refused[431] == before + 1


def test_trailers_without_bound_are_refused(held: Held) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    for trailer in (b"x-a: " + b"a" * 1_000_000, b"".join(b"x-%d: a\r\n" % i for i in range(30))):
        with suppress(ConnectionError):  # reset: its answer might have begun
            assert answered(held, head + b"1\r\n{\r\n0\r\n" + trailer) == b""
    assert held.live.host.lifetime.dropped["invalid"] == 2


def test_what_is_no_http_is_refused_as_other_requests_are(held: Held) -> None:
    before = held.live.host.lifetime.refused[400]
    assert error_of(answered(held, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")) == (400, "http_invalid")
    assert held.live.host.lifetime.refused[400] == before + 1


def test_a_head_that_does_not_come_in_time_is_refused(held: Held) -> None:
    assert error_of(answered(held, HEAD)) == (408, "timeout")
    assert error_of(answered(held, HEAD + b"\r\n" + HEAD).partition(b'"}')[2]) == (408, "timeout"), "after an answer"


def test_connections_without_requests_are_closed(held: Held) -> None:
    assert answered(held) == b"", "at once"
    assert answered(held, b"\r\n") == b""
    assert answered(held, HEAD + b"\r\n").startswith(b"HTTP/1.1 200"), "after an answer"
    announced = HEAD + b"content-length: 100\r\n\r\n"
    assert answered(held, announced).startswith(b"HTTP/1.1 200"), "where the rest of a body is missing"
    assert held.live.host.lifetime.dropped["idle"] >= 4


def test_a_body_that_does_not_come_closes_the_connection(held: Held) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
    assert error_of(answered(held, head)) == (408, "timeout")


def test_many_requests_at_once_on_one_connection(held: Held) -> None:
    whole = HEAD + b"\r\n"
    with line_to(held) as line:
        line.sendall(whole * 8)
        assert told(line).count(b"HTTP/1.1 200") == 8
    assert answered(held, whole * 200).count(b"HTTP/1.1 200") < 200
    assert httpx.get(f"{held.live.url}/health").status_code == 200


def waiting(held: Held, count: int, sent: bytes = b"") -> list[socket.socket]:
    lines = [line_to(held) for _ in range(count)]
    for line in lines:
        line.sendall(sent)
    return lines


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_who_has_waited_longest_for_its_client_gives_way(sent: bytes) -> None:
    with Held({"max_connections": 4}) as held:
        first, *others = waiting(held, 12, sent)
        assert told(first) == b""
        assert httpx.get(f"{held.live.url}/health").status_code == 200
        assert until(lambda: held.live.host.lifetime.dropped["crowded"] == 9)
        for line in (first, *others):
            line.close()


def test_where_all_are_answered_the_next_is_told_so() -> None:
    with Held({"max_connections": 2}, max_tokens=64) as held, ThreadPoolExecutor(2) as pool:
        held.hold()
        with httpx.Client(base_url=held.live.url, timeout=WAIT) as http:
            running = [pool.submit(complete, http, "abc", max_tokens=4) for _ in range(2)]
            assert until(lambda: taken(held.engine) == 2)
            answer = httpx.post(f"{held.live.url}/v1/completions", json={"prompt": "abc"})
            assert refused(answer, 503)["code"] == "busy"
            assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "1")
            assert httpx.get(f"{held.live.url}/health").status_code == 200
            held.gate.open.set()
            assert [one.result().status_code for one in running] == [200, 200]
            assert complete(http, "abc", max_tokens=4).status_code == 200, "there is room again"


def test_bodies_together_have_a_bound() -> None:
    with (
        Held({"max_held_bytes": 3000, "max_body_bytes": 3000}, max_tokens=64) as held,
        httpx.Client(base_url=held.live.url) as http,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2500\r\n\r\n" + b" " * 2000
        with line_to(held) as line:
            line.sendall(head)
            assert until(lambda: complete(http, "a" * 1500, max_tokens=4).status_code == 503)
            assert refused(complete(http, "a" * 1500, max_tokens=4), 503)["code"] == "busy"
            assert complete(http, "abc", max_tokens=4).status_code == 200
        assert until(lambda: complete(http, "a" * 1500, max_tokens=4).status_code == 400), "it has been given back"


class Endless:
    """A server of a stream that has no end, and is not read."""

    def __init__(self, **settings: Any):
        self.lifetime = Lifetime()
        crowd = Crowd(ServerConfig(**settings), self.lifetime, 10)
        config = uvicorn.Config(self._app, http=crowd.protocol(), ws="none", log_config=None, lifespan="off")
        self._server, self.listener = uvicorn.Server(config), bind("127.0.0.1", 0)
        self._thread = threading.Thread(target=self._server.run, args=([self.listener],))

    @staticmethod
    async def _app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"a" * (1 << 16), "more_body": True})

    def __enter__(self) -> Endless:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT)


def test_who_reads_nothing_is_dropped() -> None:
    with Endless(send_timeout=0.1) as server, socket.create_connection(server.listener.getsockname()) as line:
        line.sendall(HEAD + b"\r\n")
        assert until(lambda: server.lifetime.dropped["not_read"] == 1)


def test_a_client_that_is_far_behind_is_not_worked_for() -> None:
    cancelled: list[str] = []
    model: Any = SimpleNamespace(engine=SimpleNamespace(cancel=cancelled.append))
    running = HttpStream(model)
    running.names = ["one"]
    put: Callable[[Any], None] = running._putting(0)
    for event in range(BEHIND + 10):
        put(event)
    assert len(running.events) == BEHIND + 1, "the last says that it has left"
    assert (running.gone, cancelled) == (True, ["one"])


def test_the_limit_of_files_is_raised_and_bounds_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(300, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, found: limits.append(found))
    used = len(os.listdir(connections.DESCRIPTORS))
    assert 0 < room_for(2048) <= 300 - used
    assert room_for(8) == 8
    raise_file_limit()
    assert limits[-1] == (4096, 4096)
    assert room_for(2048) == 2048
