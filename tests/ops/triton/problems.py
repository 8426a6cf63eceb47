"""Random calls of the ops that have kernels, larger than their samples; and comparing results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.families.quantised import ROW_KINDS
from dgraph.ops import OPS
from dgraph.ops.attention import paged_attention
from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of, positions_of
from dgraph.ops.kv.scales import FLOAT8
from dgraph.ops.padded import sequence_of, slots_of
from dgraph.ops.selection.compare_rows import nearby
from dgraph.ops.statistics import CURRENT, ENTROPY, KL, MARGIN, declare, kept_rows

Call = tuple[Any, ...]


def flat(value: Any) -> list[Tensor]:
    """The tensors of nested lists, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in flat(part)] if isinstance(value, (list, tuple)) else []


def moved(value: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """Copies on `device`; floating matrices (q, k, v, caches, hidden states, weights) in `dtype`, but for float8."""
    if isinstance(value, Tensor):
        wide = value.is_floating_point() and value.dim() > 1 and value.dtype != FLOAT8
        return value.to(device, dtype if wide and dtype is not None else value.dtype, copy=True)
    return type(value)(moved(part, device, dtype) for part in value) if isinstance(value, (list, tuple)) else value


def mutated(name: str, args: Sequence[Any]) -> list[Tensor]:
    """The arguments that the op writes."""
    return OPS[name].written(args)


def expected(name: str, args: Call) -> list[Tensor]:
    """Results and written arguments of the reference."""
    copies = moved(args, "cpu")
    return flat(OPS[name].reference(*copies)) + mutated(name, copies)


def compare(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float = 2e-5) -> None:
    """Same integers, flags and float8, close floats; NaN where the other has NaN."""
    for one, other in zip(got, want, strict=True):
        near = 0.0 if one.dtype == FLOAT8 else tolerance
        assert_close(one.cpu(), other.to(one.dtype).cpu(), rtol=near, atol=near, equal_nan=True)


UNWRITTEN = {"rows_glu": 3, "rows_linear": 3, "rows_norm": 3, "rows_quantise": 2, "rows_rope": 3}
"""Ops that write live rows only, and the place of the argument that counts them."""


def settled(name: str, args: Call, found: Sequence[Tensor]) -> list[Tensor]:
    """Results without what a contract leaves open: NaN in the rows that are not written."""
    if name == "compact":
        return [nan_where(args[1].to(out.device) < 0, out) if out.is_floating_point() else out for out in found]
    if name not in UNWRITTEN:
        return list(found)
    rows = torch.arange(len(found[0]), device=found[0].device)
    padding = rows >= args[UNWRITTEN[name]][-1].to(rows.device)
    # What numbers of 8 bits are where nobody wrote them is as good as anything.
    eight = [out.float().masked_fill(padding[:, None], 0) if out.element_size() == 1 else out for out in found]
    return [nan_where(padding, out) if out is same else out for out, same in zip(eight, found, strict=True)]


def nan_where(rows: Tensor, out: Tensor) -> Tensor:
    """`out` with NaN in the flagged rows."""
    return out.masked_fill(rows.reshape(-1, *(1,) * (out.dim() - 1)), torch.nan)


def attention(
    counts: Sequence[int],
    lengths: Sequence[int],
    *,
    page: int = 16,
    heads: tuple[int, int] = (8, 2),
    d: int = 32,
    padding: int = 3,
    seed: int = 0,
) -> Call:
    """Rows whose limits vary within each sequence (the last sees all `lengths`); unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    table, pages = page_table_of(lengths, page, generator)
    caches = [torch.full((pages, page, heads[1], d), float("nan")) for _ in range(2)]
    limits = []
    for s, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        position = torch.arange(length)
        at = table[s, position // page].long(), position % page
        for cache in caches:
            cache[at] = torch.randn(length, heads[1], d, generator=generator)
        limit = torch.randint(length // 2, length + 1, (count,), generator=generator)
        limit[-1:] = length
        limits.append(limit)
    limit = torch.cat(limits).int()
    q = torch.randn(len(limit), heads[0], d, generator=generator)
    return pad_rows(q, padding), *caches, table, cu_rows_of(counts), pad_rows(limit, padding), d**-0.5


def two_ranges(args: Call, *, window: int = 0, seed: int = 0) -> Call:
    """The same attention with gaps and keys of their own: of most rows one, of a row that sees nothing else another.

    Args:
        args: as `attention` makes them, in float8 or not.
        window: positions that a row sees before its limit, 0 for all.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k_cache, *_, limit, _ = args[:7]
    begin = (limit * torch.rand(len(q), generator=generator)).int()
    gap = torch.stack([begin, begin + torch.randint(0, 30, (len(q),), generator=generator)], 1).int()
    gap[0] = torch.tensor([0, 1 << 20])
    own = torch.rand(len(q), generator=generator) < 0.6
    own[0] = True
    k, v = (torch.randn(len(q), *k_cache.shape[2:], generator=generator) for _ in "kv")
    for x in (k, v):
        x[~own] = torch.nan
    origin = (limit - 1).int() if window else None
    return *args[:7], *(args[7:9] or (None, None)), origin, window, gap, own, k.to(q.dtype), v.to(q.dtype)


def importance(
    counts: Sequence[int],
    *,
    share: float = 0.8,
    heads: tuple[int, int] = (8, 2),
    d: int = 32,
    pool: int = 3,
    seed: int = 0,
) -> Call:
    """Random queries and keys, `share` of the rows masked, padding rows of NaN."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(counts)
    q, k = (torch.randn(n, h, d, generator=generator) for h in heads)
    masked = torch.rand(n, generator=generator) < share
    return *(pad_rows(x, 3) for x in (q, k, masked)), cu_rows_of(counts), d**-0.5, pool


def selection(
    counts: Sequence[int], *, share: float = 0.8, alpha: float = 1.5, keep: int = 0, seed: int = 0, shift: int = 0
) -> Call:
    """Scores in a few levels for half of the sequences, so that there are ties; positions with gaps. shift: 1 if rows
    predict the next position, so that others than the candidates hold masks.
    """
    generator = torch.Generator().manual_seed(seed)
    n, b = sum(counts), len(counts)
    score = torch.randn(n, generator=generator)
    score = torch.where(torch.rand(n, generator=generator) < 0.5, (score * 2).round(), score)
    masked = torch.rand(n, generator=generator) < share
    parts = [torch.randperm(c + c // 4 + 1, generator=generator)[:c].sort().values for c in counts]
    positions = torch.cat(parts)
    limit = torch.cat([p.new_full((len(p),), int(p.max()) + 1) if len(p) else p for p in parts]).int()
    average, reached = torch.rand(b, generator=generator) * 4, torch.randint(-1, 9, (b,), generator=generator).int()
    rows = tuple(pad_rows(x, 3) for x in (score, masked, positions))
    found = *rows, cu_rows_of(counts), pad_rows(limit, 3), average, reached, alpha, keep
    return (*found, pad_rows(masked.roll(1), 3)) if shift else found


def keeping(counts: Sequence[int], capacity: int, *, share: float = 0.5, seed: int = 0) -> Call:
    """Random flags, with padding rows that are flagged."""
    keep = torch.rand(sum(counts), generator=torch.Generator().manual_seed(seed)) < share
    return pad_rows(keep, 5), cu_rows_of(counts), capacity


def gathering(n: int, k: int, *, width: int = 48, seed: int = 0) -> Call:
    """More values than one launch takes, of every word size, two of them views with a stride."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(n, 3 * width, generator=generator)
    values = [
        wide[:, width : 2 * width].unflatten(1, (-1, 4)),
        torch.randint(0, 99, (n, 7), generator=generator).to(torch.uint8)[:, 1:4],
        torch.randn(n, 5, generator=generator).bfloat16(),
        *(torch.randint(0, 99, (n,), generator=generator) for _ in range(10)),
        torch.rand(n, generator=generator) < 0.5,
    ]
    index = torch.randint(0, n, (k,), generator=generator)
    return values, torch.cat([index, index.new_full((3,), -1)])


def writing(counts: Sequence[int], starts: Sequence[int], *, page: int = 16, heads: int = 2, d: int = 32) -> Call:
    """Keys and values that are views of one projection; pages in random order."""
    generator = torch.Generator().manual_seed(0)
    table, pages = page_table_of([c + s for c, s in zip(counts, starts, strict=True)], page, generator)
    qkv = pad_rows(torch.randn(sum(counts), 5 * heads, d, generator=generator), 3)
    caches = [torch.randn(pages, page, heads, d, generator=generator) for _ in range(2)]
    positions = pad_rows(positions_of(counts, starts), 3)
    return qkv[:, 3 * heads : 4 * heads], qkv[:, 4 * heads :], *caches, positions, table, cu_rows_of(counts)


def partial(
    counts: Sequence[int],
    lengths: Sequence[int],
    *,
    share: float = 0.3,
    full: Sequence[int] = (),
    tau: float = 0.97,
    page: int = 8,
    heads: tuple[int, int] = (4, 2),
    d: int = 16,
    padding: int = 3,
    seed: int = 0,
    apart: bool = False,
) -> Call:
    """Rows at any positions of each sequence, `share` of them changed; the sequences in `full` take a full step.

    Limits vary within each sequence, and not every row sees every changed key. apart: contexts are in other pages.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k_cache, v_cache, table, cu_rows, limit, scale = attention(
        counts, lengths, page=page, heads=heads, d=d, padding=0, seed=seed
    )
    n, orders = len(q), [torch.randperm(length, generator=generator) for length in lengths]
    positions = torch.cat([order[:count].sort().values for order, count in zip(orders, counts, strict=True)])
    context = paged_attention.reference(q, k_cache, v_cache, table, cu_rows, limit, scale)
    c_cache = torch.full((*k_cache.shape[:2], *q.shape[1:]), torch.nan)
    c_cache[slots_of("partial", positions, table, cu_rows, page)] = nearby(context, generator)
    chosen = (torch.rand(n, generator=generator) < share).nonzero().squeeze(1)
    index = torch.cat([chosen, chosen.new_full((n - len(chosen),), -1)])
    dv = torch.randn(n, heads[1], d, generator=generator) * 0.5
    dv[len(chosen) :] = torch.nan
    dense = torch.isin(sequence_of(cu_rows, n), torch.tensor(full, dtype=torch.int64))
    cu_changed = torch.searchsorted(chosen, cu_rows.long()).int()
    padded = [pad_rows(x, padding) for x in (q, dv, dense, positions, limit)]
    index = torch.cat([index, index.new_full((padding,), -1)])
    rest = (table, cu_rows, padded[4], scale, tau)
    if apart:
        c_cache, rest = c_cache.flip(0), (*rest, None, None, torch.where(table < 0, table, len(c_cache) - 1 - table))
    return padded[0], k_cache, v_cache, padded[1], index, cu_changed, c_cache, *padded[2:4], *rest


def drifting(
    counts: Sequence[int], starts: Sequence[int], *, heads: int = 3, d: int = 20, page: int = 16, seed: int = 0
) -> Call:
    """Contexts that are views, near to what the cache holds and far from it; one sequence is full."""
    generator = torch.Generator().manual_seed(seed)
    table, pages = page_table_of([c + s for c, s in zip(counts, starts, strict=True)], page, generator)
    cu_rows, positions = cu_rows_of(counts), positions_of(counts, starts)
    context = torch.randn(sum(counts), 2 * heads, d, generator=generator)[:, heads:]
    cache = torch.full((pages, page, heads, d), torch.nan)
    cache[slots_of("drifting", positions, table, cu_rows, page)] = nearby(context, generator)
    full = sequence_of(cu_rows, sum(counts)) == len(counts) - 1
    return *(x if x is cache else pad_rows(x, 3) for x in (context, cache, full, positions)), table, cu_rows, 0.97


def comparing(counts: Sequence[int], starts: Sequence[int], heads: int = 3, d: int = 20, some: bool = False) -> Call:
    """The same rows for compare_rows; with `some`, two of three take part."""
    context, cache, _, positions, table, cu_rows, _ = drifting(counts, starts, heads=heads, d=d)
    return context, cache, positions, table, cu_rows, torch.arange(len(context)) % 3 > 0 if some else None


def summed(counts: Sequence[int]) -> Call:
    """Sums for least_drifted whose cosines are further apart than rounding; every fifth row is full."""
    count = sum(counts)
    cosines = torch.linspace(-0.9, 0.9, count)[torch.randperm(count, generator=torch.Generator().manual_seed(count))]
    sums = pad_rows(torch.stack([cosines, torch.ones(count), torch.ones(count)], 1), 3)
    rows = torch.arange(count + 3)
    return sums, rows % 5 == 0, cu_rows_of(counts), 0.25, rows % 7 > 0


def features(counts: Sequence[int], starts: Sequence[int], *, width: int = 40, page: int = 16, seed: int = 0) -> Call:
    """Values that are views, and a cache: a call of feature_write, and without the values one of feature_read."""
    generator = torch.Generator().manual_seed(seed)
    table, pages = page_table_of([c + s for c, s in zip(counts, starts, strict=True)], page, generator)
    values = pad_rows(torch.randn(sum(counts), 2 * width, generator=generator), 3)[:, width:]
    cache = torch.randn(pages, page, width, generator=generator)
    return values, cache, pad_rows(positions_of(counts, starts), 3), table, cu_rows_of(counts)


def merging(
    counts: Sequence[int], starts: Sequence[int], *, width: int = 40, page: int = 16, share: float = 0.4, seed: int = 0
) -> Call:
    """New values that are views, of some rows; every third page is missing."""
    values, cache, positions, table, cu_rows = features(counts, starts, width=width, page=page, seed=seed)
    chosen = (torch.rand(sum(counts), generator=torch.Generator().manual_seed(seed)) < share).nonzero()[:, 0]
    values[len(chosen) :] = torch.nan
    index = torch.cat([chosen, chosen.new_full((len(values) - len(chosen),), -1)])
    return values, index, cache, positions, torch.where(table % 3 == 0, -1, table), cu_rows


def heading(
    rows: int,
    *,
    vocab: int = 700,
    d: int = 24,
    chunk: int = 8,
    share: float = 0.8,
    heat: float = 0.9,
    bias: bool = True,
    seed: int = 0,
) -> Call:
    """Greedy and drawn rows, `share` of them masked, and a suppressed id that would win."""
    generator = torch.Generator().manual_seed(seed)
    h, weight = (torch.randn(n, d, generator=generator) for n in (rows, vocab))
    offset = torch.randn(vocab, generator=generator) if bias else None
    if offset is not None:
        offset[vocab // 3] = 50.0
    masked = torch.rand(rows, generator=generator) < share
    temperature = heat * (torch.rand(rows, generator=generator) < 0.6)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    return h, weight, offset, masked, temperature, seeds, chunk, vocab // 3 if bias else -1


def heading_part(rows: int, first: int, ids: int, **options: Any) -> Call:
    """As `heading`, the ids of one rank; the suppressed one would win among them."""
    *call, suppress = heading(rows, **options)
    stands = torch.randint(-1, ids, (rows,), generator=torch.Generator().manual_seed(2))
    return (*call, first + suppress if suppress >= 0 else -1, False, torch.tensor([first]), ids, stands)


def measuring(rows: int, **options: Any) -> Call:
    """As `heading`, with statistics; every other row was seen before."""
    call = heading(rows, **options)
    chosen = (KL(top=3), MARGIN, ENTROPY, CURRENT)
    width = kept_rows(chosen, len(call[1])).element[-1]
    generator = torch.Generator().manual_seed(1)
    state = torch.rand(rows + 3, 1, width, generator=generator).neg() - 2  # log-probabilities
    state[:, :, 0] = torch.arange(rows + 3)[:, None] % 2
    state[:, :, 1:4] = torch.arange(3.0)  # ids
    slot = torch.randperm(rows + 3, generator=generator)[:rows]
    slot[::7] = -1
    stands = torch.randint(-1, len(call[1]), (rows,), generator=generator)
    return (*call, False, slot, stands, state, declare(chosen))


def adjusting(rows: int, **options: Any) -> Call:
    """As `heading`, with the tables of three sequences; one of them adjusts nothing."""
    call = heading(rows, **options)
    generator, vocab = torch.Generator().manual_seed(2), len(call[1])
    scale, addend = 1 + torch.rand(3, vocab, generator=generator), torch.randn(3, vocab, generator=generator)
    scale[0], addend[0], addend[1, 1::3] = 1, 0, -torch.inf
    sequence = torch.randint(0, 3, (rows,), generator=generator)
    return (*call, False, sequence, scale, addend, torch.tensor([0.0, 0.1, 0.6]))


def product(
    rows: int, capacity: int, d_in: int, d_out: int, *, bias: bool = False, index: torch.dtype = torch.int32
) -> Call:
    """The first `rows` of `capacity` rows are live; the others, and what a view leaves out, are NaN."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.full((capacity, d_in + 16), torch.nan)
    x[:rows, :d_in] = torch.randn(rows, d_in, generator=generator)
    weight = torch.randn(d_out, d_in, generator=generator) * d_in**-0.5
    offset = torch.randn(d_out, generator=generator) if bias else None
    return x[:, :d_in], weight, offset, torch.tensor([0, rows // 2, rows], dtype=index)


def norming(rows: int, capacity: int, d: int, *, index: torch.dtype = torch.int32) -> Call:
    """Columns of a wider matrix, of which the first rows are live and the others NaN."""
    x, _, _, count = product(rows, capacity, d, 1, index=index)
    return x, torch.randn(d, generator=torch.Generator().manual_seed(d)), 1e-6, count


def rounding(rows: int, capacity: int, d: int, kind: str, *, index: torch.dtype = torch.int32) -> Call:
    """The same columns, to be rounded."""
    x, _, _, count = norming(rows, capacity, d, index=index)
    return x, kind, count


def rotating(rows: int, capacity: int, heads: int, d: int, *, normed: bool = False) -> Call:
    """Keys of a projection of keys and values; rows that are not live are NaN."""
    generator = torch.Generator().manual_seed(rows)
    both = torch.full((capacity, 2 * heads, d), torch.nan)
    both[:rows] = torch.randn(rows, 2 * heads, d, generator=generator)
    theta = pad_rows(torch.rand(rows, 1, d // 2, generator=generator) * 6, capacity - rows).repeat(1, 1, 2)
    weight = torch.randn(d, generator=generator) if normed else None
    return both[:, :heads], theta.cos(), theta.sin(), torch.tensor([0, rows // 2, rows]).int(), weight, 1e-6


MANY = (2, *(0,) * 515, 3, 0, 1)
LARGER: list[tuple[str, str, Call]] = [
    ("paged_attention", "ragged", attention((9, 0, 1, 17, 4), (40, 0, 5, 200, 33))),
    ("paged_attention", "one head each, page of 1", attention((3, 2), (19, 64), page=1, heads=(2, 2), d=8)),
    ("paged_attention", "many rows of few sequences", attention((70, 3), (96, 9), heads=(4, 1), d=16, page=64)),
    ("paged_attention", "more sequences than fit in a block of offsets", attention(MANY, MANY, heads=(1, 1), d=8)),
    ("paged_attention", "two ranges", two_ranges(attention((9, 0, 1, 17, 4), (40, 0, 5, 200, 33)))),
    ("importance", "blocks of 64 and leftovers", importance((64, 31, 0, 5, 64))),
    ("importance", "lists longer than a tile", importance((150, 3), share=0.9, d=16)),
    ("importance", "wide pool, odd group", importance((20, 33), heads=(3, 1), pool=7, d=10)),
    ("select_tokens", "two blocks each", selection((64, 40, 0, 64, 1, 17))),
    ("select_tokens", "longer than a tile", selection((150, 70), alpha=9.5)),
    ("select_tokens", "few averages", selection((32,) * 8, alpha=1.0, share=1.1, seed=3)),
    ("select_tokens", "fixed budget", selection((48, 64, 5), keep=7)),
    ("select_tokens", "rows predict the next position", selection((64, 40, 0, 64, 1, 17), shift=1)),
    ("keep_index", "many rows", keeping((300, 0, 41, 259), 400)),
    ("keep_index", "large capacity", keeping((5, 3), 600)),
    ("compact", "many values", gathering(40, 25)),
    ("kv_write", "more sequences than fit in a block of offsets", writing(MANY, MANY)),
    ("kv_write", "views", writing((7, 0, 33, 2), (0, 0, 15, 63))),
    ("kv_update", "views", writing((7, 0, 33, 2), (0, 0, 15, 63), page=4)),
    ("drift", "more sequences than fit in a block of offsets", drifting(MANY, MANY)),
    ("drift", "rows longer than a block", drifting((5, 0, 9), (3, 0, 60), heads=9, d=500)),
    ("least_similar", "more sequences than fit in a block of offsets", (*drifting(MANY, MANY)[:-1], 0.5)),
    ("least_similar", "many rows", (*drifting((90, 0, 41, 9), (3, 0, 60, 1))[:-1], 0.25)),
    ("compare_rows", "more sequences than fit in a block of offsets", comparing(MANY, MANY)),
    ("compare_rows", "rows longer than a block, some take part", comparing((5, 0, 9), (3, 0, 60), 9, 500, some=True)),
    ("least_drifted", "many rows", summed((1300, 0, 41, 9))),
    ("feature_write", "views", features((7, 0, 33, 2), (0, 0, 15, 63))),
    ("feature_write", "rows longer than a block", features((3, 2), (1, 0), width=4100, page=4)),
    ("feature_read", "rows longer than a block", features((3, 2), (1, 0), width=4100, page=4)[1:]),
    ("feature_merge", "views", merging((7, 0, 33, 2), (0, 0, 15, 63))),
    ("feature_merge", "more sequences than fit in a block of offsets", merging(MANY, MANY)),
    ("feature_merge", "rows longer than a block, all listed", merging((3, 2), (1, 0), width=4100, page=4, share=1.1)),
    *(("feature_merge", f"one of {n} rows", merging((n,), (3,), width=8, page=4, share=1 / n)) for n in (1, 2, 31, 64)),
    ("partial_attention", "ragged, one full", partial((9, 0, 1, 17, 4), (40, 0, 5, 90, 33), full=(3,))),
    (
        "partial_attention",
        "contexts in pages of their own",
        partial((9, 0, 17, 4), (40, 5, 90, 33), full=(2,), apart=True),
    ),
    ("partial_attention", "none changed", partial((9, 4), (30, 20), share=-1.0, padding=0)),
    ("partial_attention", "all changed", partial((9, 4), (30, 20), share=1.1)),
    (
        "partial_attention",
        "all full, one head each",
        partial((3, 2), (19, 64), full=(0, 1), page=4, heads=(2, 2), d=10),
    ),
    ("partial_attention", "tau above 1, page of 1", partial((5, 2), (9, 12), tau=1.5, page=1)),
    ("partial_attention", "many rows of few sequences", partial((70, 3), (96, 9), heads=(4, 1), page=64, share=0.6)),
    ("partial_attention", "a group of seven", partial((20, 5), (130, 31), heads=(14, 2), page=128, seed=3)),
    ("partial_attention", "more sequences than fit in a block of offsets", partial(MANY, MANY, heads=(1, 1), d=8)),
    ("partial_context", "ragged, one full", partial((9, 0, 1, 17, 4), (40, 0, 5, 90, 33), full=(3,))),
    ("partial_context", "many rows of few sequences", partial((70, 3), (96, 9), heads=(4, 1), page=64, share=0.6)),
    ("list_kept", "many rows", keeping((300, 0, 41, 259), -1)[:2]),
    *(
        ("rows_linear", f"{rows} of 150 rows", product(rows, 150, 96, 200, bias=rows % 2 == 0))
        for rows in (0, 1, 15, 16, 17, 63, 64, 65, 129, 150)
    ),
    ("rows_linear", "odd sizes", product(21, 37, 45, 77, bias=True)),
    ("rows_linear", "one column, offsets of 64 bits", product(5, 9, 40, 1, index=torch.int64)),
    *(
        ("rows_glu", f"{rows} of 150 rows", product(rows, 150, 96, 200, bias=rows % 2 == 0))
        for rows in (0, 1, 15, 16, 17, 63, 64, 65, 129, 150)
    ),
    ("rows_glu", "odd sizes", product(21, 37, 45, 154, bias=True)),
    ("rows_glu", "one column of either, offsets of 64 bits", product(5, 9, 40, 2, index=torch.int64)),
    *(("rows_norm", f"{rows} of 90 rows", norming(rows, 90, 96)) for rows in (0, 1, 17, 90)),
    ("rows_norm", "no weight", (norming(17, 30, 96)[0], None, *norming(17, 30, 96)[2:])),
    ("rows_norm", "odd size, offsets of 64 bits", norming(5, 9, 1300, index=torch.int64)),
    ("rows_norm", "more rows than programs", norming(2100, 2200, 16)),
    *(
        ("rows_quantise", f"{n} of 90 rows as {kind}", rounding(n, 90, 96, kind))
        for n in (0, 17, 90)
        for kind in ROW_KINDS
    ),
    ("rows_quantise", "odd size, offsets of 64 bits", rounding(5, 9, 1300, "fp8", index=torch.int64)),
    ("rows_quantise", "more rows than programs", rounding(2100, 2200, 16, "int8")),
    *(("rows_rope", f"{n} of 90 rows", rotating(n, 90, 4, 32, normed=n % 2 == 0)) for n in (0, 1, 16, 17, 90)),
    ("rows_rope", "odd sizes", rotating(5, 9, 3, 70, normed=True)),
    ("rows_rope", "more rows than programs", rotating(2100, 2200, 1, 8)),
    ("lm_head", "drawn and greedy", heading(21)),
    ("lm_head", "no bias, one chunk", heading(9, chunk=100, bias=False)),
    ("lm_head", "so many rows that they are listed", heading(270, vocab=90, chunk=100, share=0.3)),
    ("lm_head_part", "of the middle", heading_part(21, 4000, 10_000)),
    ("lm_head_part", "with ids that are none", heading_part(9, 600, 900, bias=False, chunk=100)),
    ("lm_head_part", "no ids", heading_part(9, 5000, 4000)),
    ("lm_head_part", "so many rows that they are listed", heading_part(270, 90, 150, vocab=90, chunk=100, share=0.3)),
    ("lm_head_adjusted", "drawn and greedy", adjusting(21)),
    ("lm_head_adjusted", "so many rows that they are listed", adjusting(270, vocab=90, chunk=100, share=0.3)),
    ("lm_head_measured", "drawn and greedy, in chunks", measuring(21)),
    ("lm_head_measured", "so many rows that they are listed", measuring(270, vocab=90, chunk=100, share=0.3)),
]
"""Op, what is special, arguments."""
