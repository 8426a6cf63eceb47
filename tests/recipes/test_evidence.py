"""Evidence that installs with the package: equal to the records that it is from, and found by its setting."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dgraph.recipes.evidence import Measured, formats, losses, nearest, speeds

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "records"


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text("utf-8"))
    return found


def number(of: dict[str, Any], row: int, column: str) -> float:
    return float(of["rows"][row][of["columns"].index(column)].split()[0].replace(",", ""))


@pytest.mark.parametrize("arm", speeds(), ids=lambda arm: f"{arm.record}-{arm.row}-{arm.recipe}-{arm.sequences}")
def test_an_arm_has_the_figures_of_its_record(arm: Measured) -> None:
    of = record(arm.record)
    assert [asdict(arm)[name] for name in ("hardware", "commit", "date")] == [
        of[name] for name in ("hardware", "commit", "date")
    ]
    if arm.speed_column is None:
        assert arm.speed is None
    else:
        by = 1.0 if arm.over is None else number(of, arm.over, arm.speed_column)
        assert arm.speed == round(number(of, arm.row, arm.speed_column) / by, 2)
    rows = None if arm.rows_column is None else number(of, arm.row, arm.rows_column)
    assert arm.rows_per_token == rows
    named = " ".join(of["rows"][arm.row][:2]).replace("Table 4", "dyllm")
    assert all(part in named for part in arm.recipe.split("+"))


def test_costs_of_formats_are_those_of_their_record() -> None:
    for cost in formats().values():
        of = record(cost.record)
        assert of["rows"][cost.row][of["columns"].index(cost.column)] == cost.cell
        assert (cost.hardware, cost.commit, cost.date) == (of["hardware"], of["commit"], of["date"])
        assert cost.column.startswith(cost.format)


def test_the_nearest_setting_is_found_and_its_best_arm_comes_first() -> None:
    many = nearest("block_causal", "cuda", 48, 1024)
    assert [(arm.recipe, arm.sequences) for arm in many] == [("focus", 64), ("dense", 64)]
    assert many[0].rows_per_token == 3.08
    assert nearest("block_causal", "cuda", 1, 256)[0].recipe == "dense"  # focus is no faster for one client
    assert nearest("bidirectional", "cuda", 1, 30000)[0].recipe == "maskkv+fast_dllm"
    assert [arm.recipe for arm in nearest("bidirectional", "cuda", 16, 1024, ("dllm_cache",))] == ["dllm_cache"]
    assert nearest("block_causal", "mps", 1, 128) == []


def test_a_combination_loses_what_its_parts_lose() -> None:
    assert losses("focus") == []
    assert [cost.points for cost in losses("dllm_serve+focus")] == [-0.8]
