"""Lengths, arrivals and traces, and what is said of requests that were served."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from dgraph.bench.arrivals import Lengths, Request, arrivals, drawn, read_trace
from dgraph.engine.io.timings import Served, quantile, summarise
from dgraph.errors import InputError


def test_lengths(tmp_path: Path) -> None:
    assert Lengths("12").draw(3) == [12, 12, 12]
    uniform = Lengths("uniform:5-9").draw(50)
    assert uniform == Lengths("uniform:5-9").draw(50)
    assert set(uniform) == {5, 6, 7, 8, 9}
    found = sorted(Lengths("lognormal:100,0.5").draw(99))
    assert 80 < found[49] < 125
    file = tmp_path / "lengths.jsonl"
    file.write_text('7\n{"prompt": 11}\n\n')
    assert Lengths(str(file)).draw(3) == [7, 11, 7]
    file.write_text('"seven"\n')
    for text in ("many", "uniform:9-5", "uniform:5", "lognormal:0,1", "0", str(file), "gamma:1-2"):
        with pytest.raises(InputError, match="--prompt"):
            Lengths(text).draw(2)
        with pytest.raises(InputError, match="--tokens"):
            Lengths(text, "--tokens").draw(2)


@pytest.mark.parametrize(
    ("text", "variation"), [("poisson", 1.0), ("gamma:2", 2.0), ("gamma:0.5", 0.5), ("constant", 0.0)]
)
def test_arrivals(text: str, variation: float) -> None:
    times = arrivals(text, 4.0, 4000)
    assert times == arrivals(text, 4.0, 4000)
    assert text == "constant" or times != arrivals(text, 4.0, 4000, seed=1)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25 * variation, rel=0.15, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "rate", "message"),
    [
        ("poison", 1.0, "arrivals are poisson, gamma:CV or constant, got 'poison'"),
        ("gamma:", 1.0, "gamma:CV needs a positive number"),
        ("gamma:0", 1.0, "gamma:CV needs a positive number"),
        ("gamma:-1", 1.0, "gamma:CV needs a positive number"),
        ("poisson", 0.0, "the rate must be a positive number of requests per second, got 0"),
        ("poisson", math.inf, "must be a positive number"),
    ],
)
def test_arrivals_that_make_no_sense(text: str, rate: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        arrivals(text, rate, 3)


def test_prompts_and_responses_are_drawn_apart() -> None:
    found = drawn([1.0] * 40, Lengths("uniform:1-99"), Lengths("uniform:1-99", "--tokens"))
    assert [r.prompt for r in found] != [r.new for r in found]


def test_traces(tmp_path: Path) -> None:
    lines = tmp_path / "trace.jsonl"
    lines.write_text(
        '{"arrival": 2.5, "prompt": 7, "new": 3, "priority": 1}\n\n{"arrival": 0, "prompt": 4, "new": 5}\n'
    )
    assert read_trace(lines) == [Request(0, 4, 5), Request(2.5, 7, 3, 1)]
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45.5,ChatGPT,1087,230,1317,Conversation log\n"
    )
    assert read_trace(burst) == [Request(5.0, 472, 18), Request(45.5, 1087, 230)]


@pytest.mark.parametrize(
    "text",
    ["{}", "[1, 2, 3]", "{", '{"arrival": 0, "prompt": 0, "new": 3}', '{"arrival": 0, "prompt": 1.5, "new": 3}', ""],
)
def test_a_trace_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=r"trace .*trace\.jsonl"):
        read_trace(file)
    with pytest.raises(InputError, match=r"missing\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "missing.jsonl")


def test_a_summary() -> None:
    served = [Served(float(i), i + 0.5, i + 1.0, i + 2.0 + i, tokens=10) for i in range(4)]  # latencies 2, 3, 4, 5
    found = summarise(reversed(served), limit=3.5)  # type: ignore[arg-type]
    assert (found.requests, found.tokens, found.seconds) == (4, 40, 8.0)
    assert (found.mean, found.p50, found.p99, found.span) == (3.5, 3.0, 5.0, 3.0)
    assert found.sigma == pytest.approx(statistics.pstdev([2, 3, 4, 5]))
    assert (found.queue_mean, found.first_mean, found.first_p99) == (0.5, 1.0, 1.0)
    assert (found.tokens_per_second, found.goodput) == (5.0, 0.25)
    late = summarise(served, warm_up=0.5)
    assert (late.mean, late.tokens, late.goodput) == (4.5, 40, None)
    json.dumps(late.to_json())


def test_quantiles_are_values_that_occurred() -> None:
    values = list(range(1, 101))
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
