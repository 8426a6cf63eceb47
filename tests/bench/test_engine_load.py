"""`benchmarks/engine_load.py`: every part on a small model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dgraph
from benchmarks.engine_load import main, products_seconds
from dgraph.bench.floor import Device, work_of
from dgraph.bench.products import Shape
from dgraph.engine.stats import EngineStats
from tests.cli.folders import write_checkpoint

NOTHING = EngineStats(0, 0, {}, 0, 0, 0, 0, 0, {}, {}, 0, 0.0, 0, 0, 0, 0)


@pytest.mark.release
def test_all_parts_are_measured_and_written(tmp_path: Path) -> None:
    model = ("--model", str(write_checkpoint(tmp_path / "small")), "--recipe", "dense", "--backend", "eager")
    load = ("--requests", "6", "--prompt", "uniform:5-20", "--tokens", "uniform:4-12", "--load-requests", "4")
    arms = ("--sequences", "2", "--policies", "look_ahead", "static", "--clients", "1", "2", "--load", "0.9")
    out = tmp_path / "out.json"
    main([*model, *load, *arms, "--block", "8", "--steps", "8", "--device", "cpu", "--json", str(out)])
    offline, policies, clients = json.loads(out.read_text())["tables"]
    assert [row[0] for row in offline["rows"]] == ["generate, batches of 2", "engine, static", "engine, look_ahead"]
    ratio = offline["columns"].index("ratio")
    assert offline["rows"][1][ratio] == 1
    assert [row[:2] for row in policies["rows"]] == [["look_ahead", 0.9], ["static", 0.9]]
    assert [row[0] for row in clients["rows"]] == [1, 2]
    floor = clients["columns"].index("floor %")
    assert all(row[floor] > 0 for row in clients["rows"])


class OneSecondARow(Device):
    """A device on which each product takes so many seconds as it has rows."""

    def measure(self, shape: Shape, dtype: torch.dtype, counts: Iterable[int]) -> None:
        """Nothing is."""

    def product(self, shape: Shape, dtype: torch.dtype, rows: int) -> float:
        return float(rows)


def test_the_floor_counts_products_of_each_stage_and_of_prompts() -> None:
    program = dgraph.optimize("tiny_sdar", "focus", backend="eager")
    stats = replace(NOTHING, steps=10, rows={"prefix": 300, "suffix": 80}, refresh_rows=50)
    device = OneSecondARow(torch.device("cpu"), _bandwidth=float("inf"))
    before, after = (sum(found.values()) for found in work_of(program.graph("step")).products)
    (prompt,) = (sum(found.values()) for found in work_of(program.graph("prefill")).products)
    expected = 300 * before + 80 * after + 50 * prompt
    assert products_seconds(program, stats, device) == pytest.approx(expected)
    assert before + after == 48
