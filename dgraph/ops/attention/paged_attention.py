"""dgraph::paged_attention: attention of rows over the paged cache of their sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of
from dgraph.ops.kv.scales import FLOAT8, check_scale, scaled, unscaled
from dgraph.ops.padded import (
    Group,
    attend,
    check_heads,
    check_ranges,
    check_window,
    groups,
    hidden_keys,
    mask_of,
    padded_length,
    together,
)
from dgraph.ops.per_stage import per_stage
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
Row i sees the cache positions [0, limit[i]) of its sequence, and of these, where there is a window, those after
origin[i] - window: the row itself or its block begins at origin. Position p of sequence s lives at
cache[page_table[s, p // page], p % page].
A gap hides the positions in [gap[i, 0], gap[i, 1]) from row i. A row with own[i] also sees its own key and value, k[i]
and v[i], which stand in no cache, whatever its limit, window and gap are.
q [N, Hq, D]; k_cache, v_cache [pages, page, Hkv, D]; page_table i32[b, P]; cu_rows i32[b+1]; limit i32[N];
origin i32[N], or None with window 0; gap i32[N, 2], or None; own bool[N], k and v [N, Hkv, D] in the dtype of q, or
None -> [N, Hq, D] in the dtype of q. Query head h reads KV head h // (Hq / Hkv).
Scores q.k * scale and sums in fp32 at least.
Caches in float8_e4m3fn have scales k_scale and v_scale f32[pages, page, Hkv], by head: a key stands for
k_scale times what is stored, a value for v_scale times that, multiplied in fp32 into score and weight.
A row that sees nothing, and a padding row, gives zeros. Padding rows, and k and v of rows without own, may hold
anything. A slot that no row of the
sequence sees may hold anything, NaN included; table entries past the last page that a row sees are not read.
Deterministic. The reference pads each sequence to lengths that depend on nothing but its own rows and
limits, so that a sequence gives the same bits alone and in any batch."""


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    origin: Tensor | None = None,
    window: int = 0,
    gap: Tensor | None = None,
    own: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    check_heads("paged_attention", q, k_cache.transpose(1, 2), 1)
    check_window("paged_attention", origin, window)
    check_ranges(q, k_cache, gap, own, k, v)
    for cache, by in ((k_cache, k_scale), (v_cache, v_scale)):
        check_scale("paged_attention", cache, by)
    out = q.new_zeros(q.shape)
    wide = q if k_scale is None else q.to(numeric(q.dtype))
    ranges = origin is not None or gap is not None or own is not None
    for seen in _seen(page_table, cu_rows, limit, own, k_cache.shape, wide.dtype):
        group, mask, blind = seen.group, seen.mask, None
        keys, values = (seen.taken(*cache, wide.dtype) for cache in ((k_cache, k_scale), (v_cache, v_scale)))
        if mask is None or ranges:
            end = group.take(limit)
            since, two = (None if x is None else group.take(x) for x in (origin, gap))
            hidden = hidden_keys(seen.slots, end, since, window, two)
            if own is not None and k is not None and v is not None:
                alone = group.take(own)
                hidden = torch.cat([hidden, ~torch.diag_embed(alone)], dim=2)
                keys, values = (_with_own(x, group.take(y), alone) for x, y in ((keys, k), (values, v)))
            mask, blind = mask_of(hidden, wide.dtype), hidden.all(dim=2) if ranges else end <= 0
        group.scatter(out, attend(group.take(wide), keys, values, mask, blind, scale).to(q.dtype))
    return out


def _with_own(values: Tensor, own: Tensor, alone: Tensor) -> Tensor:
    """Append own keys or values [g, R, Hkv, D], with their flags alone [g, R], to those of a group, [g, K, Hkv, D].

    They are zeros without their flag: they may hold NaN, which no mask hides.
    """
    return torch.cat([values, own.to(values.dtype).masked_fill(~alone[:, :, None, None], 0)], dim=1)


@dataclass(frozen=True)
class _Seen:
    """The keys that a group of sequences sees, shared by all layers.

    Attributes:
        group: the sequences.
        pages: i64[g * n], pages of the first positions of each, filled up to n of them. The number depends on how many
            positions the sequence sees, and on nothing else.
        unseen: i64[u], the slots in those pages that no row of their sequence sees; they may hold NaN. None: all are.
        slots: i64[K], the positions in the n pages of a sequence.
        mask: [g, 1, K], see `attend`, if all rows of a sequence see the same; else None, because it would take too much
            memory. It is there also where all is seen, since a CPU's kernel computes other bits without one.
    """

    group: Group
    pages: Tensor
    unseen: Tensor | None
    slots: Tensor
    mask: Tensor | None

    def taken(self, cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Keys or values [g, K, Hkv, D] of the positions in those pages, in order and in `dtype` if there are scales.

        They are zeros where no row sees them.
        """
        values = cache.index_select(0, self.pages).flatten(0, 1)
        if scale is not None:
            values = unscaled(values, scale.index_select(0, self.pages).flatten(0, 1), dtype)
        if self.unseen is not None:
            values.index_fill_(0, self.unseen, 0)
        return values.unflatten(0, (-1, self.group.keys))


@per_stage
def _seen(
    page_table: Tensor, cu_rows: Tensor, limit: Tensor, own: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> list[_Seen]:
    """Sequences with a row that sees at least one position, or a key of its own; shape: that of the caches."""
    starts, limits, page = cu_rows.tolist(), limit.tolist(), shape[1]
    alone = [False] * len(limits) if own is None else own.tolist()
    lengths, alike, pages = list[int](), list[bool](), list[list[int]]()
    for s, table in enumerate(page_table.tolist()):
        rows = slice(starts[s], starts[s + 1])
        lengths.append(max([0, *limits[rows]]))
        alike.append(min(limits[rows], default=0) == lengths[s])
        pages.append(_pages(table, lengths[s], page) if lengths[s] or any(alone[rows]) else [])
    found, device = [], limit.device
    for group in groups(cu_rows, [page * len(each) for each in pages], gathered=shape[2:].numel()):
        members, slots = group.sequences.tolist(), torch.arange(group.keys, device=device)
        hidden = slots >= torch.tensor([lengths[s] for s in members], device=device)[:, None]
        unseen = hidden.flatten().nonzero()[:, 0]
        mine = torch.tensor([number for s in members for number in pages[s]], device=device)
        mask = mask_of(hidden[:, None], dtype) if all(alike[s] for s in members) else None
        found.append(_Seen(group, mine, unseen if len(unseen) else None, slots, mask))
    return found


def _pages(table: list[int], length: int, page: int) -> list[int]:
    """Pages of a sequence's first `length` positions, filled up to a number that depends on `length` alone.

    Raises:
        InputError: the table is too short, or has no page for one of these positions.
    """
    if length > len(table) * page:
        raise InputError(
            f"dgraph::paged_attention: a row sees {length} positions, but the page table holds "
            f"{len(table)} pages of {page}. Pass a wider page table."
        )
    pages = table[: -(-length // page)]
    if min(pages, default=0) < 0:
        raise InputError(
            "dgraph::paged_attention: a row sees a position in a page that its sequence does not have (its "
            "page_table entry is negative). Assign and write every page below the limit first."
        )
    # Whole vectors of the kernel's sums, so that further keys, which a row does not see, change no bit of them.
    return pages + [0] * (-(-padded_length(length, 32) // page) - len(pages))


def fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


def workspace(device: torch.device, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, *rest: Any) -> int:
    """Bytes that a call allocates beside its result.

    On a GPU: the shares that are added up if the keys of a sequence are divided. On a CPU: the keys and values of a
    group of sequences and of the one before it; a group's results; positions of every group, and the mask of every
    sequence. Rows with keys of their own take the keys and values of a group once more.
    """
    page, heads, width = k_cache.shape[1:]
    if device.type == "cuda":
        from dgraph.ops.attention.triton.attention_tiling import share_bytes

        sizes = q.element_size(), k_cache.element_size()
        return share_bytes(q.shape, len(rest[0]) - 1, heads, page, page_table.shape[1] * page, *sizes, device)
    b, keys = page_table.shape[0], page_table.shape[1] * page
    some = min(b, together(keys * heads * width))
    rows = some * q.numel() // max(b, 1)
    values, size = 2 * min(2 * some, b) * keys * heads * width + rows, q.element_size()
    if rest[8:9] not in ((), (None,)):
        values += 2 * heads * width * some * (keys + q.shape[0] // max(b, 1))
    if k_cache.dtype == FLOAT8:  # as stored, and in fp32; all queries and a group's results in fp32, too
        size = max(size, 4)
        values += some * keys * heads * width + q.numel() + rows
    return size * (values + b * keys) + 8 * keys * -(-b // some)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, limits, page, hq, hkv, d in (
        ("decode step", (4, 4), (20, 12), 8, 4, 2, 16),
        ("ragged, an empty sequence, limits inside a page", (5, 0, 9, 1), (7, 3, 130, 1), 16, 4, 4, 8),
        ("no rows", (0, 0), (0, 0), 4, 2, 1, 8),
        ("limit 0", (2, 3), (0, 5), 4, 3, 1, 10),
    ):
        per_row = torch.tensor(limits).repeat_interleave(torch.tensor(counts)).int()
        yield _sample(name, counts, per_row, page, hq, hkv, d, generator)
    mixed = torch.tensor([8, 8, 12, 12, 0, 3, 5]).int()
    two = _sample("two limits in a sequence", (4, 3), mixed, 4, 4, 2, 8, generator)
    yield two
    origin = torch.tensor([7, 7, 9, 9, 0, 2, 4]).int()
    assert two.padded is not None
    yield Sample("windows", (*two.args, None, None, origin, 3), (*two.padded, None, None, pad_rows(origin, 5), 3))
    yield _ring(generator)
    for sample in _ranges(two, origin, generator):
        yield sample
        if not sample.name.endswith("windows"):
            assert sample.padded is not None
            calls = ((*in_float8(args[:7]), *args[9:]) for args in (sample.args, sample.padded))
            yield Sample(f"{sample.name}, float8", *calls)
    for sample in (two, _sample("one row", (1,), torch.tensor([70]).int(), 16, 6, 2, 20, generator)):
        assert sample.padded is not None
        yield Sample(f"{sample.name}, float8", in_float8(sample.args), in_float8(sample.padded))


def _ranges(sample: Sample, origin: Tensor, generator: torch.Generator) -> Iterator[Sample]:
    """The calls of a sample with rows that see two ranges, and rows that also see a key of their own."""
    q, k_cache, *_, limit, _ = sample.args
    gap = torch.stack([limit - 3, limit - 1], 1).clamp(min=0).int()
    gap[0], gap[2] = torch.tensor([2, 2]), torch.tensor([0, 99])  # an empty one, and one that leaves nothing
    own = torch.arange(len(q)) % 2 == 0
    k, v = (torch.randn(len(q), *k_cache.shape[2:], generator=generator) for _ in range(2))
    for x in (k, v):
        x[~own] = torch.nan
    for name, more in (
        ("two ranges", (None, 0, gap, None, None, None)),
        ("own keys", (None, 0, None, own, k, v)),
        ("two ranges, own keys and windows", (origin, 3, gap, own, k, v)),
    ):
        padded = tuple(pad_rows(x, 5) if isinstance(x, Tensor) else x for x in more)
        assert sample.padded is not None
        yield Sample(name, (*sample.args, None, None, *more), (*sample.padded, None, None, *padded))


def _ring(generator: torch.Generator) -> Sample:
    """Sample of rows that see a window; positions behind it have given their pages to later ones."""
    counts, ends, page, window, ring = (4, 3), (25, 20), 4, 3, 2
    at = torch.tensor([p for n, end in zip(counts, ends, strict=True) for p in range(end - n, end)]).int()
    table = torch.tensor(
        [[s * ring + column % ring for column in range(-(-max(ends) // page))] for s in range(2)]
    ).int()
    q = torch.randn(len(at), 4, 8, generator=generator)
    k_cache, v_cache = (torch.randn(2 * ring, page, 2, 8, generator=generator) for _ in range(2))
    rest = (k_cache, v_cache, table, cu_rows_of(counts))
    limit, windows = at + 1, (0.3, None, None)
    padded = (pad_rows(q, 5), *rest, pad_rows(limit, 5), *windows, pad_rows(at, 5), window)
    return Sample("windows over a ring of pages", (q, *rest, limit, *windows, at, window), padded)


def in_float8(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the caches of a call, its second and third arguments, to float8, and append their scales."""
    q, *caches = args[:3]
    (k_cache, k_scale), (v_cache, v_scale) = map(scaled, caches)
    return q, k_cache, v_cache, *args[3:], k_scale, v_scale


def _sample(
    name: str,
    counts: tuple[int, ...],
    limit: Tensor,
    page: int,
    hq: int,
    hkv: int,
    d: int,
    generator: torch.Generator,
) -> Sample:
    cu_rows = cu_rows_of(counts)
    longest = [max([0, *part.tolist()]) for part in limit.split(list(counts))]
    table, pages = page_table_of(longest, page, generator)
    q = torch.randn(len(limit), hq, d, generator=generator)
    k_cache, v_cache = (torch.full((pages, page, hkv, d), float("nan")) for _ in range(2))
    for s, length in enumerate(longest):
        for p in range(length):
            for cache in (k_cache, v_cache):
                cache[table[s, p // page], p % page] = torch.randn(hkv, d, generator=generator)
    scale = d**-0.5
    return Sample(
        name,
        (q, k_cache, v_cache, table, cu_rows, limit, scale),
        (pad_rows(q, 5), k_cache, v_cache, table, cu_rows, pad_rows(limit, 5), scale),
    )


OP = define(
    "paged_attention",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    added="own",
    count="cu_rows",
    scales={"k_cache": "k_scale", "v_cache": "v_scale"},
    padding=(0,),
    kernel="dgraph.ops.attention.triton.paged_attention:kernel",
    rounds=True,
    tuning="dgraph.ops.triton.candidates:ATTENTION",
    workspace=workspace,
)
