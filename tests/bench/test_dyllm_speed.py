"""The benchmark of DyLLM runs on a small model: baselines and its own arms, in tables by tokens per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dyllm_speed

SIZES = "--layers 2 --batch 2 --prompt 12 --tokens 16 --block 8 --original-steps 1 --repeat 1"


def measured(out: Path, *arguments: str) -> dict[str, Any]:
    """The tables of a run on a small model, by title."""
    given = [*SIZES.split(), "--backend", "eager", "--device", "cpu", "--json", str(out), *arguments]
    assert dyllm_speed.main(given) == 0
    return {table["title"]: table for table in json.loads(out.read_text(encoding="utf-8"))["tables"]}


def test_every_arm_is_in_each_table(tmp_path: Path) -> None:
    arms = ("fast_dllm:cache=prefix", "dllm_cache", "table", "tau")
    tables = measured(tmp_path / "out.json", "--arms", *arms, "--per-step", "4", "8", "--update", "off")
    for per_step, steps in ((4, 4), (8, 2)):
        table = tables[f"2 sequences, prompt 12, 16 new tokens, {per_step} per step"]
        assert table["columns"] == [*dyllm_speed.COLUMNS]
        assert [row[:2] for row in table["rows"]] == [
            ["original loop", ""],
            ["fast_dllm prefix", ""],
            ["dllm_cache", "50/7"],
            ["dyllm, rows of Table 4, all attend", "4/4"],
            ["dyllm, tau of the family, all attend", "4/4"],
        ]
        assert [row[2] for row in table["rows"][1:]] == [steps] * 4
        assert all(row[5] > 0 for row in table["rows"])


@pytest.mark.parametrize(("shape", "intervals", "tau"), [("llada-8b", "50/7", 0.99), ("dream-7b", "25/2", 0.995)])
def test_baselines_and_thresholds_are_those_of_the_shape(shape: str, intervals: str, tau: float) -> None:
    args = dyllm_speed.parser_of().parse_args([*SIZES.split(), "--shape", shape, "--arms", "dllm_cache", "tau"])
    cached, dyllm = dyllm_speed.arms_of(dyllm_speed.model_of(args), args)
    assert cached.schedule == intervals
    assert {p.tau for p in dyllm.recipe.phase("step").passes if hasattr(p, "tau")} == {tau}


def test_a_run_whose_time_is_over_begins_no_arm(tmp_path: Path) -> None:
    tables = measured(tmp_path / "out.json", "--arms", "dllm_cache", "fast_dllm", "--seconds", "0")
    assert [row[0] for row in tables["Notes"]["rows"]] == [
        "dllm_cache: not begun after 0 s",
        "fast_dllm dual: not begun after 0 s",
    ]
