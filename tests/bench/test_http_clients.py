"""`benchmarks/http_clients.py`: what is read of a client's files, and a client that fails."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import http_clients

AIPERF = {
    "request_throughput": {"avg": 2.0},
    "output_token_throughput": {"avg": 128.0},
    "request_count": {"avg": 24.0},
    "time_to_first_token": {"p50": 30.0},
    "request_latency": {"p50": 400.0, "p99": 900.0},
    "error_summary": [{"count": 1}],
}


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def served(model: str, recipe: str, more: Sequence[str]) -> Iterator[tuple[str, str]]:
        yield "http://127.0.0.1:1", model

    monkeypatch.setattr(http_clients, "served", served)


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_what_a_client_says_is_read_and_written(tmp_path: Path) -> None:
    found = tmp_path / "profile_export_aiperf.json"
    found.write_text(json.dumps(AIPERF))
    copies = 'while [ "$1" != --artifact-dir ]; do shift; done; cp ' + f'{found} "$2"/'
    out = tmp_path / "out.json"
    http_clients.main(["--aiperf", str(program(tmp_path / "aiperf", copies)), "--json", str(out)])
    (table,) = json.loads(out.read_text())["tables"]
    expected: list[Any] = ["aiperf", 24, 1, 2.0, 128.0, 30.0, 400.0, 900.0]
    assert table["rows"] == [expected]


def test_a_client_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)guidellm failed.*no such option"):
        http_clients.main(["--guidellm", str(program(tmp_path / "guidellm", "echo no such option; exit 3"))])


def test_at_least_one_client(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        http_clients.main([])
    assert "--aiperf" in capsys.readouterr().err
