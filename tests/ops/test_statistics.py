"""Statistics of rows: their formulas, what they keep, and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops.lm_head.lm_head import decode_logits
from dgraph.ops.statistics import (
    CURRENT,
    ENTROPY,
    KL,
    MARGIN,
    RowLogits,
    Statistic,
    declare,
    declared,
    kept_rows,
    measure_rows,
)

measured = torch.ops.dgraph.lm_head_measured


def state_of(statistics: tuple[Statistic, ...], slots: int, vocab: int) -> Tensor:
    """Of pages of one position."""
    return torch.zeros(slots, 1, kept_rows(statistics, vocab).element[-1])


@pytest.mark.parametrize("heat", [0.0, 0.7])
@pytest.mark.parametrize("chunk", [2, 100])
def test_kl_is_of_the_row_one_step_ago(heat: float, chunk: int) -> None:
    """Over three steps: a row that is left out keeps what it had, and one in a place of its own begins anew."""
    generator = torch.Generator().manual_seed(2)
    statistics = (KL(top=0), KL(top=5))
    with pytest.raises(InputError, match="two statistics are named 'kl'"):
        declare(statistics)
    weight, states = torch.randn(20, 6, generator=generator), [state_of((s,), 5, 20) for s in statistics]
    temperature, seed = torch.full((4,), heat), torch.arange(4)
    slot = torch.tensor([2, 0, 1, 3])
    before: dict[int, Tensor] = {}
    for masked, moved in (([1, 1, 1, 0], 0), ([1, 0, 1, 1], 0), ([1, 1, 1, 1], 2)):
        h, flags = torch.randn(4, 6, generator=generator), torch.tensor(masked).bool()
        at = slot + torch.tensor([moved, 0, 0, 0])
        rows = h, weight, None, flags, temperature, seed, chunk, 3, False, at, torch.full_like(at, -1)
        exact, coarse = (
            measured(*rows, state, declare([s]))[4][:, 0] for s, state in zip(statistics, states, strict=True)
        )
        logits = F.linear(h, weight)
        logits[:, 3] = -torch.inf
        p = (logits / (heat or 1)).softmax(-1)
        for row in flags.nonzero()[:, 0].tolist():
            old = before.get(row) if not (moved and row == 0) else None
            if old is None:
                assert exact[row] == coarse[row] == torch.inf
            else:
                want = sum(x * (x / y).log() for x, y in zip(p[row], old, strict=True) if x > 0)
                assert_close(exact[row], torch.as_tensor(want), rtol=1e-4, atol=1e-5)
                ids = old.topk(5).indices
                parts = [torch.cat([q[ids], 1 - q[ids].sum()[None]]) for q in (p[row], old)]
                assert_close(coarse[row], (parts[0] * (parts[0] / parts[1]).log()).sum(), rtol=1e-4, atol=1e-5)
                assert coarse[row] <= exact[row] + 1e-5
            before[row] = p[row]


def test_margin_and_entropy_are_what_lm_head_gives() -> None:
    logits = 3 * torch.randn(9, 30, generator=torch.Generator().manual_seed(0))
    heat = torch.arange(9) % 3 * 0.6
    want = decode_logits(logits, heat, torch.arange(9), suppress=4)
    both = (MARGIN, ENTROPY)
    rows = torch.arange(9), torch.arange(9), state_of(both, 9, 30), torch.ones(9).bool()
    got = measure_rows(both, logits, want.token, heat, 4, *rows)
    assert_close(got, torch.stack([want.margin, want.entropy], dim=1))


def test_the_probability_of_the_token_that_stands() -> None:
    """0 of a mask, of no token, and of one that is never produced; else p at the row's temperature."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    heat, standing = torch.tensor([0.0, 0.5, 0.0, 0.0, 1.0]), torch.tensor([2, 7, 3, -1, 0])
    where = torch.arange(5), standing, state_of((CURRENT,), 5, 8), torch.ones(5).bool()
    got = measure_rows((CURRENT,), logits, torch.zeros(5).long(), heat, 3, *where)[:, 0]
    p = (logits.index_fill(1, torch.tensor([3]), -torch.inf) / torch.where(heat > 0, heat, 1.0)[:, None]).softmax(-1)
    assert_close(got, torch.stack([p[0, 2], p[1, 7], torch.zeros(()), torch.zeros(()), p[4, 0]]))


def test_rows_that_are_no_candidates_keep_nothing_and_may_hold_anything() -> None:
    statistics = (KL(top=0),)
    state = state_of(statistics, 3, 8)
    live = torch.tensor([True, False, True])
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    logits[1] = torch.nan
    slot = torch.tensor([0, 1, -1])
    for _ in range(2):
        values = measure_rows(statistics, logits, torch.zeros(3).long(), torch.zeros(3), -1, slot, slot, state, live)
    assert state[:, 0, 0].tolist() == [1, 0, 0]
    assert state[1:].eq(0).all()
    assert values[0] == 0.0
    assert values[2] == torch.inf, "a row without a place was never seen"
    kept = state.clone()
    for none in (torch.zeros(3).bool(), torch.tensor([False, True, True])):
        nowhere = torch.full_like(slot, -1)
        measure_rows(statistics, logits, torch.zeros(3).long(), torch.zeros(3), -1, nowhere, slot, state, none)
    assert torch.equal(state, kept), "nothing has a place"


def test_a_reduction_of_ones_own() -> None:
    @dataclass(frozen=True)
    class Mass(Statistic):
        """Probability of the first ids."""

        ids: int
        name: ClassVar[str] = "mass"
        filler: ClassVar[float] = 0.0

        def measure(self, rows: RowLogits) -> Tensor:
            return rows.logprobs[:, : self.ids].exp().sum(-1)

    h, weight = torch.randn(5, 4), torch.randn(9, 4)
    masked, zeros = torch.tensor([1, 0, 1, 1, 0]).bool(), torch.zeros(5)
    mass = Mass(3)
    state, index = state_of((mass,), 5, 9), torch.arange(5)
    found = measured(h, weight, None, masked, zeros, index, 2, -1, False, index, index, state, declare([mass]))[4]
    assert_close(found[masked, 0], F.linear(h, weight)[masked].softmax(-1)[:, :3].sum(-1))


def test_what_two_statistics_may_not_share() -> None:
    @dataclass(frozen=True, repr=False)
    class One(Statistic):
        name: ClassVar[str] = "one"
        size: int = 1

        def __repr__(self) -> str:
            return "One()"

    with pytest.raises(InputError, match=r"no statistics were declared as 'One\(\)' in this process"):
        declared("One()")
    assert declared(declare([One(1)])) == (One(1),)
    with pytest.raises(InputError, match=r"other statistics that read One\(\) were declared before"):
        declare([One(2)])
    with pytest.raises(InputError, match="KL: top is a number of ids, at least 1, or 0 for all of them, got -1"):
        KL(top=-1)
