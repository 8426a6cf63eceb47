"""Random calls of dgraph::sparse_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import DENSE, SELECT
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.kv.scales import by_head, scaled

NOWHERE = 1 << 30
"""A position that no page table has a page for."""


def draw(
    generator: torch.Generator,
    actions: Sequence[int],
    rows: Sequence[int],
    windows: Sequence[tuple[int, int]],
    counts: Sequence[Sequence[int]],
    keys: Sequence[int] | None = None,
    page: int = 4,
    group: int = 2,
    d: int = 8,
    padding: int = 0,
    sees_all: bool = False,
) -> tuple[Any, ...]:
    """Draw a random call. Places that no row sees hold NaN, or a page that does not exist.

    Args:
        actions, rows, windows, counts: action, number of rows, window, and entries per KV head of each sequence.
        keys: number of key rows of each sequence; None: the rows themselves.
        group: query heads per KV head.
        padding: number of padding rows, and of padding key rows.
        sees_all: every row sees all that its sequence has; else limits vary.
    """

    def draw_int(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high + 1, (size,), generator=generator)

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"))

    b, heads, keys = len(actions), len(counts[0]), rows if keys is None else keys
    fresh = [action in (DENSE, SELECT) for action in actions]
    positions = [draw_int(0, 2, n).cumsum(0) + torch.arange(n) for n in keys]
    ends = [int(at[-1]) + 1 if new and len(at) else w[1] for at, w, new in zip(positions, windows, fresh, strict=True)]
    lows = [0 if new else w[0] for w, new in zip(windows, fresh, strict=True)]
    limits = [
        torch.full((n,), end) if sees_all else draw_int(low, end, n)
        for n, low, end in zip(rows, lows, ends, strict=True)
    ]
    table = torch.full((b, -(-max(w[1] for w in windows) // page) + 1), -1, dtype=torch.int32)
    owned = [range(low // page, -(-high // page)) if low < high else range(0) for low, high in windows]
    pages = torch.randperm(sum(map(len, owned)) + 1, generator=generator).int()
    k_cache, v_cache = (empty(len(pages), page, heads, d) for _ in range(2))
    for s, of in enumerate(owned):
        table[s, of.start : of.stop], pages = pages[: len(of)], pages[len(of) :]
        for p in range(windows[s][0], min(windows[s][1], max([0, *limits[s].tolist()]))):
            for cache in (k_cache, v_cache):
                cache[table[s, p // page], p % page] = torch.randn(heads, d, generator=generator)
    count = torch.tensor(counts, dtype=torch.int32).view(b, heads)
    gaps = draw_int(0, 5, b)
    start = (gaps + count.sum(1)).cumsum(0) - count.sum(1)
    k_pack, v_pack = (empty(int((gaps + count.sum(1)).sum()) + 3, d) for _ in range(2))
    for s in range(b):
        at = slice(int(start[s]), int(start[s] + count[s].sum()))
        k_pack[at], v_pack[at] = (torch.randn(at.stop - at.start, d, generator=generator) for _ in range(2))
    q = torch.randn(sum(rows), heads * group, d, generator=generator)
    k, v = (torch.randn(sum(keys), heads, d, generator=generator) for _ in range(2))
    values = [q, k, v, torch.cat(positions), torch.cat(limits).int()]
    q, k, v, at_keys, limit = (pad_rows(x, padding) for x in values) if padding else values
    of_sequences = (torch.tensor(value, dtype=torch.int32) for value in (windows, actions))
    where = (at_keys, cu_rows_of(rows), cu_rows_of(keys), limit, *of_sequences)
    packed = (k_pack, v_pack, count, torch.stack([start + 10**6, start]).int())
    return q, k, v, k_cache, v_cache, table, *packed, *where, d**-0.5, 1, any(fresh)


def in_float8(call: tuple[Any, ...], key_rows: bool = False) -> tuple[Any, ...]:
    """Convert the caches of a call to float8; with `key_rows`, its key rows, too."""
    q, k, v, k_cache, v_cache, table, k_pack, v_pack, *rest = call
    caches, scales = zip(*map(scaled, (k_cache, v_cache, k_pack, v_pack)), strict=True)
    (k, k_scale), (v, v_scale) = map(scaled, (k, v)) if key_rows else ((k, None), (v, None))
    return q, k, v, *caches[:2], table, *caches[2:], *rest, *scales, k_scale, v_scale


def in_pages(generator: torch.Generator, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Keep the entries of a call in the pages of their sequence, each at a random position outside of the window.

    They get pages of their own where they share none with the window, and the other places there hold NaN.
    """
    q, k, v, k_cache, v_cache, table, k_pack, v_pack, count, start, *rest = call
    paged, packed, of_rows = rest[9:11], rest[11:13], rest[13:15]
    page, b, windows, layer = k_cache.shape[1], len(count), rest[4].tolist(), rest[7]
    most = max(high for _, high in windows) + int(count.max()) + 3
    columns = -(-most // page)
    wide = torch.full((b, max(columns, table.shape[1])), -1, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    missing = wide < 0
    missing[:, columns:] = False
    fresh = int(missing.sum())
    wide[missing] = len(k_cache) + torch.randperm(fresh, generator=generator).int()

    def longer(cache: Tensor) -> Tensor:
        return torch.cat([cache, torch.full((fresh, *cache.shape[1:]), float("nan")).to(cache.dtype)])

    caches = [longer(cache) for cache in (k_cache, v_cache)]
    scales = [by_head(longer(scale)) for scale in paged]
    index = torch.full((len(k_pack),), NOWHERE, dtype=torch.int32)
    for s, (low, high) in enumerate(windows):
        outside = torch.tensor([p for p in range(most) if not low <= p < high])
        begin = int(start[layer, s])
        for head, size in enumerate(count[s].tolist()):
            entries = slice(begin, begin + size)
            at = outside[torch.randperm(len(outside), generator=generator)[:size]].sort().values
            index[entries], begin = at.int(), begin + size
            pages = wide[s, at // page].long()
            for cache, pack in zip([*caches, *scales], [k_pack, v_pack, *packed], strict=True):
                cache[pages, at % page, head] = pack[entries]
    scaled_by = (*(scales or (None, None)), None, None, *(of_rows or (None, None)))
    return q, k, v, *caches, wide, None, None, count, start, *rest[:9], *scaled_by, index
