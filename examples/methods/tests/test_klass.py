"""KLASS: that it is a threshold without history, and a plain implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgraph_methods.klass import Klass
from plain import Choose, about, decode, logits_of
from torch import Tensor

import dgraph
from dgraph.errors import InputError
from dgraph.runtime.policies import ConfidenceThreshold, PolicyMix, kind_of, policy_of, row_of
from dgraph.testing import TinyModel, check_against, check_backends_agree, check_batch_equals_alone, models, prompts

MODELS = models("bidirectional")
RULE = Klass(0.3, 1.0)


def decoded(tiny: TinyModel, **options: Any) -> dgraph.Result:
    return tiny.optimized("dense").generate(input_ids=prompts(tiny), max_new_tokens=20, **options)


@pytest.mark.parametrize("tiny", [*MODELS, *models(None, "sdar")], ids=str)
def test_without_history_it_is_a_threshold(tiny: TinyModel) -> None:
    want = decoded(tiny, threshold=0.7)
    found = decoded(tiny, policy=Klass(0.7, float("inf"), history=0))
    assert found.token_ids == want.token_ids
    assert found.stats.steps == want.stats.steps
    assert decoded(tiny, policy=Klass(0.7, 1e-9)).stats.tokens_per_step == 1, "nothing is ever as stable as that"


@pytest.mark.parametrize("recipe", ["dense", "fast_dllm", "focus"])
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(recipe: str) -> None:
    for tiny in MODELS:
        check_batch_equals_alone(tiny, recipe, {}, policy=RULE)


def test_inductor_gives_the_same_tokens() -> None:
    check_backends_agree(MODELS[1], "dense", {}, policy=RULE)


class Plain:
    """The rule for one prompt: probabilities of the step before by position, and for how long they have been calm."""

    def __init__(self, rule: Klass):
        self.rule, self.ready = rule, 0

    def __call__(self, logprobs: Tensor, step: int, masked: list[int]) -> list[int]:
        if step == 0:
            self.before: dict[int, Tensor] = {}
            self.calm: dict[int, int] = {}
            self.masks = len(masked)
        ready = []
        for i, (position, now) in enumerate(zip(masked, logprobs, strict=True)):
            moved = float("inf")
            if position in self.before:
                p = now.exp()
                moved = float(torch.where(p > 0, p * (now - self.before[position]), 0.0).sum())
            self.calm[position] = self.calm.get(position, 0) + 1 if moved < self.rule.kl else 0
            self.before[position] = now
            if self.calm[position] >= self.rule.history and float(now.exp().max()) > self.rule.threshold:
                ready.append(i)
        self.ready += len(ready)
        total, steps = self.masks, self.rule.steps or self.masks
        count = max(1, total // steps + (step < total % steps))
        return ready or logprobs.amax(-1).argsort(descending=True, stable=True)[:count].tolist()


@pytest.mark.parametrize("tiny", MODELS, ids=str)
@pytest.mark.parametrize("rule", [RULE, Klass(0.4, 0.8, history=1, steps=3)], ids=["one else", "a schedule else"])
def test_against_a_plain_implementation(tiny: TinyModel, rule: Klass) -> None:
    ready = []

    def oracle(tiny: TinyModel, prompt: list[int], decoding: Any) -> list[int]:
        def forward(canvas: Tensor, start: int, stop: int, number: int) -> Tensor:
            positions = torch.arange(len(canvas))
            return about(logits_of(tiny, canvas, positions), positions, len(canvas), tiny.model.spec.logit_shift)

        choose: Choose = Plain(rule)
        found = decode(tiny, prompt, decoding["max_new_tokens"], forward, choose)
        ready.append(choose.ready)  # type: ignore[attr-defined]
        return found

    check_against(tiny, "dense", {}, oracle, policy=rule)
    assert sum(ready) > 3, "some positions were ready"


def test_what_cannot_be() -> None:
    with pytest.raises(InputError, match="Klass: kl is a divergence above 0, in nats, got 0"):
        Klass(kl=0)
    with pytest.raises(InputError, match="Klass: history is an integer of at least 0, got -1"):
        Klass(history=-1)


def test_it_is_found_by_name() -> None:
    assert policy_of("klass", history=3) == Klass(history=3)
    assert policy_of(**RULE.to_json()) == RULE


def test_among_other_rules_it_is_a_kind_of_its_own() -> None:
    mixture = PolicyMix.of([ConfidenceThreshold(0.5), RULE, Klass(0.3, 0.5), ConfidenceThreshold(0.7), RULE])
    assert mixture.kinds == tuple(map(kind_of, (ConfidenceThreshold(0.5), RULE, Klass(0.3, 0.5))))
    assert row_of(mixture, Klass(0.3, 0.5)) == (2, {})
    assert [each.name for each in mixture.carries] == ["1.calm", "2.calm"]
    tiny = MODELS[0]
    want, found = (decoded(tiny, policy=policy) for policy in (RULE, PolicyMix((RULE,))))
    assert found.token_ids == want.token_ids
    assert found.stats.steps == want.stats.steps
