"""Hosts that a server does not go by; and what metrics and the log tell of requests that are turned away."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from dgraph.serve.access_log import to_stderr
from dgraph.serve.settings import ServerConfig
from tests.serve.asking import complete, refused
from tests.serve.live import WAIT, Held

OWN = ("localhost", "127.0.0.1", "[::1]")


@pytest.fixture(scope="module")
def held() -> Iterator[Held]:
    with Held({"max_body_bytes": 4000, "allowed_hosts": ["Friend.example"]}, max_tokens=64) as server:
        yield server


@pytest.fixture(scope="module")
def http(held: Held) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=held.live.url, timeout=WAIT) as client:
        yield client


@pytest.mark.parametrize("host", [*OWN, "LOCALHOST:80", "127.0.0.1:9", "[::1]:8000", "friend.example", "localhost."])
def test_names_that_a_server_goes_by(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.nip.io", "10.0.0.1", "[::2]"]
)
def test_a_page_elsewhere_cannot_ask_by_a_name_of_its_own(http: httpx.Client, host: str) -> None:
    """A name that was made to lead here (DNS rebinding) is told by the Host header."""
    for path in ("/v1/models", "/metrics", "/", "/no_such_path"):
        error = refused(http.get(path, headers={"host": host}), 403)
        assert error["code"] == "host_not_allowed"
        assert "--allowed-host" in error["message"]
    assert http.get("/health", headers={"host": host}).status_code == 200, "it tells nothing"


def test_hosts_by_where_a_server_listens() -> None:
    plain, named = ServerConfig(), ServerConfig(allowed_hosts=["a.example"])
    assert plain.listening_at("127.0.0.1").allowed_hosts == OWN
    assert plain.listening_at("192.168.0.7").allowed_hosts == (*OWN, "192.168.0.7")
    assert plain.listening_at("fe80::1").allowed_hosts == (*OWN, "[fe80::1]")
    assert plain.listening_at("box.lan").listening_at("192.168.0.7").allowed_hosts == (*OWN, "box.lan", "192.168.0.7")
    for everywhere in ("0.0.0.0", "::", ""):
        assert plain.listening_at(everywhere).allowed_hosts == (), "whose names are not known"
        assert named.listening_at(everywhere).allowed_hosts == ("a.example", *OWN)
    assert ServerConfig(api_keys=["k"]).listening_at("127.0.0.1").allowed_hosts == (), "no page has the key"


def test_any_host_where_that_is_said() -> None:
    with Held({"allowed_hosts": ["*"]}) as server, httpx.Client(base_url=server.live.url) as http:
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 200


def counts(http: httpx.Client) -> dict[str, float]:
    """Counts of refused requests, by status."""
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith("dgraph:refusals_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_metrics_count_refusals_by_status(http: httpx.Client) -> None:
    before = counts(http)
    asked = {
        400: lambda: complete(http, "abc", max_tokens=0),
        403: lambda: http.get("/", headers={"host": "evil.example"}),
        404: lambda: http.get("/v1/no_such_path"),
        405: lambda: http.get("/v1/completions"),
        413: lambda: complete(http, "a" * 5000),
        431: lambda: http.get("/", headers={"x-a": "a" * 70_000}),
    }
    for status, ask in asked.items():
        assert ask().status_code == status
    after = counts(http)
    assert {int(status): after[status] - before.get(status, 0) for status in after} == dict.fromkeys(asked, 1)


def test_metrics_tell_of_the_process(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"):
        assert f"\n{name} " in text


def test_the_line_of_a_refused_request_says_why(http: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    with to_stderr(True):
        complete(http, "secret", max_tokens=0)
        http.get("/v1/no_such_path")
        complete(http, "abc", model="no such model")
        http.get("/", headers={"x-a": "a" * 70_000})
        complete(http, "abc", max_tokens=4)
        assert http.get("/version").status_code == 200, "so that the line before has been written"
    log = capsys.readouterr().err
    *refusals, well, _ = map(json.loads, log.splitlines())
    assert [(line["status"], line["code"]) for line in refusals] == [
        (400, None),
        (404, "not_found"),
        (404, "model_not_found"),
        (431, "headers_too_large"),
    ]
    assert refusals[0]["error"].startswith("max_tokens: ")
    assert all(line["error"] for line in refusals)
    assert well["status"] == 200
    assert "error" not in well
    assert "secret" not in log
