"""Prophet and LocalLeap: the rules that they are at their limits, and plain implementations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dgraph_methods.localleap import LocalLeap
from dgraph_methods.prophet import Prophet
from plain import Choose, about, decode, logits_of
from torch import Tensor

import dgraph
from dgraph.errors import InputError
from dgraph.runtime.policies import ConfidenceThreshold, DecodeRule, FixedSteps, policy_of
from dgraph.testing import TinyModel, check_against, check_batch_equals_alone, models, prompts

MODELS = models("bidirectional")
PROPHET, LEAP = Prophet(0.9, 0.6, 0.3, steps=6), LocalLeap(0.5, 0.3, 3)


def decoded(tiny: TinyModel, rule: DecodeRule) -> dgraph.Result:
    return tiny.optimized("dense").generate(input_ids=prompts(tiny), max_new_tokens=20, policy=rule)


@pytest.mark.parametrize("tiny", [*MODELS, *models(None, "sdar")], ids=str)
@pytest.mark.parametrize(
    ("rule", "limit"),
    [
        (Prophet(math.inf, math.inf, math.inf, steps=4), FixedSteps(4, "masks")),
        (Prophet(0, 0, 0), FixedSteps(1)),
        (LocalLeap(0.4, 0.2, 0), ConfidenceThreshold(0.4, inclusive=True)),
        (LocalLeap(0.4, 0.4, 3), ConfidenceThreshold(0.4, inclusive=True)),
    ],
    ids=str,
)
def test_at_their_limits_they_are_rules_that_are_there(tiny: TinyModel, rule: DecodeRule, limit: DecodeRule) -> None:
    found, want = decoded(tiny, rule), decoded(tiny, limit)
    assert found.token_ids == want.token_ids
    assert found.stats.steps == want.stats.steps


@pytest.mark.parametrize("rule", [PROPHET, LEAP], ids=str)
@pytest.mark.parametrize("recipe", ["dense", "fast_dllm", "focus"])
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(rule: DecodeRule, recipe: str) -> None:
    check_batch_equals_alone(MODELS[0], recipe, {}, policy=rule)


class PlainProphet:
    """The rule for one prompt; `left` counts blocks that were committed before their last step."""

    def __init__(self, rule: Prophet):
        self.rule, self.left = rule, 0

    def __call__(self, logprobs: Tensor, step: int, masked: list[int]) -> list[int]:
        if step == 0:
            self.masks = len(masked)
        first, second = logprobs.topk(2).values.unbind(-1)
        steps = self.rule.steps or 1
        bar = (self.rule.early, self.rule.middle, self.rule.late)[min(2, 3 * step // steps)]
        if float((first - second).mean()) >= bar:
            self.left += 1
            return list(range(len(masked)))
        count = max(1, self.masks // steps + (step < self.masks % steps))
        return first.argsort(descending=True, stable=True)[:count].tolist()


class PlainLeap:
    def __init__(self, rule: LocalLeap):
        self.rule, self.left = rule, 0

    def __call__(self, logprobs: Tensor, step: int, masked: list[int]) -> list[int]:
        sure = logprobs.exp().amax(-1).tolist()
        anchors = [p for p, c in zip(masked, sure, strict=True) if c >= self.rule.threshold]
        near = [any(abs(p - anchor) <= self.rule.radius for anchor in anchors) for p in masked]
        found = [i for i, c in enumerate(sure) if c >= (self.rule.relaxed if near[i] else self.rule.threshold)]
        self.left += len(found) - len(anchors)
        return found or [max(range(len(sure)), key=sure.__getitem__)]


@pytest.mark.parametrize("tiny", MODELS, ids=str)
@pytest.mark.parametrize(("rule", "plain"), [(PROPHET, PlainProphet), (LEAP, PlainLeap)], ids=str)
def test_against_a_plain_implementation(tiny: TinyModel, rule: DecodeRule, plain: Any) -> None:
    early = []

    def oracle(tiny: TinyModel, prompt: list[int], decoding: Any) -> list[int]:
        def forward(canvas: Tensor, start: int, stop: int, number: int) -> Tensor:
            positions = torch.arange(len(canvas))
            return about(logits_of(tiny, canvas, positions), positions, len(canvas), tiny.model.spec.logit_shift)

        choose: Choose = plain(rule)
        found = decode(tiny, prompt, decoding["max_new_tokens"], forward, choose)
        early.append(choose.left)  # type: ignore[attr-defined]
        return found

    check_against(tiny, "dense", {}, oracle, policy=rule)
    assert sum(early) > 1, "the rule does something"


def test_settings_of_requests_share_a_batch() -> None:
    (tiny,) = models(None, "sdar")
    made, ids = tiny.optimized("dense"), prompts(tiny)[:2]
    rules = [LocalLeap(0.3, 0.15, 2), LocalLeap(0.5, 0.05, 2)]
    several = [dgraph.Decoding(policy=rule, max_new_tokens=16) for rule in rules]
    want = [
        made.generate(input_ids=[prompt], max_new_tokens=16, policy=rule).token_ids[0]
        for prompt, rule in zip(ids, rules, strict=True)
    ]
    with made.engine(max_sequences=2) as engine:
        assert [one.token_ids for one in engine.generate(input_ids=ids, decoding=several)] == want


def test_they_are_found_by_name_and_refuse_what_cannot_be() -> None:
    assert policy_of(**PROPHET.to_json()) == PROPHET
    assert policy_of("localleap", radius=3) == LocalLeap(radius=3)
    with pytest.raises(InputError, match="Prophet: late is a gap of two logits, at least 0, got -1"):
        Prophet(late=-1)
    with pytest.raises(InputError, match="LocalLeap: radius is a number of positions, at least 0, got -1"):
        LocalLeap(radius=-1)
