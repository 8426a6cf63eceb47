"""Overload, clients that leave, slow readers, draining, and an engine that dies."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dgraph.engine.engine import EngineClosed
from dgraph.engine.io.tickets import EngineRequest
from dgraph.errors import InputError
from dgraph.runtime.loop.label_scoring import Scorer
from dgraph.serve.host import Host, address, bind
from dgraph.serve.settings import ServerConfig
from tests.engine.test_engine import Served
from tests.serve.asking import chunks_of, complete, refused
from tests.serve.live import WAIT, Held, taken, until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def held() -> Iterator[Held]:
    with Held({"keep_alive": 0.05}, max_tokens=64, queue=2) as server:
        yield server
        server.gate.open.set()
        assert server.live.settled()


@pytest.fixture
def http(held: Held) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=held.live.url, timeout=WAIT) as client:
        yield client


def stream(http: httpx.Client, **fields: Any) -> Any:
    """A stream as it comes."""
    return http.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True, **LONG, **fields})


def test_a_full_queue_is_told_before_the_stream_begins(http: httpx.Client, held: Held) -> None:
    held.hold()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(complete, http, "abc", **LONG)]
        assert held.gate.begun.wait(WAIT)
        waiting = [pool.submit(complete, http, "abc", **LONG) for _ in range(2)]
        assert until(lambda: held.engine.stats.waiting == 2)
        answer = complete(http, "abc", stream=True)
        assert refused(answer, 503)["code"] == "busy"
        assert int(answer.headers["retry-after"]) >= 1
        question = {"type": "predicate", "instructions": "Is it so?"}
        decision = http.post("/v1/decisions", json={"input": "abc", "questions": [question]})
        assert refused(decision, 503)["code"] == "busy"
        held.gate.open.set()
        texts = {one.result().json()["choices"][0]["text"] for one in running + waiting}
    assert len(texts) == 1
    assert (
        'dgraph:admission_rejections_total{engine="0",model_name="fake",reason="busy"} 2.0' in http.get("/metrics").text
    )


def test_all_choices_are_taken_or_none(http: httpx.Client, held: Held) -> None:
    held.hold()
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(complete, http, "abc", **LONG)]
        assert held.gate.begun.wait(WAIT)
        one = pool.submit(complete, http, "abc")
        assert until(lambda: held.engine.stats.waiting == 1)
        assert refused(complete(http, "abc", n=2), 503)["code"] == "busy"
        assert "3 requests at once are more than the 2 that may wait" in refused(complete(http, "abc", n=3))["message"]
        assert held.engine.stats.waiting == 1
        held.gate.open.set()
        assert [each.result().status_code for each in (*running, one)] == [200, 200]
    assert len(complete(http, "abc", n=2).json()["choices"]) == 2


def test_choices_hold_nobody_up_while_they_are_checked(
    http: httpx.Client, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, checking, ended = held.engine._core.fits, threading.Event(), threading.Event()

    def patient(ticket: EngineRequest) -> None:
        checking.set()
        assert ended.wait(WAIT)
        fits(ticket)

    held.hold()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(complete, http, "abc", **LONG)
        assert held.gate.begun.wait(WAIT)
        monkeypatch.setattr(held.engine._core, "fits", patient)
        many = pool.submit(complete, http, "abc", n=2)
        assert checking.wait(WAIT)
        held.gate.open.set()
        assert running.result().status_code == 200
        ended.set()
        assert many.result().status_code == 200


def test_a_stream_says_that_it_is_there(http: httpx.Client, held: Held) -> None:
    held.hold()
    with stream(http) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = answer.iter_raw()
        assert [next(lines), next(lines)] == [b": still here\n\n"] * 2
        held.gate.open.set()
        rest = b"".join(lines).decode()
    assert chunks_of(rest)[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("asks", [{"stream": True}, {"stream": False}, {"n": 2}])
@pytest.mark.parametrize("others", [0, 1])
def test_a_client_that_leaves_is_not_worked_for(held: Held, asks: dict[str, Any], others: int) -> None:
    """While it is decoded, and while it waits behind others."""
    held.hold()
    with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=held.live.url, timeout=WAIT) as http:
        running = [pool.submit(complete, http, "abc", **LONG) for _ in range(others)]
        assert not others or held.gate.begun.wait(WAIT), "the queue has room for two"
        line = connect(held, {"prompt": "abc", **LONG, **asks})
        assert until(lambda: taken(held.engine) == others + asks.get("n", 1))
        line.close()
        assert until(lambda: held.live.host.lifetime.running == others)
        held.gate.open.set()
        assert all(one.result().status_code == 200 for one in running)
    assert held.live.settled()
    assert held.engine.stats.finished.get("cancelled") == asks.get("n", 1)


def connect(held: Held, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion has been asked for."""
    host, port = held.live.url.removeprefix("http://").split(":")
    line = socket.create_connection((host, int(port)), timeout=WAIT)
    content = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json"]
    line.sendall("\r\n".join([*head, f"content-length: {len(content)}", "", ""]).encode() + content)
    return line


def test_who_does_not_read_holds_nobody_up(http: httpx.Client, held: Held) -> None:
    slow = connect(held, {"prompt": "abc", "stream": True, "return_step_map": True, **LONG})
    for _ in range(5):
        assert complete(http, "abc", **LONG).status_code == 200
    assert until(lambda: held.engine.stats.running == 0), "the engine waits for no reader"
    text = b""
    while b"[DONE]" not in text:
        text += slow.recv(1 << 16)
    slow.close()
    assert text.startswith(b"HTTP/1.1 200")


def test_draining_lets_what_runs_end_and_takes_nothing_new(http: httpx.Client, held: Held) -> None:
    held.hold()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, http, "abc", **LONG)
        assert until(lambda: held.engine.stats.running == 1)
        held.live.signal()
        assert until(lambda: held.live.host.lifetime.draining)
        assert refused(complete(http, "abc"), 503)["code"] == "draining"
        assert (http.get("/ready").status_code, http.get("/health").status_code) == (503, 200)
        held.gate.open.set()
        assert running.result().json()["choices"][0]["finish_reason"] == "length"
    assert held.live.join()
    assert not held.engine.alive


@pytest.mark.parametrize("second", [False, True], ids=["in time", "at the second signal"])
def test_what_does_not_end_in_time_is_ended(second: bool) -> None:
    with Held(max_tokens=64, server={}) as server:
        server.live.host._shutdown_timeout = WAIT if second else 0.1
        server.hold()
        with httpx.Client(base_url=server.live.url, timeout=WAIT) as http, stream(http) as answer:
            assert until(lambda: server.engine.stats.running == 1)
            server.live.signal()
            if second:
                assert until(lambda: server.live.host.lifetime.draining)
                server.live.signal()
            time.sleep(0.2)
            server.gate.open.set()
            *_, error = chunks_of(answer.read().decode())
        assert error["error"]["code"] == "cancelled"
        assert server.live.join()


def decide(http: httpx.Client) -> httpx.Response:
    """Two questions, of which the second waits for the first."""
    question = {"type": "predicate", "instructions": "Is it so?"}
    return http.post("/v1/decisions", json={"input": "abc", "questions": [question] * 2})


@pytest.mark.parametrize("in_time", [True, False])
def test_decisions_are_drained_as_other_requests_are(in_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Held(max_tokens=64) as held, httpx.Client(base_url=held.live.url, timeout=WAIT) as http:
        host = held.live.host

        def score(self: Scorer, question: object) -> list[float]:
            held.gate.begun.set()
            assert held.gate.open.wait(WAIT)
            return [0.25, 0.75]

        monkeypatch.setattr(Scorer, "__call__", score)
        host._shutdown_timeout = WAIT if in_time else 0.1
        held.hold()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(decide, http)
            assert held.gate.begun.wait(WAIT)
            held.live.signal()
            assert until(lambda: host.lifetime.draining)
            assert refused(decide(http), 503)["code"] == "draining"
            assert not host.should_exit, "while a decision is on its way"
            (deciding,) = host.lifetime._running
            assert until(lambda: in_time or deciding._cancelled)  # type: ignore[attr-defined]
            held.gate.open.set()
            if in_time:
                assert [answer["probability"] for answer in running.result().json()["answers"]] == [0.25] * 2
            else:
                assert refused(running.result(), 503)["code"] == "cancelled"
        assert held.live.join()


def test_an_engine_that_dies_says_so_to_everybody(
    http: httpx.Client, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Any] = []
    monkeypatch.setattr("dgraph.serve.running.LOGGER.error", lambda message, exc_info: logged.append(exc_info))

    def fail() -> None:
        raise RuntimeError("no device at /dev/secret")

    held.hold()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(complete, http, "abc", **LONG)
        assert held.gate.begun.wait(WAIT), "the queue has room for two"
        with stream(http, n=2) as answer:
            assert until(lambda: taken(held.engine) == 3)
            held.gate.act = fail
            held.gate.open.set()
            text = answer.read().decode()
        (error,) = chunks_of(text)
        assert error["error"]["type"] == "server_error"
        assert refused(whole.result(), 500)["code"] == "failed"
    assert "secret" not in text + whole.result().text
    assert list(map(str, logged)) == ["no device at /dev/secret"] * 2, "the log says why, as the answers promise"
    assert http.get("/health").status_code == http.get("/ready").status_code == 503
    assert refused(complete(http, "abc"), 503)["code"] == "closed"
    assert http.get("/metrics").status_code == 200


def test_a_server_whose_engine_has_died_ends_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that whoever runs it, as docs/dgraph.service, starts it again."""
    monkeypatch.setattr("dgraph.serve.host.LOOK", 0.01)
    monkeypatch.setattr("dgraph.serve.host.WAKE", 0.2)
    served, addresses, ended = Served(), queue.SimpleQueue[str](), queue.SimpleQueue[BaseException]()

    def serve() -> None:
        host = Host(bind("127.0.0.1", 0), ServerConfig(), WAIT)
        try:
            host.serve_with(lambda tell: {"fake": served.engine}, lambda what: None, addresses.put)
        except BaseException as error:
            ended.put(error)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    served.gate.act = fail
    thread = threading.Thread(target=serve)
    thread.start()
    url = addresses.get(timeout=WAIT)
    assert httpx.get(f"{url}/health").status_code == 200
    assert refused(httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 4}), 500)
    assert httpx.get(f"{url}/health").status_code == 503, "it is told of for a while"
    error = ended.get(timeout=WAIT)
    thread.join(WAIT)
    assert isinstance(error, EngineClosed)
    assert str(error) == "the engine of 'fake' has stopped: the device is gone"


def test_a_port_that_is_taken() -> None:
    with (
        bind("127.0.0.1", 0) as taken,
        pytest.raises(InputError, match=r"cannot listen at 127.0.0.1:\d+: Address already"),
    ):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(InputError, match="a port is a number from 0 to 65535"):
        bind("127.0.0.1", 70000)
    with pytest.raises(InputError, match=r"cannot listen at no\.such\.host\.invalid:0"):
        bind("no.such.host.invalid", 0)


def test_answers_are_sent_at_once(held: Held) -> None:
    """Without waiting for the client to acknowledge their headers, which takes it 40 ms."""
    with httpx.Client(base_url=held.live.url, timeout=WAIT) as http:
        assert complete(http, "abc", max_tokens=4).status_code == 200
        (one,) = held.live.host.server_state.connections
        transport: Any = one.transport
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_port_answers_while_the_model_loads() -> None:
    listener = bind("127.0.0.1", 0)
    url, go, told = address(listener), threading.Event(), []
    host = Host(listener, ServerConfig(), 1.0)
    model = Held()

    def load(tell: Any) -> Any:
        tell("reading")
        assert go.wait(WAIT)
        return {"fake": model.engine}

    thread = threading.Thread(target=host.serve_with, args=(load, told.append, told.append))
    thread.start()
    with httpx.Client(base_url=url, timeout=WAIT) as http, model:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
        answer = complete(http, "abc")
        assert (refused(answer, 503)["code"], answer.headers["retry-after"]) == ("loading", "5")
        assert http.get("/metrics").status_code == 200
        go.set()
        assert until(lambda: http.get("/ready").status_code == 200)
        assert complete(http, "abc").status_code == 200
        assert told == ["reading", url]
        host.handle_exit(15, None)
        thread.join(WAIT)
    assert not thread.is_alive()


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load(tell: Any) -> Any:
        raise InputError("no such model")

    with pytest.raises(InputError, match="no such model"):
        Host(bind("127.0.0.1", 0), ServerConfig(), 1.0).serve_with(load, print, print)


def test_a_signal_while_it_loads_ends_the_loading() -> None:
    host, begun = Host(bind("127.0.0.1", 0), ServerConfig(), 1.0), threading.Event()

    def load(tell: Any) -> Any:
        begun.set()
        while True:
            tell("still loading")
            time.sleep(0.01)

    thread = threading.Thread(target=host.serve_with, args=(load, lambda what: None, print))
    thread.start()
    assert begun.wait(WAIT)
    assert until(lambda: host.started)
    host.handle_exit(15, None)
    thread.join(WAIT)
    assert not thread.is_alive()
