"""dgraph::importance against FOCUS Eq. 2, written as loops over heads, queries and keys."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of

importance = torch.ops.dgraph.importance


def slow_importance(q: Tensor, k: Tensor, masked: Tensor, cu_rows: Tensor, scale: float, pool: int) -> list[float]:
    out = [0.0] * len(q)
    group = q.shape[1] // k.shape[1]
    q, k = q.double(), k.double()
    for start, end in itertools.pairwise(cu_rows.tolist()):
        rows = [i for i in range(start, end) if masked[i]]
        for head in range(q.shape[1]):
            for i in rows:
                scores = [float(q[i, head] @ k[j, head // group]) * scale for j in rows]
                reach = pool // 2
                pooled = [max(scores[max(0, c - reach) : c + reach + 1]) for c in range(len(rows))]
                weights = [math.exp(x - max(pooled)) for x in pooled]
                for j, weight in zip(rows, weights, strict=True):
                    out[j] += weight / sum(weights)
    return out


def random_call(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    counts = [rng.choice([0, 1, 2, 5, 12, 19]) for _ in range(rng.randint(1, 4))]
    hkv = rng.choice([1, 2])
    hq = hkv * rng.choice([1, 2])
    q, k = (torch.randn(sum(counts), h, 6, generator=generator) * 2 for h in (hq, hkv))
    return (
        q,
        k,
        torch.rand(sum(counts), generator=generator) < rng.choice([0.3, 0.8, 1.1]),
        cu_rows_of(counts),
    )


@pytest.mark.parametrize("pool", [1, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_against_loops(seed: int, pool: int) -> None:
    q, k, masked, cu_rows = random_call(10 * seed + pool)
    want = slow_importance(q, k, masked, cu_rows, 0.5, pool)
    assert_close(importance(q, k, masked, cu_rows, 0.5, pool).tolist(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_sums_to_heads_times_masked_rows(seed: int) -> None:
    q, k, masked, cu_rows = random_call(seed + 50)
    first, second = (importance(x, k, masked, cu_rows, 0.7, 3) for x in (q, q.flip(2)))
    for start, end in itertools.pairwise(cu_rows.tolist()):
        total = q.shape[1] * int(masked[start:end].sum())
        assert_close(first[start:end].sum().item(), float(total), rtol=1e-5, atol=1e-5)
        assert_close((second - first)[start:end].sum().item(), 0.0, rtol=0, atol=1e-4)
    assert (first[~masked] == 0).all()


def test_pool_runs_over_the_compacted_list() -> None:
    """Neighbours in the list of masked rows share their maximum, however many other rows lie between."""
    q = torch.ones(5, 1, 1)
    k = torch.tensor([0.0, 9.0, 2.0, 9.0, 0.0]).view(5, 1, 1)
    masked = torch.tensor([True, False, True, False, True])
    got = importance(q, k, masked, cu_rows_of([5]), 1.0, 3)
    assert_close(got, torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]))


def test_rows_that_are_not_masked_may_hold_nan() -> None:
    q, k, masked, cu_rows = random_call(3)
    clean = importance(q, k, masked, cu_rows, 0.5, 3)
    q[~masked], k[~masked] = torch.nan, torch.nan
    assert_close(importance(q, k, masked, cu_rows, 0.5, 3), clean, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = [32, 7, 0, 15, 5, 32, 8, 24, 3]
    q, k = (torch.randn(sum(counts), h, 16, generator=generator) for h in (4, 2))
    masked, cu_rows = torch.rand(sum(counts), generator=generator) < 0.8, cu_rows_of(counts)
    whole = importance(q, k, masked, cu_rows, 0.25, 3)
    for start, end in itertools.pairwise(cu_rows.tolist()):
        r = slice(start, end)
        alone = importance(q[r], k[r], masked[r], cu_rows_of([end - start]), 0.25, 3)
        assert_close(alone, whole[r], rtol=0, atol=0)


def test_scores_do_not_lose_precision_in_bfloat16() -> None:
    q, k, masked, cu_rows = random_call(5)
    q, k = q.bfloat16(), k.bfloat16()
    got = importance(q, k, masked, cu_rows, 0.5, 3)
    assert got.dtype == torch.float32
    assert_close(got, importance(q.float(), k.float(), masked, cu_rows, 0.5, 3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pool", [0, 2, -1])
def test_pool_must_be_odd(pool: int) -> None:
    q, k, masked, cu_rows = random_call(1)
    with pytest.raises(InputError, match=f"odd and at least 1, got {pool}"):
        importance(q, k, masked, cu_rows, 1.0, pool)
