"""The attention ops and the paged cache, against loops over single rows and heads."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, page_table_of, positions_of

ops = torch.ops.dgraph


def attend_row(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One row q[Hq, D] over keys and values [n, Hkv, D], one head at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[0] // keys.shape[1]
    for head in range(q.shape[0] if len(keys) else 0):
        scores = torch.stack([(q[head].double() @ key[head // group].double()) * scale for key in keys])
        weights = (scores - scores.max()).exp()
        out[head] = sum(w * v[head // group].double() for w, v in zip(weights, values, strict=True)) / weights.sum()
    return out


def sequences(cu_rows: Tensor) -> list[range]:
    return [range(a, b) for a, b in itertools.pairwise(cu_rows.tolist())]


def random_step(seed: int) -> dict[str, Tensor]:
    """A ragged batch with a paged cache, rows at the end of what is cached, one limit per row."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    b, page, d = rng.randint(1, 5), rng.choice([1, 4, 7, 16]), rng.choice([6, 8])
    hkv = rng.choice([1, 2])
    hq = hkv * rng.choice([1, 2, 3])
    counts = [rng.choice([0, 1, 3, 8, 17, 33]) for _ in range(b)]
    starts = [rng.choice([0, 1, 5, 16, 40]) for _ in range(b)]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    table, pages = page_table_of(lengths, page, generator)
    limit = torch.tensor([rng.randint(0, n) for n, c in zip(lengths, counts, strict=True) for _ in range(c)])
    n = sum(counts)
    return {
        "q": torch.randn(n, hq, d, generator=generator),
        "k": torch.randn(n, hkv, d, generator=generator),
        "v": torch.randn(n, hkv, d, generator=generator),
        "k_cache": torch.randn(pages, page, hkv, d, generator=generator),
        "v_cache": torch.randn(pages, page, hkv, d, generator=generator),
        "positions": positions_of(counts, starts),
        "page_table": table,
        "cu_rows": cu_rows_of(counts),
        "limit": limit.int(),
    }


def cached(cache: Tensor, table: Tensor, sequence: int, length: int) -> Tensor:
    """The first `length` positions of a sequence, looked up one by one."""
    page = cache.shape[1]
    found = [cache[table[sequence, p // page], p % page] for p in range(length)]
    return torch.stack(found) if found else cache.new_zeros(0, *cache.shape[2:])


def test_attention_is_bidirectional() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 8, generator=generator) for h in (4, 2, 2))
    got = ops.attention(q, k, v, 0.3)
    for b in range(2):
        for t in range(5):
            want = attend_row(q[b, :, t], k[b].transpose(0, 1), v[b].transpose(0, 1), 0.3)
            assert_close(got[b, :, t].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_packed_attention_against_loops(seed: int) -> None:
    step = random_step(seed)
    q, k, v, at, cu_rows, limit = (step[x] for x in ("q", "k", "v", "positions", "cu_rows", "limit"))
    got = ops.packed_attention(q, k, v, at, cu_rows, limit, 0.4)
    for rows in sequences(cu_rows):
        for i in rows:
            seen = [j for j in rows if at[j] < limit[i]]
            assert_close(got[i].double(), attend_row(q[i], k[seen], v[seen], 0.4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_paged_attention_against_loops(seed: int) -> None:
    step = random_step(seed + 100)
    q, table, cu_rows, limit = (step[x] for x in ("q", "page_table", "cu_rows", "limit"))
    got = ops.paged_attention(q, step["k_cache"], step["v_cache"], table, cu_rows, limit, 0.4)
    for s, rows in enumerate(sequences(cu_rows)):
        for i in rows:
            k, v = (cached(step[name], table, s, int(limit[i])) for name in ("k_cache", "v_cache"))
            assert_close(got[i].double(), attend_row(q[i], k, v, 0.4), rtol=1e-5, atol=1e-5)


def with_ranges(step: dict[str, Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """A gap for each row, empty for some, and the rows that see a key of their own."""
    generator = torch.Generator().manual_seed(seed)
    n = len(step["q"])
    begin, size = (torch.randint(0, 12, (n,), generator=generator) for _ in range(2))
    return torch.stack([begin, begin + size], 1).int(), torch.rand(n, generator=generator) < 0.4


@pytest.mark.parametrize("seed", range(6))
def test_two_ranges_and_own_keys_against_loops(seed: int) -> None:
    """In float64, with NaN for the keys of rows without their flag and for slots that are not written."""
    step = {n: x.double() if x.is_floating_point() else x for n, x in random_step(seed + 400).items()}
    gap, own = with_ranges(step, seed)
    q, table, cu_rows, limit, at = (step[x] for x in ("q", "page_table", "cu_rows", "limit", "positions"))
    packed = ops.packed_attention(q, step["k"], step["v"], at, cu_rows, limit, 0.4, None, 0, gap, own)
    alone = (x.masked_fill(~own[:, None, None], torch.nan) for x in (step["k"], step["v"]))
    caches = step["k_cache"], step["v_cache"]
    paged = ops.paged_attention(q, *caches, table, cu_rows, limit, 0.4, None, None, None, 0, gap, own, *alone)
    for s, rows in enumerate(sequences(cu_rows)):
        for i in rows:
            begin, end = gap[i].tolist()
            seen = [j for j in rows if not own[j] and at[j] < limit[i] and not begin <= at[j] < end]
            seen += [i] if own[i] else []
            assert_close(packed[i], attend_row(q[i], step["k"][seen], step["v"][seen], 0.4))
            there = [p for p in range(int(limit[i])) if not begin <= p < end]
            k, v = (cached(x, table, s, int(limit[i]))[there] for x in caches)
            if own[i]:
                k, v = torch.cat([k, step["k"][i : i + 1]]), torch.cat([v, step["v"][i : i + 1]])
            assert_close(paged[i], attend_row(q[i], k, v, 0.4))


def test_rows_that_are_not_written_are_seen_by_themselves_alone() -> None:
    """Rows after the others of a sequence: through the cache they see what they see among the rows of the step."""
    generator = torch.Generator().manual_seed(7)
    at = torch.tensor([0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 1])  # the last two of the first sequence, the last of the second
    own = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1]).bool()
    q, k, v = (torch.randn(11, h, 8, generator=generator) for h in (4, 2, 2))
    gap = torch.where(own[:, None], torch.stack([at, at + 1], 1), 0).int()
    cu_rows, limit = cu_rows_of([7, 4]), torch.tensor([5] * 7 + [3] * 4).int()
    table, pages = page_table_of([5, 3], 2, generator)
    caches = [torch.full((pages, 2, 2, 8), torch.nan) for _ in range(2)]
    ops.kv_write(k, v, *caches, at, table, cu_rows, None, None, own)
    got = ops.paged_attention(q, *caches, table, cu_rows, limit, 0.4, None, None, None, 0, gap, own, k, v)
    want = ops.packed_attention(q, k, v, at, cu_rows, limit, 0.4, None, 0, gap, own)
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    plain = [x[~own] for x in (q, k, v, at)]
    without = ops.packed_attention(*plain, cu_rows_of([5, 3]), limit[~own], 0.4)
    assert_close(want[~own], without, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_kv_write_stores_live_rows_and_nothing_else(seed: int) -> None:
    step = random_step(seed + 200)
    at, table, cu_rows = (step[x] for x in ("positions", "page_table", "cu_rows"))
    page = step["k_cache"].shape[1]
    expected = {name: step[name].clone() for name in ("k_cache", "v_cache")}
    for s, rows in enumerate(sequences(cu_rows)):
        for i in rows:
            slot = int(table[s, int(at[i]) // page]), int(at[i]) % page
            expected["k_cache"][slot], expected["v_cache"][slot] = step["k"][i], step["v"][i]
    result = ops.kv_write(step["k"], step["v"], step["k_cache"], step["v_cache"], at, table, cu_rows)
    assert result is None
    assert_close((step["k_cache"], step["v_cache"]), (expected["k_cache"], expected["v_cache"]), rtol=0, atol=0)


def test_kv_write_skips_rows_whose_position_has_no_page() -> None:
    step = random_step(5)
    args = [step[x] for x in ("k", "v", "k_cache", "v_cache", "positions", "page_table", "cu_rows")]
    caches, at, table, cu_rows = [c.clone() for c in args[2:4]], *args[4:]
    ops.kv_write(*args)
    page, gone = caches[0].shape[1], table[:, :1].clone()
    assert any(int(at[i]) < page for rows in sequences(cu_rows) for i in rows)
    table[:, :1] = -1
    ops.kv_write(args[0], args[1], *caches, at, table, cu_rows)
    written = [s for s, rows in enumerate(sequences(cu_rows)) if any(int(at[i]) < page for i in rows)]
    for mine, whole in zip(caches, args[2:4], strict=True):
        differ = [p for p in range(len(mine)) if not torch.equal(mine[p], whole[p])]
        assert differ == sorted(gone[written, 0].tolist())


@pytest.mark.parametrize("block", [4, 8, 32])
def test_write_then_read_is_packed_attention(block: int) -> None:
    """A block-causal prefill through the cache sees what the same prefill without a cache sees."""
    generator = torch.Generator().manual_seed(block)
    counts, page = (10, 0, 37, 8, 1), 4
    q, k, v = (torch.randn(sum(counts), h, 8, generator=generator) for h in (4, 2, 2))
    at, cu_rows = positions_of(counts, [0] * 5), cu_rows_of(counts)
    ends = torch.tensor(counts).repeat_interleave(torch.tensor(counts))
    limit = torch.minimum((at // block + 1) * block, ends).int()
    table, pages = page_table_of(counts, page, generator)
    caches = [torch.full((pages, page, 2, 8), torch.nan) for _ in range(2)]
    ops.kv_write(k, v, *caches, at, table, cu_rows)
    got = ops.paged_attention(q, *caches, table, cu_rows, limit, 0.35)
    assert_close(got, ops.packed_attention(q, k, v, at, cu_rows, limit, 0.35), rtol=1e-5, atol=1e-5)


def test_unused_slots_and_table_entries_are_never_read() -> None:
    step = random_step(3)
    table, cu_rows, limit = step["page_table"], step["cu_rows"], step["limit"]
    names = ("k_cache", "v_cache")
    page = step["k_cache"].shape[1]
    clean = ops.paged_attention(step["q"], *(step[n] for n in names), table, cu_rows, limit, 0.4)
    dirty = {name: torch.full_like(step[name], torch.nan) for name in names}
    beyond = torch.full((len(table), table.shape[1] + 3), 10**6, dtype=torch.int32)
    for s, rows in enumerate(sequences(cu_rows)):
        longest = max([0, *(int(limit[i]) for i in rows)])
        beyond[s, : -(-longest // page)] = table[s, : -(-longest // page)]
        for p in range(longest):
            for name in names:
                dirty[name][table[s, p // page], p % page] = step[name][table[s, p // page], p % page]
    got = ops.paged_attention(step["q"], *dirty.values(), beyond, cu_rows, limit, 0.4)
    assert_close(got, clean, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch(seed: int) -> None:
    step = random_step(seed + 300)
    q, k, v, at, cu_rows, limit = (step[x] for x in ("q", "k", "v", "positions", "cu_rows", "limit"))
    caches, table = (step["k_cache"], step["v_cache"]), step["page_table"]
    packed = ops.packed_attention(q, k, v, at, cu_rows, limit, 0.4)
    paged = ops.paged_attention(q, *caches, table, cu_rows, limit, 0.4)
    for s, rows in enumerate(sequences(cu_rows)):
        r, alone = slice(rows.start, rows.stop), cu_rows_of([len(rows)])
        one = ops.packed_attention(q[r], k[r], v[r], at[r], alone, limit[r], 0.4)
        two = ops.paged_attention(q[r], *caches, table[s : s + 1], alone, limit[r], 0.4)
        assert_close((one, two), (packed[r], paged[r]), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_two_ranges_give_the_same_bits_alone_and_in_a_batch(seed: int) -> None:
    step = random_step(seed + 500)
    q, k, v, cu_rows, limit = (step[x] for x in ("q", "k", "v", "cu_rows", "limit"))
    caches, table, (gap, own) = (step["k_cache"], step["v_cache"]), step["page_table"], with_ranges(step, seed)
    more = None, None, None, 0
    paged = ops.paged_attention(q, *caches, table, cu_rows, limit, 0.4, *more, gap, own, k, v)
    for s, rows in enumerate(sequences(cu_rows)):
        r, alone = slice(rows.start, rows.stop), cu_rows_of([len(rows)])
        by_row = gap[r], own[r], k[r], v[r]
        one = ops.paged_attention(q[r], *caches, table[s : s + 1], alone, limit[r], 0.4, *more, *by_row)
        assert_close(one, paged[r], rtol=0, atol=0)


def test_a_large_batch_is_split_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    step = random_step(4)
    args = (
        step["q"],
        step["k_cache"],
        step["v_cache"],
        step["page_table"],
        step["cu_rows"],
        step["limit"],
        0.4,
    )
    whole = ops.paged_attention(*args)
    monkeypatch.setattr("dgraph.ops.padded.GROUP_ELEMENTS", 1)
    assert_close(ops.paged_attention(*args), whole, rtol=0, atol=0)


def test_errors_say_what_is_wrong() -> None:
    q, k, cu_rows = torch.randn(2, 3, 8), torch.randn(2, 2, 8), cu_rows_of([2])
    at, limit = torch.tensor([0, 1]), torch.tensor([2, 2]).int()
    cache, table = torch.randn(1, 4, 2, 8), torch.zeros(1, 1).int()
    with pytest.raises(InputError, match="got 3, 2"):
        ops.packed_attention(q, k, k, at, cu_rows, limit, 1.0)
    with pytest.raises(InputError, match="sees 5 positions, but the page table holds 1 pages of 4"):
        ops.paged_attention(q[:, :2], cache, cache, table, cu_rows, limit + 3, 1.0)
    with pytest.raises(InputError, match="page_table entry is negative"):
        ops.paged_attention(q[:, :2], cache, cache, table - 1, cu_rows, limit, 1.0)
    two = ops.paged_attention, (q[:, :2], cache, cache, table, cu_rows, limit, 1.0, None, None, None, 0)
    with pytest.raises(InputError, match=r"a gap is i32\[N, 2\].* Got \[2\] for 2 rows"):
        two[0](*two[1], limit)
    with pytest.raises(InputError, match=r"with k and v \[2, 2, 8\]; give all three or none of them, got own=None"):
        two[0](*two[1], None, None, k, k)
    with pytest.raises(InputError, match=r"k=torch.float32 \[2, 3, 8\]"):
        two[0](*two[1], None, limit > 0, q, k)
    with pytest.raises(InputError, match="kv_write: a row's position lies on page 1, but the cache has 1 pages"):
        ops.kv_write(k, k, cache, cache.clone(), at, table + 1, cu_rows)
    with pytest.raises(InputError, match="kv_write: a row has position 5, but the page table holds 1 pages of 4"):
        ops.kv_write(k, k, cache, cache.clone(), at + 4, table, cu_rows)
