"""dgraph::kv_votes and dgraph::kv_scores against their equations, written as loops over voters, heads and keys."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT, per_sequence, spans_of
from dgraph.ops.draws import cu_rows_of, pad_rows

kv_votes = torch.ops.dgraph.kv_votes
kv_scores = torch.ops.dgraph.kv_scores
ALL = 2**31 - 1
Call = dict[str, Any]


def call_of(
    seed: int,
    actions: Sequence[int] | None = None,
    heads: tuple[int, int] = (4, 2),
    rows: Sequence[int] | None = None,
    cuts: bool = True,
) -> Call:
    """Query rows at some of the positions of the keys; limits anywhere among these if `cuts`, else above them."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    counts = [rng.choice([0, 1, 4, 9, 15]) for _ in actions or range(3)] if rows is None else list(rows)
    at = [torch.randint(1, 4, (count,), generator=generator).cumsum(0) for count in counts]
    few = [torch.rand(count, generator=generator) < (0.7 if cuts else 1.1) for count in counts]
    windows = [sorted(rng.sample(range(3 * count + 4), 2)) for count in counts]
    limits = [
        torch.randint(0 if cuts else 999, 3 * count + 2 if cuts else 1000, (int(some.sum()),), generator=generator)
        for count, some in zip(counts, few, strict=True)
    ]
    return {
        "q": torch.randn(sum(int(some.sum()) for some in few), heads[0], 6, generator=generator) * 2,
        "k": torch.randn(sum(counts), heads[1], 6, generator=generator) * 2,
        "positions": torch.cat([a[some] for a, some in zip(at, few, strict=True)]),
        "key_positions": torch.cat(at),
        "cu_rows": cu_rows_of([int(some.sum()) for some in few]),
        "cu_keys": cu_rows_of(counts),
        "limit": torch.cat(limits).int(),
        "window": per_sequence(windows),
        "action": per_sequence(actions or [SELECT] * len(counts)),
    }


def votes(
    call: Call, scale: float = 0.5, first: int = 0, last: int = ALL, quarters: tuple[int, int] = (0, 4)
) -> Tensor:
    return kv_votes(*call.values(), scale, first, last, None, *quarters)


def scores(call: Call, scale: float = 0.5, shared: bool = False) -> Tensor:
    names = ("q", "k", "positions", "cu_rows", "cu_keys", "window", "action")
    return kv_scores(*(call[name] for name in names), scale, shared)


OPS: dict[str, Callable[[Call], Tensor]] = {
    "votes": votes,
    "all vote": lambda call: votes(call, first=-ALL - 1),
    "by head": scores,
    "shared": lambda call: scores(call, shared=True),
}
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def bounds(cu: Tensor, s: int) -> range:
    return range(int(cu[s]), int(cu[s + 1]))


def voters_of(call: Call, s: int, first: int, last: int, quarters: tuple[int, int] = (0, 4)) -> list[int]:
    low = int(call["window"][s, 0])
    found = [i for i in bounds(call["cu_rows"], s) if low + first <= call["positions"][i] < low + last]
    return [i for n, i in enumerate(found) if quarters[0] * len(found) // 4 <= n < quarters[1] * len(found) // 4]


def slow_votes(call: Call, scale: float, first: int, last: int, quarters: tuple[int, int] = (0, 4)) -> Tensor:
    q, k = call["q"].double(), call["k"].double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(k.shape[:2], dtype=torch.float64)
    for s in range(len(call["action"])):
        if call["action"][s] != SELECT:
            continue
        for i, head in itertools.product(voters_of(call, s, first, last, quarters), range(q.shape[1])):
            seen = [j for j in bounds(call["cu_keys"], s) if call["key_positions"][j] < call["limit"][i]]
            weights = [math.exp(scale * float(q[i, head] @ k[j, head // group])) for j in seen]
            for j, weight in zip(seen, weights, strict=True):
                out[j, head // group] += weight / sum(weights) / group
    return out


def slow_scores(call: Call, scale: float, shared: bool) -> Tensor:
    q, k = call["q"].double(), call["k"].double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(k.shape[:2], dtype=torch.float64)
    for s, (low, high) in enumerate(call["window"].tolist()):
        rows = [i for i in bounds(call["cu_rows"], s) if low <= call["positions"][i] < high]
        if call["action"][s] != SELECT or not rows:
            continue
        for j in bounds(call["cu_keys"], s):
            found = [
                scale * sum(float(q[i, head] @ k[j, head // group]) for i in rows) / len(rows)
                for head in range(q.shape[1])
            ]
            for h in range(k.shape[1]):
                out[j, h] = sum(found) / len(found) if shared else max(found[h * group : (h + 1) * group])
    return out


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 2), (2, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_against_loops(seed: int, heads: tuple[int, int]) -> None:
    call = call_of(seed, heads=heads)
    for first, last in ((0, ALL), (-5, 0), (-ALL - 1, ALL), (-3, 4), (4, -4)):
        assert_close(votes(call, 0.3, first, last).double(), slow_votes(call, 0.3, first, last), rtol=1e-5, atol=1e-6)
    for shared in (False, True):
        assert_close(scores(call, 0.3, shared).double(), slow_scores(call, 0.3, shared), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quarters", [(0, 1), (1, 3), (3, 4), (0, 0), (2, 3)])
def test_a_part_of_the_rows_votes(quarters: tuple[int, int]) -> None:
    call = call_of(3, rows=(15, 0, 9))
    call["window"] = per_sequence([(5, 30), (0, 4), (20, 25)])  # nearly all rows, no rows, the last few
    for first in (0, -ALL - 1):
        got, want = votes(call, 0.3, first, ALL, quarters), slow_votes(call, 0.3, first, ALL, quarters)
        assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_parts_add_up_to_all_votes() -> None:
    call = call_of(6, cuts=False, rows=(13, 4))
    parts = [votes(call, first=-ALL - 1, quarters=(n, n + 1)) for n in range(4)]
    assert_close(torch.stack(parts).sum(0), votes(call, first=-ALL - 1))
    assert all((part > 0).all() for part in parts)


@pytest.mark.parametrize("first", [0, -4, -ALL - 1])
@pytest.mark.parametrize("seed", range(3))
def test_each_voter_has_one_vote_per_head(seed: int, first: int) -> None:
    call = call_of(seed, cuts=False, rows=(9, 0, 15))
    got = votes(call, first=first)
    for s in range(3):
        want = torch.full((2,), float(len(voters_of(call, s, first, ALL))))
        assert_close(got[list(bounds(call["cu_keys"], s))].sum(0), want)


def test_a_voter_gives_nothing_to_keys_from_its_limit_on() -> None:
    call = call_of(1, rows=(12, 12), cuts=False)
    whole = votes(call)
    call["limit"][:] = call["key_positions"][5]
    got, keys = votes(call), call["key_positions"]
    first = torch.arange(24) < 12
    assert (got[first & (keys >= keys[5])] == 0).all()
    assert (got[first & (keys < keys[5])] > whole[first & (keys < keys[5])]).all()
    call["limit"][:] = 0
    assert (votes(call) == 0).all()


@each_op
def test_only_sequences_that_select_get_values(op: Callable[[Call], Tensor]) -> None:
    actions = [DENSE, SELECT, REUSE, SELECT, REPACK]
    call = call_of(5, actions, rows=(6, 9, 4, 12, 7), cuts=False)
    call["window"] = per_sequence([(2, 99)] * 5)
    got = op(call)
    for s, action in enumerate(actions):
        keys = list(bounds(call["cu_keys"], s))
        assert (got[keys] != 0).all() if action == SELECT else (got[keys] == 0).all()


@each_op
@pytest.mark.parametrize("seed", range(3))
def test_a_sequence_gives_the_same_bits_alone_in_a_batch_and_padded(op: Callable[[Call], Tensor], seed: int) -> None:
    call = call_of(seed, rows=(15, 0, 9, 4))
    whole = op(call)
    rows, keys = ("q", "positions", "limit"), ("k", "key_positions")
    padded = {name: pad_rows(value, 4) if name in rows + keys else value for name, value in call.items()}
    got = op(padded)
    assert got[:-4].equal(whole)
    assert (got[-4:] == 0).all()
    for s, of_rows, of_keys in spans_of(call["action"], SELECT, call["cu_rows"], call["cu_keys"]):
        alone = call | {name: call[name][of_rows] for name in rows} | {name: call[name][of_keys] for name in keys}
        alone |= {"cu_rows": cu_rows_of([len(alone["q"])]), "cu_keys": cu_rows_of([len(alone["k"])])}
        alone |= {name: call[name][s : s + 1] for name in ("window", "action")}
        assert op(alone).equal(whole[of_keys])


def test_without_voters_and_without_rows_of_the_window_all_is_zero() -> None:
    call = call_of(2, rows=(9, 6), cuts=False)
    call["window"] = per_sequence([(90, 95), (90, 95)])
    assert (votes(call) == 0).all()
    assert (votes(call, first=3, last=3) == 0).all()
    assert (votes(call, first=-ALL - 1) > 0).all()
    assert (scores(call) == 0).all()


def test_shared_scores_are_the_mean_of_those_by_head() -> None:
    call = call_of(3, heads=(4, 4), cuts=False, rows=(9, 12))
    call["window"] = per_sequence([(4, 12), (0, 9)])
    by_head = scores(call)
    assert_close(scores(call, shared=True), by_head.mean(1, keepdim=True).expand(-1, 4))
    assert by_head.std(1).min() > 0


def test_rows_that_take_no_part_may_hold_nan() -> None:
    call = call_of(4, rows=(15, 12), cuts=False)
    call["window"] = per_sequence([(8, 20), (5, 30)])
    low, high = call["window"].repeat_interleave(call["cu_rows"].diff(), 0).unbind(1)
    for op, outside in (
        (votes, call["positions"] < low),
        (scores, (call["positions"] < low) | (call["positions"] >= high)),
    ):
        assert outside.any()
        dirty = call | {"q": call["q"].masked_fill(outside[:, None, None], torch.nan)}
        assert op(dirty).equal(op(call))


@each_op
def test_heads_must_fit(op: Callable[[Call], Tensor]) -> None:
    with pytest.raises(InputError, match="query heads must be a multiple of KV heads, got 3, 2"):
        op(call_of(1, heads=(3, 2)))


@each_op
def test_half_precision_is_summed_in_fp32(op: Callable[[Call], Tensor]) -> None:
    call = call_of(6, rows=(12, 9))
    call |= {name: call[name].bfloat16() for name in ("q", "k")}
    wide = call | {name: call[name].float() for name in ("q", "k")}
    assert op(call).dtype == torch.float32
    assert_close(op(call), op(wide), rtol=1e-6, atol=1e-6)
