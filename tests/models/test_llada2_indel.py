"""LLaDA2.2, whose tokens may remove positions and open others: whole generations against a plain implementation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import dgraph
from dgraph.errors import InputError
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Candidates, JointThreshold, JointThresholdInDel, statistics_of
from tests.compiled import compiled
from tests.engine.alone import check_as_alone
from tests.models.test_llada2 import SIZES, WEIGHTS, remote
from tests.oracle import indel

BLOCK, EOS = 8, 5
DELETE, SPLIT = 90, 91
KNOWN = [token for token in range(SIZES.vocab - 1) if token not in (EOS, DELETE, SPLIT)]


def loud() -> dict[str, torch.Tensor]:
    """Weights under which the two ids are predicted often."""
    head = WEIGHTS["lm_head.weight"].clone()
    head[[DELETE, SPLIT]] *= torch.tensor([[1.5], [1.3]])
    return {**WEIGHTS, "lm_head.weight": head}


LOUD = loud()


@pytest.fixture(scope="module")
def dense() -> dgraph.CompiledModel:
    return dgraph.optimize(dgraph.adopt(remote(LOUD), block_length=BLOCK), "dense", backend="eager")


def prompts_for(seed: str, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.choice(KNOWN) for _ in range(draw.randint(1, 20))] for _ in range(count)]


@pytest.mark.parametrize(
    ("threshold", "edit_threshold", "passes"),
    [
        (0.5, 0.0, 16),
        pytest.param(0.05, 0.3, 3, marks=pytest.mark.release),
        pytest.param(0.7, 0.6, 1, marks=pytest.mark.release),
        pytest.param(0.9, 0.2, 0, marks=pytest.mark.release),
    ],
)
def test_generations_are_the_oracles(
    dense: dgraph.CompiledModel, threshold: float, edit_threshold: float, passes: int
) -> None:
    """Tokens and steps: prompts of 1 to 20 tokens as one batch, and responses that end within a block."""
    prompts = prompts_for(f"{threshold} {edit_threshold}", 8)
    rule = JointThresholdInDel(threshold, edit_threshold, passes, delete_id=DELETE, split_id=SPLIT)
    found = dense.generate(input_ids=prompts, max_new_tokens=21, policy=rule)
    settings = {"threshold": threshold, "edit_threshold": edit_threshold, "max_post_edit_steps": passes}
    traces = [
        indel.generate(LOUD, SIZES, prompt, max_new_tokens=21, block_length=BLOCK, mask_id=SIZES.vocab - 1,
                       eos_ids=[EOS], delete_id=DELETE, split_id=SPLIT, **settings)
        for prompt in prompts
    ]  # fmt: skip
    assert found.token_ids == [trace.tokens for trace in traces]
    assert found.stats.steps == max(trace.passes for trace in traces)
    dropped, opened = (sum(getattr(trace, name) for trace in traces) for name in ("dropped", "opened"))
    assert dropped > 3
    assert opened > 3
    assert not {DELETE, SPLIT, SIZES.vocab - 1} & {token for ids in found.token_ids for token in ids}


def test_a_batch_of_several_rules_gives_what_each_gives_alone(dense: dgraph.CompiledModel) -> None:
    prompts = prompts_for("several", 4)
    rules = [JointThresholdInDel(delete_id=DELETE, split_id=SPLIT), JointThreshold(), None, JointThresholdInDel()]
    decodings = [Decoding(max_new_tokens=12, **({"policy": rule} if rule else {"threshold": 0.6})) for rule in rules]
    check_as_alone(dense, prompts, decodings, max_sequences=4, max_tokens=96)


def test_given_tokens_stay_and_the_others_move_around_them() -> None:
    """A prompt, a fixed token in the middle, and what follows; columns 6 to 11 are those before the step, 12 a mask."""
    rule = JointThresholdInDel(delete_id=DELETE, split_id=SPLIT)
    masked = torch.tensor([[False, False, False, False, True, True]] * 3)
    editable = torch.tensor([[False, True, False, True, False, False]] * 3)
    token = torch.tensor(
        [[1, SPLIT, DELETE, DELETE, 2, 3], [1, 2, 3, DELETE, DELETE, 4], [1, SPLIT, 3, SPLIT, SPLIT, 4]]
    )
    zeros = torch.zeros(3, dtype=torch.int64)
    candidates = Candidates(
        token=token,
        confidence=torch.ones(3, 6),
        masked=masked,
        current=torch.arange(6).expand(3, 6),
        step=zeros,
        decoded=zeros,
        start=zeros,
        prompt=zeros,
        measured={each.name: torch.full((3, 6), 7.0) for each in statistics_of(rule)},
        carried={each.name: each.begin(3, 6, torch.device("cpu")) for each in rule.carries},
        forwards=zeros,
        editable=editable,
    )
    said, source = rule.move(candidates, torch.ones_like(masked))
    assert said.equal(token)
    assert source.tolist() == [[0, 12, 2, 7, 4, 5], [0, 1, 2, 5, 12, 12], [0, 12, 2, 7, 12, 9]]
    last, source = rule.move(replace(candidates, carried={**candidates.carried, "late": zeros + 16},
                                     masked=torch.zeros_like(masked), editable=editable | masked),
                             torch.ones_like(masked))  # fmt: skip
    assert last[0].tolist() == [1, 7, 7, 7, 2, 3]
    assert source.tolist() == [list(range(6))] * 3


def test_a_recipe_that_evicts_is_refused() -> None:
    run = dgraph.optimize(dgraph.adopt(remote(LOUD), block_length=BLOCK), "focus", backend="eager", block_cache="off")
    with pytest.raises(InputError, match=r"JointThresholdInDel replaces decoded tokens, but this recipe evicts rows"):
        run.generate(input_ids=[[3, 4]], max_new_tokens=8, policy="llada2.2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delete_id": -1}, r"JointThresholdInDel: delete_id is a token id, at least 0, got -1"),
        ({"split_id": 156930}, r"JointThresholdInDel: split_id is another id than delete_id, got 156930"),
        ({"threshold": 0}, r"JointThresholdInDel: threshold is a probability in \(0, 1\], got 0"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        JointThresholdInDel(**options)  # type: ignore[arg-type]


def test_requests_whose_rules_leave_out_other_ids_share_a_batch() -> None:
    made = compiled("tiny_sdar", "dense")
    rules = [None, JointThresholdInDel(delete_id=1, split_id=2), JointThresholdInDel(delete_id=3, split_id=4)]
    decodings = [Decoding(max_new_tokens=24, **({"policy": rule} if rule else {"threshold": 0.9})) for rule in rules]
    check_as_alone(made, [[5, 6, 7]] * 3, decodings, max_sequences=3, max_tokens=96)
