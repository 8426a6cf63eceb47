"""Dream's sampler and rule against the published functions, over logits from flat to peaked."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dgraph.runtime.policies import Candidates
from dgraph.runtime.policies.dream import Dream
from dgraph.runtime.sampling.sampler import RowContext, Sampler
from tests.oracle import dream_sampling as oracle

ROWS, VOCAB = 24, 101
MASK = VOCAB - 1
ALGS = ("maskgit_plus", "topk_margin", "entropy")
SCALES = (0.5, 3.0, 12.0, 60.0)
"""Of standard normal logits: from nuclei of most ids to nuclei of one, whose rows are equally sure, exactly."""


def logits_of(seed: int, scale: float) -> Tensor:
    """Rows [ROWS, VOCAB] of which none expects a mask, some of them equal."""
    drawn = scale * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))
    drawn[:, MASK] = torch.finfo(drawn.dtype).min
    drawn[ROWS // 2 + 1] = drawn[ROWS // 2]
    return drawn


def context(rows: int) -> RowContext:
    zeros, columns = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    return RowContext(
        zeros, columns, columns, torch.ones(rows, dtype=torch.bool), zeros, zeros, torch.full((1, rows), MASK), rows
    )


def committed(logits: Tensor, masked: Tensor, step: int, steps: int, alg: str, sampler: Sampler) -> dict[int, int]:
    """Position -> token of what our rule commits in a step of a block that has those masks left."""
    found = sampler.begin(MASK).decode(logits, context(len(logits)))
    whole = {name: torch.tensor([step]) for name in ("step", "decoded", "forwards", "passes")}
    zero = torch.zeros(1, dtype=torch.int64)
    candidates = Candidates(
        confidence=torch.where(masked, found.confidence, -torch.inf)[None],
        start=zero,
        prompt=zero,
        measured={"margin": found.margin[None], "entropy": found.entropy[None]},
        masked=masked[None],
        token=found.token[None],
        current=torch.full((1, len(logits)), MASK),
        noise=torch.zeros(1, len(logits)),
        order=torch.zeros(1, len(logits)),
        editable=~masked[None],
        **whole,
    )
    chosen = Dream(steps=steps, alg=alg, sampler=sampler).choose(candidates)[0].nonzero()[:, 0].tolist()
    return {place: int(found.token[place]) for place in chosen}


@pytest.mark.parametrize("alg", ALGS)
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (0.5, 0), (0.95, 50), (0.9, 2), (1.0, 3)])
def test_steps_commit_what_the_published_functions_do(top_p: float, top_k: int, alg: str) -> None:
    """Whole blocks, one after the other: every step's logits are new, as after a forward."""
    ties = 0
    for scale, seed in itertools.product(SCALES, range(6)):
        masked, steps = torch.ones(ROWS, dtype=torch.bool), 6
        for step in range(steps):
            logits = logits_of(100 * seed + step, scale)
            number = oracle.count(int(masked.sum()), step, steps)
            token, score = oracle.sample(logits, alg, top_p, top_k)
            score = torch.where(masked, score, -torch.inf)
            wanted = {place: int(token[place]) for place in oracle.chosen(score, number)}
            got = committed(logits, masked, step, steps, alg, Sampler(top_p=top_p, top_k=top_k))
            assert got == wanted, (scale, seed, step)
            ordered = score.sort(descending=True).values
            ties += 0 < number < int(masked.sum()) and bool(ordered[number - 1] == ordered[number])
            masked[list(wanted)] = False
    assert ties > 20 or top_p == 1.0  # one id is left of most peaked rows: many are exactly as sure


@pytest.mark.parametrize("alg", ALGS)
def test_where_scores_differ_the_published_choice_is_that_of_topk(alg: str) -> None:
    """The order that is not defined is that of equal scores alone: what torch.topk takes is as sure as ours."""
    for scale, seed in itertools.product(SCALES, range(20)):
        score = oracle.sample(logits_of(seed, scale), alg, 0.9)[1]
        for number in (1, 5, 11):
            theirs = score.topk(number)
            assert torch.equal(theirs.values, score[oracle.chosen(score, number)])
            if number == ROWS or theirs.values[-1] > score.sort(descending=True).values[number]:
                assert set(theirs.indices.tolist()) == set(oracle.chosen(score, number))
