"""DPad: what is drawn, that everything at once is the model without it, and a plain implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dgraph_methods.dpad import NearSuffix, dpad, near_suffix
from plain import about, above, decode, logits_of

import dgraph
from dgraph.errors import InputError
from dgraph.plans.regions import All
from dgraph.plans.view import View
from dgraph.testing import (
    TinyModel,
    check_against,
    check_backends_agree,
    check_batch_equals_alone,
    check_fires,
    check_lossless,
    models,
    prompts,
)

MODELS = models("bidirectional")
EVERYTHING = {"window": 10_000, "density": 1.0, "decay": 0.0}
FEW = {"window": 9, "density": 0.9, "decay": 2.0, "seed": 3}


def view(start: int = 8, sequences: int = 1, width: int = 200, block: int = 8) -> View:
    starts = torch.full((sequences,), start)
    return View(start=starts, block=block, positions=torch.arange(width), end=torch.full((sequences,), width))


def test_near_rows_stay_more_often_than_far_ones() -> None:
    found = [NearSuffix(All(), 50, 0.8, 3.0, seed).seen(view())[0] for seed in range(400)]
    share = torch.stack(found).float().mean(dim=0)
    assert (share[:16] == 1).all(), "the prompt and the block"
    assert (share[16 + 50 :] == 0).all(), "after the window"
    for distance in (1, 10, 20, 30, 50):
        wanted = 0.8 * math.exp(-0.5 * (3 * distance / 50) ** 2)
        assert share[15 + distance] == pytest.approx(wanted, abs=0.08)


def test_a_draw_belongs_to_seed_block_and_position_alone() -> None:
    region = NearSuffix(All(), 50, 0.5, 0.0, 7)
    two = region.seen(view(8, 2, 150))
    assert torch.equal(two[0], two[1])
    assert torch.equal(two[0], region.seen(view(8, 1, 200))[0, :150])
    assert not torch.equal(region.seen(view(8))[0, 24:60], region.seen(view(16))[0, 24:60])


@pytest.mark.parametrize("tiny", MODELS, ids=str)
@pytest.mark.parametrize("on", ["dense", "fast_dllm", "focus"])
def test_where_nothing_is_hidden_nothing_changes(tiny: TinyModel, on: str) -> None:
    check_lossless(tiny, "dpad", {"on": on, **EVERYTHING}, against=on)


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_with_the_prefix_cache(tiny: TinyModel) -> None:
    rows = tiny.recipe("fast_dllm", cache="prefix")
    check_lossless(tiny, near_suffix(rows, **EVERYTHING), {}, against=rows)
    check_batch_equals_alone(tiny, near_suffix(rows, **FEW), {})


@pytest.mark.parametrize("on", ["dense", "fast_dllm", "focus"])
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(on: str) -> None:
    for tiny in MODELS:
        check_batch_equals_alone(tiny, "dpad", {"on": on, **FEW})


def test_inductor_gives_the_same_tokens() -> None:
    check_backends_agree(MODELS[0], "dpad", FEW)


def oracle(tiny: TinyModel, prompt: list[int], decoding: dict[str, Any]) -> list[int]:
    """Every step forwards what exists: prompt, decoded blocks, block, and what is drawn of the rest."""
    spec = tiny.model.spec

    def forward(canvas: torch.Tensor, start: int, stop: int, number: int) -> torch.Tensor:
        drawn = NearSuffix(All(), **FEW).seen(view(start, 1, len(canvas), spec.block_length))[0]
        positions = [p for p in range(len(canvas)) if p < start + spec.block_length or drawn[p]]
        at = torch.tensor(positions)
        return about(logits_of(tiny, canvas[at], at), at, len(canvas), spec.logit_shift)

    return decode(tiny, prompt, decoding["max_new_tokens"], forward, above(decoding["threshold"]))


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_against_a_plain_implementation(tiny: TinyModel) -> None:
    check_against(tiny, "dpad", FEW, oracle)
    dense = tiny.optimized("dense").generate(input_ids=prompts(tiny), max_new_tokens=20, threshold=0.7)
    found = tiny.optimized("dpad", **FEW).generate(input_ids=prompts(tiny), max_new_tokens=20, threshold=0.7)
    assert found.token_ids != dense.token_ids
    each, of_dense = (sum(run.stats.step_rows) / sum(run.stats.sequence_steps) for run in (found, dense))
    assert each < 0.95 * of_dense, "rows of a sequence in a step"


def test_it_fires_in_every_layer() -> None:
    for tiny in MODELS:
        check_fires(tiny, "dpad", {}, "SlotKV", range(tiny.model.spec.layers))


def test_what_cannot_be() -> None:
    spec = MODELS[0].model.spec
    with pytest.raises(InputError, match="dpad: window is out of range, got 0"):
        dpad(spec, window=0)
    with pytest.raises(InputError, match="dpad: recipe 'dense' must say which rows"):
        dpad(models("block_causal")[0].model.spec)
    with pytest.raises(InputError, match="by a region that asks for no coming row"):
        near_suffix(dgraph.recipe("dkv_cache", spec, variant="greedy"), 8)


def test_it_is_a_value() -> None:
    made = dpad(MODELS[0].model.spec, **FEW)
    assert dgraph.Recipe.from_json(made.to_json()) == made
