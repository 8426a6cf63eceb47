"""`dgraph simulate`: its table, its JSON, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dgraph.engine.scheduling.schedulers import SCHEDULERS
from tests.cli.conftest import Run

SMALL = ("--requests", 40, "--prompt", "uniform:32-256", "--tokens", 64, "--rows", 1024, "--sequences", 8)


def test_a_table_with_a_row_per_scheduler(run: Run) -> None:
    result = run("simulate", "--rate", 20, *SMALL)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("40 requests, ")
    assert lines[2].split()[:4] == ["scheduler", "tok/s", "mean", "s"]
    assert [line.split()[0] for line in lines[3:]] == list(SCHEDULERS)


def test_json_has_all_that_was_found(run: Run) -> None:
    chosen = ("--scheduler", "fcfs", "--scheduler", "look_ahead")
    settings = ("--clients", 8, "--causal", "--by-block", "--limit", 5)
    result = run("simulate", *SMALL, *chosen, *settings, "--commits", 4, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [p["scheduler"] for p in found["schedulers"]] == ["fcfs", "look_ahead"]
    for one in found["schedulers"]:
        assert one["counters"]["finished"] == one["requests"] == found["requests"] == 40
        assert one["tokens"] == 40 * 64
        assert one["goodput"] > 0
        assert {"p99", "queue_mean", "first_mean", "fill", "tokens_per_second"} <= set(one)


def test_prompts_are_mixed_as_by_the_engine(run: Run) -> None:
    told = [("--causal",), ("--causal", "--mixed", 512), ("--causal", "--mixed", 0)]
    default, same, none = (run("simulate", "--rate", 20, *SMALL, *settings, "--json").stdout for settings in told)
    assert default == same != none


def test_refreshes_and_buckets(run: Run) -> None:
    def found(*settings: object) -> dict[str, float]:
        result = run("simulate", "--rate", 20, *SMALL, "--commits", 2, "--scheduler", "fcfs", *settings, "--json")
        assert result.exit_code == 0, result.stderr
        (one,) = json.loads(result.stdout)["schedulers"]
        return {"refresh": one["counters"]["refresh_rows"], "busy": one["busy"], "steps": one["steps"]}

    once, twice, bare = found(), found("--full-steps", 2), found("--buckets", "exact")
    assert twice["refresh"] == 2 * once["refresh"]
    assert bare["busy"] / bare["steps"] < once["busy"] / once["steps"]
    refused = run("simulate", "--rate", 20, *SMALL, "--buckets", "round")
    assert refused.exit_code == 2
    assert "buckets must be" in refused.stderr


def test_a_trace_and_a_cost_model_from_files(run: Run) -> None:
    Path("trace.jsonl").write_text('{"arrival": 0, "prompt": 64, "new": 32}\n{"arrival": 9, "prompt": 64, "new": 32}\n')
    Path("costs.json").write_text('{"rows": [1], "seconds": [0.0], "constant": 1.0}')
    result = run(
        "simulate", "--trace", "trace.jsonl", "--costs", "costs.json", "--commits", 8, "--scheduler", "fcfs", "--json"
    )
    assert result.exit_code == 0, result.stderr
    (one,) = json.loads(result.stdout)["schedulers"]
    assert (one["steps"], one["p50"], one["seconds"]) == (8, 4.0, 13.0)


def test_requests_that_never_fit_are_one_line_of_warning(run: Run) -> None:
    result = run("simulate", "--rate", 20, *SMALL, "--rows", 200)
    assert result.exit_code == 0
    assert result.stdout.startswith("40 requests")
    (line,) = result.stderr.splitlines()
    assert "of 40 requests are refused, as the first one: request " in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give --trace, or --rate, or --clients"),
        (("--rate", 1, "--clients", 2), "only one of the last two"),
        (("--trace", "x.csv", "--rate", 1), "leave out --requests and --rate"),
        (("--trace", "x.csv"), "trace x.csv"),
        (("--rate", 0), "the rate must be a positive number"),
        (("--rate", 1, "--arrivals", "burst"), "arrivals are poisson, gamma:CV or constant"),
        (("--rate", 1, "--requests", 0), "--requests must be at least 1, got 0"),
        (("--rate", 1, "--scheduler", "fifo"), "unknown scheduler 'fifo'"),
        (("--rate", 1, "--prompt", "many"), "--prompt takes a number of tokens"),
        (("--rate", 1, "--tokens", "many"), "--tokens takes a number of tokens"),
        (("--rate", 1, "--commits", "drown:4"), "--commits takes a whole number of tokens, or drawn:MEAN"),
        (("--rate", 1, "--commits", "1.5"), "whole unless drawn, got 1.5"),
        (("--rate", 1, "--causal", "--refresh-every", 4), "refresh_every is for bidirectional models"),
        (("--rate", 1, "--mixed", 8), "mixed is for block-causal models"),
        (("--rate", 1, "--rows", 100), "more than the 100 of max_batched_rows"),
        (("--rate", 1, "--pages", 1), "of the KV pool"),
        (("--rate", 1, "--sequences", 0), "budget of sequences must be a whole number, at least 1, got 0"),
        (("--rate", 1, "--costs", "none.json"), "cost model none.json cannot be read"),
    ],
)
def test_bad_input_is_one_line(run: Run, args: tuple[object, ...], message: str) -> None:
    result = run("simulate", *args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in " ".join(result.stderr.split())


def test_the_command_line_takes_its_old_option(run: Run) -> None:
    few = ("--requests", 4, "--rate", 20, "--prompt", 8, "--tokens", 4, "--block", 4, "--json")
    told = "--policy of this command is --scheduler since version 0.2"
    result = run("simulate", *few, "--scheduler", "fcfs", "--policy", "static")
    assert result.exit_code == 0, result.stderr
    assert told in result.stderr
    assert [one["scheduler"] for one in json.loads(result.stdout)["schedulers"]] == ["fcfs", "static"]
    refused = run("serve", "tiny_sdar", "--policy", "lifo")
    assert refused.exit_code == 2
    assert told in refused.stderr
    assert "unknown scheduler 'lifo'" in refused.stderr
    assert "--policy" not in run("serve", "--help").stdout
