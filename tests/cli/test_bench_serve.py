"""`dgraph bench serve`: its tables, its files, what it refuses."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from dgraph.compiler import base_graph as captured
from tests.cli.conftest import Run
from tests.cli.refusals import refused

SMALL = ("--backend", "eager", "--requests", 6, "--prompt", "uniform:5-20", "--tokens", "uniform:4-12", "--steps", 3)
SLOTS = ("--sequences", 2, "--block", 8, "--ignore-eos")


@pytest.fixture(autouse=True)
def captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "capture_or_load", functools.cache(captured.capture_or_load))


def test_policies_at_a_share_of_the_capacity(run: Run, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ("--json", "out.json", "--plot", "out.png")
    policies = ("--scheduler", "fcfs", "--scheduler", "static")
    result = run(
        "bench", "serve", "--model", folder, *SMALL, *SLOTS, "--load", "0.5,2", *policies, "--limit", 9, *files
    )
    assert result.exit_code == 0, result.stderr
    tables = result.stdout.strip().split("\n\n")
    titles = [table.splitlines()[0].split() for table in tables]
    assert titles[0][:5] == ["scheduler", "load", "offered/s", "served/s", "tok/s"]
    assert {"fill", "sat", "gave", "refresh"} <= set(titles[1])
    for table in tables:
        rows = [line.split()[:2] for line in table.splitlines()[1:]]
        assert rows == [["fcfs", "capacity"], *([name, load] for load in ("0.5", "2") for name in ("fcfs", "static"))]
    found = json.loads((tmp_path / "out.json").read_text())
    capacity, *under = found["loads"]
    assert capacity["clients"] == 2
    assert {"p50", "p99", "sigma", "span", "goodput", "queue_mean", "first_p99"} <= set(capacity)
    for one in under:
        assert one["engine"]["finished"] == {"length": 6}
        assert len(one["requests_each"]) == 6
    assert under[0]["tokens"] == under[3]["tokens"] == capacity["tokens"]
    dues = [[request[0] for request in one["requests_each"]] for one in under]
    assert dues[0] == pytest.approx(dues[1]), "every scheduler has the same requests at the same times"
    assert dues[2][-1] == pytest.approx(dues[0][-1] / 4)
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_clients_and_a_trace(run: Run, folder: Path) -> None:
    small = ("bench", "serve", "--model", folder, "--backend", "eager", "--steps", 3, *SLOTS)
    lines = [json.dumps({"arrival": 0.02 * place, "prompt": 30, "new": 8}) for place in range(3)]
    Path("trace.jsonl").write_text("\n".join(lines))
    result = run(*small, "--trace", "trace.jsonl", "--max-tokens", 24)
    assert result.exit_code == 0, result.stderr
    assert "3 of 3 prompts are cut" in result.stderr
    assert ["look_ahead", "trace"] in [line.split()[:2] for line in result.stdout.splitlines()]
    result = run(*small, "--trace", "trace.jsonl", "--clients", "1,2", "--recipe", "focus", "--weights", "int8")
    assert result.exit_code == 0, result.stderr
    rows = [line.split()[:3] for line in result.stdout.splitlines()]
    assert ["look_ahead", "1", "clients"] in rows
    assert ["look_ahead", "2", "clients"] in rows


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--load", "0.5", "--clients", "4"), "give one of --load, --rate and --clients."),
        (("--clients", "1.5"), "--clients takes whole numbers above 0 with commas, as 1,4,16, got '1.5'."),
        (("--rate", "0"), "--rate takes numbers above 0 with commas, as 0.5,1, got '0'."),
        (("--sequences", 0), "max_sequences must be a whole number, at least 1, got 0."),
        (("--requests", 0), "--requests must be at least 1, got 0."),
        (("--warm-share", 1), "--warm-share must be from 0 to below 1, got 1.0."),
        (("--shared", -1), "--shared must be at least 0 tokens, got -1."),
        (("--scheduler", "static", "--scheduler", "lucky"), "unknown scheduler 'lucky'"),
        (("--kv", "much"), "--kv is a size such as 500M or 4G, got 'much'."),
        (("--json", "nowhere/out.json"), "--json nowhere/out.json cannot be written: there is no folder nowhere."),
        (("--json", "."), "--json . cannot be written: it is a folder."),
        (("--trace", "none.jsonl"), "trace none.jsonl"),
        (("--weights", "int3"), "unknown format of weights 'int3'"),
        (("--arrivals", "never"), "arrivals are poisson, gamma:CV or constant, got 'never'."),
    ],
)
def test_what_it_refuses(run: Run, folder: Path, arguments: tuple[object, ...], said: str) -> None:
    small = ("--requests", 2) if "--requests" not in arguments else ()
    refused(run("bench", "serve", "--model", folder, *small, *arguments), said)


def test_it_needs_a_model(run: Run) -> None:
    refused(run("bench", "serve"), "give either --model or --shape, not both and not neither.")
