"""The ops of DyLLM against their formulas, and their corner cases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops import OPS, Sample
from dgraph.ops.draws import cu_rows_of, page_table_of, positions_of
from dgraph.ops.kv.scales import unscaled

ops = torch.ops.dgraph
PAGE, HEADS, KV, D = 4, 4, 2, 6
NAN = float("nan")


def samples(name: str) -> list[Sample]:
    return list(OPS[name].samples(torch.Generator().manual_seed(3)))


class Batch:
    """Sequences that are whole in the cache: pages, keys and values, contexts."""

    def __init__(self, *lengths: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths, self.cu_rows = lengths, cu_rows_of(lengths)
        self.positions = positions_of(lengths, [0] * len(lengths))
        self.limit = torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)).int()
        self.table, pages = page_table_of(lengths, PAGE, draw)
        n = sum(lengths)
        self.q, self.c = (torch.randn(n, HEADS, D, generator=draw) for _ in range(2))
        self.k, self.v, self.dv = (torch.randn(n, KV, D, generator=draw) for _ in range(3))
        self.k_cache, self.v_cache = (torch.full((pages, PAGE, KV, D), NAN) for _ in range(2))
        self.c_cache = torch.full((pages, PAGE, HEADS, D), NAN)
        self.full = torch.zeros(n, dtype=torch.bool)
        for cache, rows in ((self.k_cache, self.k), (self.v_cache, self.v), (self.c_cache, self.c)):
            ops.feature_write(rows.flatten(1), cache.view(pages, PAGE, -1), self.positions, self.table, self.cu_rows)

    def held(self, cache: Tensor) -> Tensor:
        """What a cache holds for each row."""
        flat = cache.view(len(cache), PAGE, -1)
        return ops.feature_read(flat, self.positions, self.table, self.cu_rows).view(-1, *cache.shape[2:])

    def drift(self, context: Tensor, tau: float) -> list[bool]:
        found = ops.drift(context, self.c_cache, self.full, self.positions, self.table, self.cu_rows, tau)
        return found.tolist()

    def exact(self, scale: float = 0.4) -> Tensor:
        caches = (self.k_cache, self.v_cache)
        return ops.paged_attention(self.q, *caches, self.table, self.cu_rows, self.limit, scale)

    def partial(self, changed: list[int], tau: float = 0.9, scale: float = 0.4) -> tuple[Tensor, Tensor]:
        index = torch.tensor([*changed, *[-1] * (len(self.q) - len(changed))], dtype=torch.int64)
        cu_changed = torch.searchsorted(torch.tensor(changed), self.cu_rows.long()).int()
        dv = torch.cat([self.dv[changed], torch.full((len(self.q) - len(changed), KV, D), NAN)])
        return ops.partial_attention(
            self.q, self.k_cache, self.v_cache, dv, index, cu_changed, self.c_cache, self.full, self.positions,
            self.table, self.cu_rows, self.limit, scale, tau,
        )  # fmt: skip


# -- caches ------------------------------------------------------------------------------------------------------


def test_a_feature_is_read_as_it_was_written() -> None:
    for write in samples("feature_write"):
        if write.name == "pages missing":
            continue
        values, cache, *where = write.args
        ops.feature_write(values, cache, *where)
        assert torch.equal(ops.feature_read(cache, *where), values)


def test_rows_take_what_they_would_read() -> None:
    for read in samples("feature_read"):
        for cache, *where in (read.args, read.padded or read.args):
            slots = ops.row_slots(*where, cache)
            assert torch.equal(ops.feature_take(cache, slots), ops.feature_read(cache, *where)), read.name


def test_slots_are_those_of_live_rows_that_have_a_page() -> None:
    """Of pages of 4: a row without a page, one after the table, and padding rows that hold anything."""
    positions = torch.tensor([0, 5, 8, 9, 4, -3, 1_000_003, 2])
    table = torch.tensor([[3, -1], [0, 2]], dtype=torch.int32)
    cu_rows, cache = torch.tensor([0, 2, 5], dtype=torch.int32), torch.full((4, PAGE, 7), NAN)
    slots = ops.row_slots(positions, table, cu_rows, cache)
    assert slots.tolist() == [12, -1, -1, -1, 8, -1, -1, -1]
    cache[3, 0], cache[2, 0] = 1.0, 2.0
    assert ops.feature_take(cache, slots)[:, 0].tolist() == [1, 0, 0, 0, 2, 0, 0, 0]


def test_no_slot_reads_outside_of_the_cache() -> None:
    """A compiled region checks none."""
    cache = torch.arange(6.0).view(3, 2, 1)
    slots = torch.tensor([5, 6, 1 << 40, -1, -(1 << 40)])
    assert ops.feature_take(cache, slots)[:, 0].tolist() == [5, 5, 5, 0, 0]


def test_features_of_some_rows_leave_the_others() -> None:
    batch = Batch(5, 3)
    cache, new = torch.zeros(len(batch.c_cache), PAGE, 7), torch.randn(2, 7)
    ops.feature_write(new, cache, torch.tensor([4, 1]), batch.table, cu_rows_of([1, 1]))
    got = ops.feature_read(cache, batch.positions, batch.table, batch.cu_rows)
    assert torch.equal(got[[4, 6]], new)
    assert not got[[0, 1, 2, 3, 5, 7]].any()


def test_a_feature_without_a_page_is_not_written() -> None:
    batch, cache = Batch(5, 3), torch.zeros(4 + 2, PAGE, 7)
    table = batch.table.clone()
    table[0, 0] = -1
    ops.feature_write(torch.ones(8, 7), cache, batch.positions, table, batch.cu_rows)
    assert not cache[batch.table[0, 0]].any()
    assert int(cache.sum()) == 7 * (1 + 3)
    with pytest.raises(InputError, match="feature_write: a row's position lies on page 99, but the cache has 6"):
        ops.feature_write(torch.ones(8, 7), cache, batch.positions, torch.full_like(table, 99), batch.cu_rows)


def test_an_update_is_a_write_and_the_difference() -> None:
    for sample in samples("kv_update"):
        k, v, *caches = sample.args
        where, written = caches[2:5], [0, 1, *range(5, len(caches))]  # caches, and their scales where they have some
        mine = [c.clone() for c in caches]
        old, old_scale = mine[1].clone(), mine[6].clone() if len(mine) > 5 else None
        change = ops.kv_update(k, v, *mine)
        ops.kv_write(k, v, *caches)
        for i in written:
            assert_close(mine[i], caches[i], rtol=0, atol=0, equal_nan=True)
        before, now = ops.feature_read(old, *where), ops.feature_read(caches[1], *where)
        if old_scale is not None:
            before = unscaled(before, ops.feature_read(old_scale, *where), v.dtype)
            now = unscaled(now, ops.feature_read(caches[6], *where), v.dtype)
        assert torch.equal(change, now - before)


@pytest.mark.parametrize("name", ["kv_update", "drift", "feature_read"])
def test_a_page_that_is_not_assigned_is_named(name: str) -> None:
    for sample in samples(name)[:1]:
        args = [torch.full_like(a, -1) if torch.is_tensor(a) and a.dtype == torch.int32 and a.dim() == 2 else a
                for a in sample.args]  # fmt: skip
        with pytest.raises(InputError, match=f"dgraph::{name}: a row's position lies in a page that its sequence does"):
            OPS[name].reference(*args)


# -- drift -------------------------------------------------------------------------------------------------------


def test_a_row_is_salient_below_tau() -> None:
    batch = Batch(3, 2)
    angles = torch.tensor([0.0, 10.0, 20.0, 30.0, 170.0]) * math.pi / 180
    other = torch.randn(5, HEADS * D)
    old = batch.c.flatten(1)
    other = other - (other * old).sum(1, keepdim=True) / (old * old).sum(1, keepdim=True) * old
    other = other * (old.norm(dim=1) / other.norm(dim=1))[:, None]
    new = (3 * (old * angles.cos()[:, None] + other * angles.sin()[:, None])).view(5, HEADS, D)
    kept = batch.c_cache.clone()
    for tau, wanted in (
        (0.99, [0, 1, 1, 1, 1]),
        (0.95, [0, 0, 1, 1, 1]),
        (0.9, [0, 0, 0, 1, 1]),
        (-0.5, [0, 0, 0, 0, 1]),
    ):
        batch.c_cache.copy_(kept)
        assert batch.drift(new, tau) == [bool(w) for w in wanted]
        assert torch.equal(batch.held(batch.c_cache), new)


def test_rows_of_zeros() -> None:
    batch = Batch(4)
    old, new = torch.randn(4, HEADS, D), torch.randn(4, HEADS, D)
    old[[0, 1]], new[[0, 2]] = 0.0, 0.0  # both, the old one, the new one, none
    new[3] = old[3]
    for tau, wanted in ((0.5, [False, True, True, False]), (-0.5, [False] * 4), (1.0001, [True] * 4)):
        ops.feature_write(
            old.flatten(1), batch.c_cache.view(-1, PAGE, HEADS * D), batch.positions, batch.table, batch.cu_rows
        )
        assert batch.drift(new, tau) == wanted


def test_nothing_and_everything_is_salient() -> None:
    batch = Batch(4, 3)
    assert batch.drift(batch.c, 1.0001) == [True] * 7, "a cosine of one and a bit is clamped"
    assert batch.drift(-batch.c, -1.01) == [False] * 7
    batch.full[4:] = True
    assert batch.drift(batch.c, -1.01) == [False] * 4 + [True] * 3


def test_what_was_never_written_is_salient() -> None:
    batch = Batch(3)
    batch.c_cache.fill_(NAN)
    assert batch.drift(batch.c, -1.01) == [True] * 3
    assert batch.drift(batch.c, 0.99) == [False] * 3


# -- partial attention -------------------------------------------------------------------------------------------


def test_rows_that_changed_are_exact_and_the_others_updated() -> None:
    batch = Batch(6, 9)
    exact, old, changed = batch.exact(), batch.c.clone(), [1, 4, 7]
    context, salient = batch.partial(changed)
    for i in range(15):
        first, s = (0, 0) if i < 6 else (6, 1)
        rows = range(first, first + batch.lengths[s])
        if i in changed:
            assert torch.equal(context[i], exact[i]), "bit for bit"
            continue
        wanted = old[i].clone()
        for head in range(HEADS):
            scores = torch.stack([batch.q[i, head] @ batch.k[j, head // 2] * 0.4 for j in rows])
            for j, share in zip(rows, scores.softmax(0), strict=True):
                if j in changed:
                    wanted[head] += share * batch.dv[j, head // 2]
        assert_close(context[i], wanted)
    cosine = torch.cosine_similarity(context.flatten(1), old.flatten(1))
    assert torch.equal(salient, cosine < 0.9)
    assert torch.equal(batch.held(batch.c_cache), context)


def test_nothing_changed_leaves_every_context() -> None:
    batch = Batch(5, 4)
    old = batch.c.clone()
    context, salient = batch.partial([])
    assert torch.equal(context, old)
    assert not salient.any()


def test_a_change_in_one_sequence_is_none_of_another() -> None:
    batch = Batch(5, 4)
    old = batch.c.clone()
    context, _ = batch.partial([6])
    assert torch.equal(context[:5], old[:5])
    assert not torch.equal(context[5:], old[5:])


def test_if_no_score_changes_the_update_is_exact() -> None:
    """dC = S dV holds if q and K are those of the step before."""
    batch = Batch(7, 4)
    changed = [0, 3, 5, 8]
    before = batch.exact()
    ops.feature_write(
        before.flatten(1), batch.c_cache.view(-1, PAGE, HEADS * D), batch.positions, batch.table, batch.cu_rows
    )
    counts = cu_rows_of([3, 1])
    batch.dv[changed] = ops.kv_update(
        batch.k[changed],
        batch.v[changed] + 1,
        batch.k_cache,
        batch.v_cache,
        batch.positions[changed],
        batch.table,
        counts,
    )
    assert_close(batch.dv[changed], torch.ones(4, KV, D))
    context, _ = batch.partial(changed)
    assert_close(context, batch.exact())
    assert not torch.allclose(context, before)


@pytest.mark.parametrize("how", ["full", "tau", "index"])
def test_every_row_can_be_exact(how: str) -> None:
    batch = Batch(6, 3, 8)
    exact = batch.exact()
    if how == "full":
        batch.full.fill_(True)
        batch.dv.fill_(NAN)
        batch.c_cache.fill_(NAN)
    context, salient = batch.partial(list(range(17)) if how == "index" else [2], 1.01 if how == "tau" else 0.9)
    assert torch.equal(context, exact)
    assert salient.all() or how == "index"


def test_a_full_sequence_beside_a_sparse_one() -> None:
    batch = Batch(5, 6)
    batch.full[:5] = True
    batch.dv[[1, 2]] = NAN
    exact = batch.exact()
    context, salient = batch.partial([1, 2, 7])
    assert torch.equal(context[:5], exact[:5])
    assert salient[:5].all()
    assert context.isfinite().all()


@pytest.mark.parametrize("tau", [-1.01, 0.5, 0.99])
def test_salience_is_drift_of_the_context(tau: float) -> None:
    one, other = Batch(6, 9), Batch(6, 9)
    context, salient = one.partial([2, 9], tau)
    assert other.drift(context, tau) == salient.tolist()
    assert torch.equal(one.c_cache.nan_to_num(), other.c_cache.nan_to_num())
    assert salient.any() == (tau > -1)


def test_a_key_after_the_limit_adds_nothing() -> None:
    batch = Batch(8)
    batch.limit[:4] = 4
    old = batch.c.clone()
    context, _ = batch.partial([6])
    assert torch.equal(context[:4], old[:4])
    assert not torch.equal(context[4], old[4])
