"""AdaBlock: fixed blocks without a delimiter, and a plain implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgraph_methods.adablock import AdaBlock
from plain import Choose, about, decode, logits_of
from torch import Tensor

from dgraph.errors import InputError
from dgraph.runtime.policies import policy_of
from dgraph.testing import TinyModel, check_against, check_batch_equals_alone, models, prompts

MODELS = models("bidirectional", "llada", "dream")
RULE = AdaBlock(tuple(range(0, 97, 3)), 0.5, 0.1, 3, 0.5)
"""Every third id ends a part."""


@pytest.mark.parametrize("tiny", MODELS, ids=str)
@pytest.mark.filterwarnings("ignore:block_length")
def test_without_delimiters_its_parts_are_blocks(tiny: TinyModel) -> None:
    made, ids = tiny.optimized("dense"), prompts(tiny)
    want = made.generate(input_ids=ids, max_new_tokens=24, block_length=6, threshold=0.3)
    found = made.generate(input_ids=ids, max_new_tokens=24, block_length=24, policy=AdaBlock((), 0.3, usual=6))
    assert found.token_ids == want.token_ids
    assert found.stats.steps == want.stats.steps


@pytest.mark.parametrize("recipe", ["dense", "fast_dllm", "focus"])
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(recipe: str) -> None:
    check_batch_equals_alone(MODELS[0], recipe, {}, policy=RULE)


class Plain:
    """The rule for one prompt; `ended` counts parts that a delimiter ends."""

    def __init__(self, rule: AdaBlock, block: int):
        self.rule, self.block, self.ended = rule, block, 0

    def __call__(self, logprobs: Tensor, step: int, masked: list[int]) -> list[int]:
        rule, (sure, token) = self.rule, (x.tolist() for x in logprobs.exp().max(-1))
        if step == 0 or masked[0] >= self.until:
            near = [i for i, p in enumerate(masked) if p < masked[0] + int(rule.share * self.block)]
            ends = [i for i in near if token[i] in rule.delimiters and sure[i] >= rule.least]
            self.until = masked[0] + rule.usual
            if ends:
                self.ended, self.until = self.ended + 1, masked[max(ends, key=lambda i: sure[i])] + 1
        part = [i for i, p in enumerate(masked) if p < self.until]
        return [i for i in part if sure[i] > rule.threshold] or [max(part, key=lambda i: sure[i])]


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_against_a_plain_implementation(tiny: TinyModel) -> None:
    ended = []

    def oracle(tiny: TinyModel, prompt: list[int], decoding: Any) -> list[int]:
        def forward(canvas: Tensor, start: int, stop: int, number: int) -> Tensor:
            positions = torch.arange(len(canvas))
            return about(logits_of(tiny, canvas, positions), positions, len(canvas), tiny.model.spec.logit_shift)

        choose: Choose = Plain(RULE, tiny.model.spec.block_length)
        found = decode(tiny, prompt, decoding["max_new_tokens"], forward, choose)
        ended.append(choose.ended)  # type: ignore[attr-defined]
        return found

    check_against(tiny, "dense", {}, oracle, policy=RULE)
    assert sum(ended) > 2, "delimiters end some parts"


def test_it_is_found_by_name_and_refuses_what_cannot_be() -> None:
    assert policy_of(**RULE.to_json()) == RULE
    assert policy_of("adablock", delimiters=[198]) == AdaBlock()
    with pytest.raises(InputError, match=r"AdaBlock: delimiters is token ids, such as \(198,\), got \(-1,\)"):
        AdaBlock((-1,))
