"""DAEDAL: the threshold that it is without growth, and a plain implementation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from dgraph_methods.daedal import Daedal

from dgraph.errors import InputError
from dgraph.runtime.policies import ConfidenceThreshold, policy_of
from dgraph.testing import TinyModel, check_against, check_batch_equals_alone, models, prompts

MODELS = models("bidirectional", "llada", "dream")
STILL = Daedal(0.4, first=20, begin=0.0, more=0, unsure=0.0, tail=4)
RULE = Daedal(0.6, first=6, growth=3, more=2, begin=0.1, steady=0.9, unsure=0.4, tail=5, end_ids=tuple(range(20, 45)))
"""Ids that the random models predict now and then stand for the end."""


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_without_growth_it_is_a_threshold_after_one_step(tiny: TinyModel) -> None:
    made, options = tiny.optimized("dense"), {"input_ids": prompts(tiny), "max_new_tokens": 20}
    found, want = (made.generate(**options, policy=rule) for rule in (STILL, ConfidenceThreshold(0.4)))
    assert found.token_ids == want.token_ids
    assert found.stats.steps == want.stats.steps + 1


@pytest.mark.parametrize("recipe", ["dense", "fast_dllm", "dllm_cache"])
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(recipe: str) -> None:
    for tiny in MODELS:
        check_batch_equals_alone(tiny, recipe, {}, policy=RULE)


@torch.no_grad()
def plain(tiny: TinyModel, prompt: list[int], rule: Daedal, bound: int, grown: list[int]) -> list[int]:
    """The rule for one prompt, in lists; grown: [masks that the first stage added, masks that were inserted]."""
    spec = tiny.model.spec
    canvas, block, ready, start = [spec.mask_id] * min(rule.first, bound), spec.block_length, False, 0
    while True:
        while start < len(canvas) and spec.mask_id not in canvas[start : start + block]:
            start += block
        if start >= len(canvas):
            break
        tokens = torch.tensor([*prompt, *canvas])
        logits = tiny.model.module(tokens[None], torch.arange(len(tokens))[None])[0]
        logits[:, spec.mask_id] = -math.inf
        sure, token = (x.tolist() for x in logits.softmax(-1)[len(prompt) - spec.logit_shift :].max(-1))
        last = range(max(0, len(canvas) - rule.tail), len(canvas))
        seen = sum(sure[p] for p in last if token[p] in (rule.end_ids or ())) / rule.tail
        if not ready:
            room = bound - len(canvas)
            ready = seen >= rule.begin or room == 0
            more = min(room, rule.more if seen >= rule.begin else rule.growth)
            grown[0] += more
            canvas += [spec.mask_id] * more
            continue
        masks = [p for p in range(start, min(start + block, len(canvas))) if canvas[p] == spec.mask_id]
        chosen = [p for p in masks if sure[p] > rule.threshold] or [max(masks, key=lambda p: sure[p])]
        for p in chosen:
            canvas[p] = token[p]
        left = [p for p in masks if p not in chosen]
        if left and seen < rule.steady and len(canvas) + rule.growth - 1 <= bound:
            least = min(left, key=lambda p: sure[p])
            if sure[least] < rule.unsure:
                canvas[least + 1 : least + 1] = [spec.mask_id] * (rule.growth - 1)
                grown[1] += rule.growth - 1
        first = next((t for t in canvas[start : start + block] if t in spec.eos_ids or t == spec.mask_id), None)
        if first is not None and first != spec.mask_id:
            break
    return canvas[: next((i for i, t in enumerate(canvas) if t in spec.eos_ids), len(canvas))]


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_against_a_plain_implementation(tiny: TinyModel) -> None:
    grown = [0, 0]

    def oracle(tiny: TinyModel, prompt: list[int], decoding: Any) -> list[int]:
        return plain(tiny, prompt, RULE, decoding["max_new_tokens"], grown)

    check_against(tiny, "dense", {}, oracle, policy=RULE, max_new_tokens=40)
    assert min(grown) > 0, "both stages add something"


def test_in_an_engine_beside_other_rules() -> None:
    tiny = MODELS[0]
    made, ids = tiny.optimized("dense"), prompts(tiny)
    want = [made.generate(input_ids=[prompt], max_new_tokens=24, policy=RULE).token_ids[0] for prompt in ids]
    with made.engine(max_sequences=2) as engine:
        assert [one.token_ids for one in engine.generate(input_ids=ids, max_new_tokens=24, policy=RULE)] == want
        assert engine.stats.pages == engine.stats.free_pages


def test_it_is_found_by_name_and_refuses_what_cannot_be() -> None:
    assert policy_of(**replace(RULE, end_ids=None).to_json()) == replace(RULE, end_ids=None)
    assert Daedal().bind(MODELS[0].model.spec).end_ids == MODELS[0].model.spec.eos_ids
    assert RULE.bind(MODELS[0].model.spec) is RULE
    with pytest.raises(InputError, match="Daedal: growth is a number of tokens, at least 1, got 0"):
        Daedal(growth=0)
    (sdar,) = models(None, "sdar")
    with pytest.raises(InputError, match="Daedal inserts masks, which takes a bidirectional model"):
        sdar.optimized("dense").generate(input_ids=[[5, 6]], policy=Daedal())
