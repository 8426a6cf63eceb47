"""benchmarks.engine_steps: how long kernels ran, and where none did; batches are written one by one."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import engine_steps
from benchmarks.engine_steps import EngineSteps, Span, Waits, span_of, waits_between
from dgraph.runtime.decoding import Decoding
from dgraph.testing import models


def test_waits_are_what_no_kernel_covers() -> None:
    apart = [(100.0 * i, 100.0 * i + 60.0, "ab"[i % 2]) for i in range(8)]
    beside = [(20.0, 50.0, "within"), (0.0, 60.0, "alike")]
    assert waits_between(apart[::-1] + beside).short == 0
    at_once = [(start / 4, stop / 4, name) for start, stop, name in apart]
    assert waits_between(at_once[::-1]).short == pytest.approx(7 * 10e-6)
    waits = waits_between(apart)  # the middle half is of kernels 2 to 5
    assert waits.share == pytest.approx(3 * 40 / 360)
    assert waits.between == [("a", "b", 2, 80.0), ("b", "a", 1, 40.0)]


class Clocked:
    """Stands for an event on a device: a number of milliseconds on a clock that a test moves."""

    now = 0.0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = Clocked.now

    def elapsed_time(self, other: Clocked) -> float:
        return other.at - self.at


def test_a_device_waits_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def replay(self) -> None:
            Clocked.now += 10.0

    class Answering:
        def generate(self, prompts: object, decoding: object) -> None:
            for pause in (0.0, 0.5, 0.01, 2.0):
                Clocked.now += pause
                torch.cuda.CUDAGraph.replay(Graph())  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "Event", Clocked)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", Graph.replay)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-3 * next(ticks))  # so that a launch takes the host 1 ms
    span = span_of(Answering(), [[1]], Decoding())  # type: ignore[arg-type]
    assert span.seconds == pytest.approx(42.51e-3)
    assert span.waiting == pytest.approx((0.5 + 0.01 + 2.0 + 2 * 1.0) * 1e-3), "a short pause needs no launch"
    assert torch.cuda.CUDAGraph.replay is Graph.replay  # type: ignore[comparison-overlap]


def test_the_device_is_idle_between_graphs_and_between_their_kernels() -> None:
    found = EngineSteps(seconds=3.0, steps=10, tokens=40)
    assert found.idle is None
    assert found.cells() == [300, pytest.approx(40 / 3), "-", "-"]
    traced = replace(found, span=Span(2.0, waiting=0.06), waits=Waits(short=0.04, share=0.2, between=[]))
    assert traced.idle == pytest.approx(0.05)
    assert traced.cells()[2:] == [pytest.approx(5), 20]


def test_batches_are_written_until_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny,) = models(None, "sdar")
    monkeypatch.setattr(engine_steps, "random_model", lambda *given, **changes: tiny.model)
    began, waits_table = time.perf_counter, engine_steps.waits_table

    def over(*given: object) -> None:
        waits_table(*given)
        monkeypatch.setattr(time, "perf_counter", lambda: began() + 1e6)

    monkeypatch.setattr(engine_steps, "waits_table", over)
    small = ("--prompt", "9", "--tokens", "8", "--steps", "8", "--repeat", "1", "--backend", "eager", "--device", "cpu")
    out = tmp_path / "out.json"
    recipe = ("--recipe", "dense", "--batch", "2", "3")
    engine_steps.main([*small, *recipe, "--seconds", "1e5", "--json", str(out)])
    found = json.loads(out.read_text())
    start, steps, notes = found["tables"]
    assert start["columns"] == ["weights", "optimize"]
    assert [row[0] for row in steps["rows"]] == [2]
    assert found["data"]["engine"]["2"]["tokens"] == 2 * 16
    assert notes["rows"] == [["3 sequences: not begun after 100000 s"]]
