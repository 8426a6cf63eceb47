"""`benchmarks/focus_speed.py`: every arm follows the schedule, and Fast-dLLM v2 goes part by part."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

import dgraph
from benchmarks.focus_speed import ARMS, SHAPE_OF_PARTS, PartsOnSchedule, measured
from dgraph.families import Model
from dgraph.models.shapes import random_model
from dgraph.runtime.stats import StepRecord

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "mask_id": 95}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}


def small(shape: str) -> Model:
    return random_model(shape, "cpu", torch.float32, block_length=16, eos_ids=(), **SMALL, **HEADS)


@pytest.mark.parametrize("label", ARMS)
def test_arms_are_measured(label: str) -> None:
    arm = ARMS[label]
    model = small(SHAPE_OF_PARTS if arm.parts else "sdar-8b")
    program = dgraph.optimize(model, arm.recipe, backend="eager", **arm.options)
    args = Namespace(prompt=16, tokens=32, steps=8, block=16, repeat=1, profile=False)
    steps, milliseconds, rows, rate, graphs = measured(program, arm, 2, args)
    assert (steps, graphs) == (16 if not arm.parts else 18, 0)  # of two blocks; and a forward that encodes each
    assert milliseconds > 0
    assert rate == pytest.approx(2 * 32 / (1e-3 * milliseconds * steps), rel=0.05)
    assert rows <= 18


def test_parts_take_a_number_of_tokens_in_each_step() -> None:
    program = dgraph.optimize(small(SHAPE_OF_PARTS), "dense", backend="eager")
    found: list[list[int]] = []

    def note(record: StepRecord) -> None:
        found.append(sorted((record.column[record.committed] % 16).tolist()))

    rule = PartsOnSchedule(threshold=1.0, cached=True, tokens=3)
    program.generate(input_ids=[[5] * 16], policy=rule, max_new_tokens=16, ignore_eos=True, observer=note)
    parts = [columns for columns in found if len(columns) > 1]
    assert [len(columns) for columns in parts] == [3, 3, 3, 3, 2]
    assert all(len({column // 8 for column in columns}) == 1 for columns in parts)
