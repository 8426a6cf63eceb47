"""`dgraph serve` as a process: its line, its log, its signals; and what it refuses before it loads anything."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from dgraph.cli.app import app
from dgraph.serve.host import bind
from tests.serve.asking import SORTED, chat, refused
from tests.serve.live import WAIT


@pytest.mark.release
def test_from_the_command_to_the_signal(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("first\n\nsecond\n")
    command = ["serve", "--port", "0", "--backend", "eager", "--api-key-file", str(keys), "--served-model-name", "mine"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dgraph", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DGRAPH_API_KEY": "third, fourth"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"dgraph serves mine at (http://127\.0\.0\.1:\d+)\n", line)
        assert found is not None, line or process.communicate()[1]
        assert process.stdout.readline() == f"ready {found[1]}\n"
        with httpx.Client(base_url=found[1], timeout=WAIT) as http:
            assert refused(chat(http), 401)
            http.headers["authorization"] = "Bearer fourth"
            answer = http.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "Sort these words: river stone cloud maple"}]},
                headers={"x-request-id": "mine-1"},
            )
            assert answer.json()["choices"][0]["message"]["content"] == SORTED
            assert http.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        rest, log = process.communicate(timeout=WAIT)
    finally:
        process.kill()
    assert (process.returncode, rest) == (0, "")
    first, second = (json.loads(line) for line in log.splitlines())
    assert (first["status"], first["path"], first["method"]) == (401, "/v1/chat/completions", "POST")
    assert (first["code"], "asks for a key" in first["error"]) == ("invalid_api_key", True)
    assert (second["status"], second["request_id"], second["client"]) == (200, "mine-1", "127.0.0.1")
    assert (second["model"], second["stream"], second["finish"]) == ("mine", False, ["stop"])
    assert second["completion_tokens"] < second["prompt_tokens"] < 20
    assert 0 <= second["queue_seconds"] <= second["first_seconds"] <= second["seconds"]
    assert "river" not in log
    assert "fourth" not in log


def test_sigterm_before_there_is_a_server_ends_the_command_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr("dgraph.serve.check_installed", lambda: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    result = CliRunner().invoke(app, ["serve"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "stopped before the server had begun to load.\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--recipe", "focsu"], "unknown recipe 'focsu'. Did you mean 'focus'?"),
        (["-r", "focus", "-r", "dense", "-o", "alhpa=1"], "unknown option"),
        (["-r", "focus", "-r", "dense", "--device", "cuda"], "say with --kv how much each has"),
        (["--scheduler", "fifo"], "unknown scheduler 'fifo'"),
        (["--max-sequences", "0"], "max_sequences must be a whole number, at least 1, got 0"),
        (["--max-mixed-rows", "-1"], "max_mixed_rows must be a whole number, at least 0"),
        (["--max-body", "much"], "--max-body is a size such as 500M or 4G"),
        (["--keep-alive", "0"], "keep_alive must be a positive number of seconds"),
        (["--header-timeout", "0"], "header_timeout must be a positive number of seconds"),
        (["--max-connections", "0"], "max_connections must be a whole number, at least 1"),
        (["--allowed-host", " "], "allowed_hosts is a list of texts, none of them empty"),
        (["--allowed-host", "example.org:8000"], "without a scheme and a port; got 'example.org:8000'"),
        (["--allowed-host", "https://example.org"], "without a scheme and a port; got 'https://example.org'"),
        (["--allowed-host", "::1"], "addresses as [::1]"),
        (["--host", "no.such.host.invalid"], "Choose another --host or --port"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout must be at least 0 seconds"),
        (["--port", "65536"], "a port is a number from 0 to 65535, got 65536"),
        (["--api-key", " "], "api_keys is a list of texts, none of them empty"),
        (["--api-key-file", "no such file"], "--api-key-file no such file cannot be read"),
        (["--api-key-file", os.devnull], "has no key; write one per line, or leave it out"),
        (["no_such_model", "--port", "0"], "unknown model 'no_such_model'"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *args])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken_is_told_before_a_model_is_read() -> None:
    with bind("127.0.0.1", 0) as taken:
        result = CliRunner().invoke(app, ["serve", "no_such_model", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2
    assert re.search(
        r"cannot listen at 127\.0\.0\.1:\d+: Address already in use\. Choose another --host or --port", result.stderr
    )
