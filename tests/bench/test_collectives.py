"""`benchmarks/collectives.py`: the bound on the error of a sum over ranks, by dtype and number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.collectives import KIB, check, drawn, error_bound

DTYPES = (torch.float32, torch.bfloat16)
RANKS = (2, 4, 8)
CPU = torch.device("cpu")


def in_order(values: list[Tensor]) -> Tensor:
    """The sum of one rank after the other, rounded to their dtype each time."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_in_order_stays_within_the_bound(dtype: torch.dtype, ranks: int) -> None:
    every = [drawn(rank, dtype, 512 * KIB, CPU) for rank in range(ranks)]
    wide = torch.stack(every).double()
    far = (in_order(every).double() - wide.sum(0)).abs() / wide.abs().sum(0)
    assert 0 < float(far.max()) <= error_bound(dtype, ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_no_wider_than_sums_need(dtype: torch.dtype, ranks: int) -> None:
    """Numbers of half a unit in the last place are each lost beside 1."""
    half = torch.finfo(dtype).eps / 2
    got = in_order([torch.ones((), dtype=dtype), *(torch.tensor(half, dtype=dtype) for _ in range(ranks - 1))])
    exact = 1 + (ranks - 1) * half
    assert float(got) == 1
    assert (exact - 1) / exact == pytest.approx(error_bound(dtype, ranks), rel=0.06)


@pytest.mark.parametrize("dtype", DTYPES)
def test_four_ranks_pass_and_a_rank_that_is_left_out_fails(dtype: torch.dtype) -> None:
    group: Any = SimpleNamespace(rank=0, world=4, device=CPU, exchange=lambda value: [value])
    every = [drawn(rank, dtype, 64 * KIB, CPU) for rank in range(4)]
    check(group, lambda _: in_order(every), dtype, 64 * KIB)
    with pytest.raises(AssertionError, match="from the sum in float64, at most"):
        check(group, lambda _: in_order(every[:3]), dtype, 64 * KIB)
