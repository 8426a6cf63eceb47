"""WINO: that added rows change no other row, that single tokens are never taken back, and a plain implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dgraph_methods.wino import Wino, wino
from plain import llama
from torch import Tensor

import dgraph
from dgraph.errors import InputError, PassError
from dgraph.passes import AddRows, CacheKV, PackRows
from dgraph.plans.regions import Block
from dgraph.testing import (
    TinyModel,
    check_against,
    check_backends_agree,
    check_batch_equals_alone,
    check_effects,
    check_fires,
    check_lossless,
    check_ranks_agree,
    check_skips,
    models,
    prompts,
)

MODELS = models("bidirectional")
EAGER = Wino(draft=0.02, verify=0.5)  # these models are sure of little


@pytest.mark.parametrize("tiny", MODELS, ids=str)
@pytest.mark.parametrize("on", ["dense", "fast_dllm"])
def test_other_rows_do_not_see_what_is_added(tiny: TinyModel, on: str) -> None:
    check_lossless(tiny, "wino", {"on": on}, against=on)


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_one_token_a_step_is_never_taken_back(tiny: TinyModel) -> None:
    options: dict[str, Any] = {"input_ids": prompts(tiny), "max_new_tokens": 20}
    found = tiny.optimized("wino").generate(**options, policy=Wino(draft=1.0))
    assert found.token_ids == tiny.optimized("dense").generate(**options, threshold=1.0).token_ids


@pytest.mark.parametrize("on", ["dense", "fast_dllm"])
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(on: str) -> None:
    for tiny in MODELS:
        check_batch_equals_alone(tiny, "wino", {"on": on}, policy=EAGER)


def test_inductor_gives_the_same_tokens() -> None:
    check_backends_agree(MODELS[1], "wino", {}, policy=EAGER)


def test_ranks_with_some_heads_each_give_the_same_tokens() -> None:
    check_ranks_agree(MODELS[1], "wino", {}, policy=EAGER)


def test_its_pass_has_the_effect_that_it_declares() -> None:
    check_effects(MODELS[0], "wino", {})


def shadowed(tiny: TinyModel, canvas: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Probabilities [n, V] at the block's positions: of the canvas, and of a shadow block that the canvas does not see.

    A shadow row is a mask. With a logit shift it is the token before the position, and sees neither token nor itself.
    """
    spec, width, shift = tiny.model.spec, len(canvas), tiny.model.spec.logit_shift
    at = torch.arange(start, stop)
    shadow = canvas[at - 1] if shift else torch.full_like(at, spec.mask_id)
    seen = torch.zeros(width + len(at), width + len(at), dtype=torch.bool)
    seen[:, :width] = True
    for i, position in enumerate(at.tolist()):
        seen[width + i, position - shift : position + 1] = False
        seen[width + i, width + i] = True

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = (q @ k.transpose(1, 2) * spec.head_dim**-0.5).masked_fill(~seen, -torch.inf)
        return score.softmax(-1) @ v

    positions = torch.cat([torch.arange(width), at - shift])
    logits = llama(tiny, torch.cat([canvas, shadow]), attend, positions)
    logits[:, spec.mask_id] = -torch.inf
    found = logits.softmax(-1)
    return found[at - shift], found[width:]


TAKEN_BACK: list[int] = []


def oracle(tiny: TinyModel, prompt: list[int], decoding: dict[str, Any]) -> list[int]:
    """The whole canvas and a whole shadow block in each step."""
    spec, rule = tiny.model.spec, decoding["policy"]
    canvas = torch.tensor([*prompt, *[spec.mask_id] * decoding["max_new_tokens"]])
    for start in range(len(prompt), len(canvas), spec.block_length):
        stop = min(start + spec.block_length, len(canvas))
        while masks := [p for p in range(start, stop) if canvas[p] == spec.mask_id]:
            own, shadow = shadowed(tiny, canvas, start, stop)
            sure = {p: float(own[p - start].max()) for p in masks}
            order = sorted(masks, key=lambda p: -sure[p])
            most = min(max(7 * len(masks) // 10, 5), 20)
            drafts = [p for p in order[:most] if sure[p] > rule.draft] or order[:1]
            likely = {p: float(shadow[p - start, canvas[p]]) for p in range(start, stop) if p not in masks}
            doubted = sorted((p for p in likely if likely[p] < rule.verify), key=lambda p: likely[p])
            for p in drafts:
                canvas[p] = own[p - start].argmax()
            back = doubted[: max(len(drafts) - 1, 0)]
            canvas[back] = spec.mask_id
            TAKEN_BACK.extend(back)
        if set(canvas[start:stop].tolist()) & set(spec.eos_ids):
            break
    response = canvas[len(prompt) :].tolist()
    return response[: next((i for i, t in enumerate(response) if t in (*spec.eos_ids, spec.mask_id)), len(response))]


@pytest.mark.parametrize("verify", [0.05, 0.5])
@pytest.mark.parametrize("tiny", models("bidirectional", "dream", "llada"), ids=str)  # of which `llama` is the forward
def test_against_a_plain_implementation(tiny: TinyModel, verify: float) -> None:
    TAKEN_BACK.clear()
    check_against(tiny, "wino", {}, oracle, policy=replace(EAGER, verify=verify))
    assert len(TAKEN_BACK) >= 5


def test_rows_for_masks_verify_nothing() -> None:
    """The published shadow block has a row for each position: more rows, and the same tokens."""
    for tiny in MODELS:
        mine = tiny.recipe("wino")
        assert mine.plan is not None
        every = replace(mine, plan=replace(mine.plan, added=Block()))
        runs = [
            tiny.optimized(r).generate(input_ids=prompts(tiny), max_new_tokens=20, policy=EAGER) for r in (mine, every)
        ]
        assert runs[0].token_ids == runs[1].token_ids
        assert sum(runs[0].stats.step_rows) < sum(runs[1].stats.step_rows)


def test_it_fires_in_every_layer_and_says_where_it_cannot() -> None:
    for tiny in MODELS:
        check_fires(tiny, "wino", {}, "AddRows", range(tiny.model.spec.layers))
    check_skips(MODELS[0], (), AddRows(), "attention over a padded batch")
    for on in ("dyllm", "dllm_cache", "focus"):
        with pytest.raises(PassError, match="some rows are added, and stand at the positions of others"):
            MODELS[0].optimized("wino", on=on)


def test_what_cannot_be() -> None:
    with pytest.raises(InputError, match="wino: 'dense' on sdar has no row plan"):
        wino(models(None, "sdar")[0].model.spec)
    with pytest.raises(InputError, match=r"verify is a probability in \[0, 1\], got 1\.5"):
        Wino(verify=1.5)
    with pytest.raises(InputError, match=r"Wino: needs added, got none; it takes a row plan that adds rows"):
        MODELS[0].optimized("dense").generate(input_ids=prompts(MODELS[0]), max_new_tokens=8, policy=Wino())


def test_it_is_a_value() -> None:
    made = wino(MODELS[0].model.spec)
    assert dgraph.Recipe.from_json(made.to_json()) == made
    assert "added=Decoded()" in repr(made.plan)
    assert (PackRows(), AddRows()) == (made.phases[0].passes[0], made.phases[0].passes[3])
    assert made.phases[0].passes[2] == CacheKV()
