"""LLaDA2.1, which edits what it has decoded: whole generations against a plain implementation of its rule."""

from __future__ import annotations

import random

import pytest

import dgraph
from dgraph.runtime.policies import JointThreshold
from tests.models.test_llada2 import SIZES, WEIGHTS, remote
from tests.oracle import editing

BLOCK = 8
EOS = 5


@pytest.fixture(scope="module")
def dense() -> dgraph.CompiledModel:
    return dgraph.optimize(dgraph.adopt(remote(), block_length=BLOCK), "dense", backend="eager")


@pytest.mark.parametrize(
    ("threshold", "edit_threshold", "passes"),
    [
        (0.5, 0.0, 16),
        pytest.param(0.3, 0.4, 16, marks=pytest.mark.release),
        (0.05, 0.0, 3),
        pytest.param(0.7, 0.9, 0, marks=pytest.mark.release),
    ],
)
def test_generations_are_the_oracles(
    dense: dgraph.CompiledModel, threshold: float, edit_threshold: float, passes: int
) -> None:
    """Eight at each setting, as one batch: prompts of 1 to 20 tokens, and responses that end within a block."""
    draw = random.Random(f"{threshold} {edit_threshold}")
    known = [token for token in range(SIZES.vocab - 1) if token != EOS]
    prompts = [[draw.choice(known) for _ in range(draw.randint(1, 20))] for _ in range(8)]
    rule, edits = JointThreshold(threshold, edit_threshold, passes), 0
    found = dense.generate(input_ids=prompts, max_new_tokens=21, policy=rule)
    for prompt, tokens in zip(prompts, found.token_ids, strict=True):
        trace = editing.generate(
            WEIGHTS,
            SIZES,
            prompt,
            max_new_tokens=21,
            block_length=BLOCK,
            mask_id=SIZES.vocab - 1,
            eos_ids=[EOS],
            threshold=threshold,
            edit_threshold=edit_threshold,
            max_post_edit_steps=passes,
        )
        assert tokens == trace.tokens
        edits += trace.edits
    assert edits or edit_threshold == 0.9, "nothing was edited"
