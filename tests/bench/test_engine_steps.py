"""benchmarks.engine_steps: how long kernels ran, and where none did; batches are written one by one."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import engine_steps
from benchmarks.engine_steps import EngineSteps, Waits, waits_between
from dgraph.testing import models


def test_waits_are_what_no_kernel_covers() -> None:
    apart = [(100.0 * i, 100.0 * i + 60.0, "ab"[i % 2]) for i in range(8)]
    beside = [(20.0, 50.0, "within"), (0.0, 60.0, "alike")]
    assert waits_between(apart[::-1] + beside).busy == pytest.approx(8 * 60e-6)
    waits = waits_between(apart)  # the middle half is of kernels 2 to 5
    assert waits.share == pytest.approx(3 * 40 / 360)
    assert waits.between == [("a", "b", 2, 80.0), ("b", "a", 1, 40.0)]


def test_the_device_is_idle_where_no_kernel_ran_between_the_first_graph_and_the_last() -> None:
    found = EngineSteps(seconds=3.0, steps=10, tokens=40)
    assert found.idle is None
    assert found.cells() == [300, pytest.approx(40 / 3), "-", "-"]
    traced = replace(found, span=2.0, waits=Waits(busy=1.9, share=0.2, between=[]))
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
