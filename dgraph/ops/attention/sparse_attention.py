"""dgraph::sparse_attention: attention over kept keys and a window, or over the key rows of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT
from dgraph.ops.attention.sparse_draws import draw, in_float8, in_pages
from dgraph.ops.kv.scales import unscaled
from dgraph.ops.padded import attend, check_heads, groups, mask_of, padded_length, take
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
Attention of packed rows; what a row sees depends on the action of its sequence (dgraph/ops/attention/sparse.py).
DENSE, SELECT: row i sees the key rows j of its sequence with key_positions[j] < limit[i].
REUSE, REPACK: row i sees the entries that its KV head keeps, whatever its limit, and the positions p of the cache
with window[s, 0] <= p < min(window[s, 1], limit[i]); p lives at cache[page_table[s, p // page], p % page].
KV head h of sequence s keeps the pack_count[s, h] entries from pack_start[layer, s] + sum(pack_count[s, :h]) on.
Entry e is the key k_pack[e] with the value v_pack[e]; or, where these are None, what the cache holds for the head
at position pack_index[e] of the sequence, in the window or not.
q [N, Hq, D]; k, v [M, Hkv, D]; k_cache, v_cache [pages, page, Hkv, D]; page_table i32[b, P];
k_pack, v_pack [entries, D], or None with pack_index i32[entries]; pack_count i32[b, Hkv]; pack_start i32[L, b];
key_positions i64[M], ascending in a sequence; cu_rows i32[b+1], of the N rows; cu_keys i32[b+1], of the M key rows;
limit i32[N]; window i32[b, 2]; action i32[b] -> [N, Hq, D] in the dtype of q.
Query head h reads KV head h // (Hq / Hkv). Scores q.k * scale and sums in fp32 at least.
What is in float8_e4m3fn has scales, one for each vector: the caches k_cache_scale and v_cache_scale
f32[pages, page, Hkv], by head (dgraph.ops.kv.scales), and what is packed k_pack_scale and v_pack_scale f32[entries],
all of these or none; k and v, only with them, k_scale and v_scale f32[M, Hkv], contiguous. A vector stands for its
scale times what is stored, which is multiplied in fp32 into score and weight.
dense=False: no sequence is DENSE or SELECT; k, v and key_positions are not read, and may have no rows.
A row that sees nothing, and a padding row, gives zeros. Padding rows and key rows may hold anything, NaN included;
so may entries that no head of the batch keeps, slots that no row sees, and table entries of pages that no row sees.
Deterministic. In the reference the result for a sequence depends on nothing but its own rows and keys."""


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    k_pack: Tensor | None,
    v_pack: Tensor | None,
    pack_count: Tensor,
    pack_start: Tensor,
    key_positions: Tensor,
    cu_rows: Tensor,
    cu_keys: Tensor,
    limit: Tensor,
    window: Tensor,
    action: Tensor,
    scale: float,
    layer: int,
    dense: bool,
    k_cache_scale: Tensor | None = None,
    v_cache_scale: Tensor | None = None,
    k_pack_scale: Tensor | None = None,
    v_pack_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    pack_index: Tensor | None = None,
) -> Tensor:
    check_heads("sparse_attention", q, k_cache.transpose(1, 2), 1)
    entries = entries_of(k_pack, v_pack, pack_index)
    out = q.new_zeros(q.shape)
    fresh = ((action == DENSE) | (action == SELECT)).tolist()
    if any(fresh):
        if not dense:
            raise InputError(
                f"dgraph::sparse_attention: sequence {fresh.index(True)} is to see the key rows of the step, but the "
                "call says dense=False. Pass dense=True, or set its action to REUSE or REPACK."
            )
        rows_of = (k, k_scale), (v, v_scale)
        _over_key_rows(out, q, *rows_of, key_positions, cu_rows, cu_keys, limit, scale, fresh)
    wide = q if k_cache_scale is None else q.to(numeric(q.dtype))
    of_keys, of_values = (
        (cache.flatten(0, 1), None if by is None else by.flatten(0, 1))
        for cache, by in ((k_cache, k_cache_scale), (v_cache, v_cache_scale))
    )
    starts, ends = cu_rows.tolist(), window.tolist()
    for s, new in enumerate(fresh):
        rows = slice(starts[s], starts[s + 1])
        if new or rows.start == rows.stop:
            continue
        low, high = ends[s]
        positions = torch.arange(low, max(low, min(high, int(limit[rows].max()))), device=q.device)
        first = int(pack_start[layer, s])
        index, seen = _kept(entries, pack_count[s], first)
        inside = _slots(positions, page_table[s], k_cache.shape[1])
        packs = [(x, by) for x, by in ((k_pack, k_pack_scale), (v_pack, v_pack_scale)) if x is not None]
        if pack_index is not None:  # as if these were all that is packed
            kept = pack_index[first : first + int(pack_count[s].sum())]
            at = _slots(kept.long(), page_table[s], k_cache.shape[1]), _heads_of(pack_count[s])
            packs = [(x[at], None if by is None else by[at]) for x, by in (of_keys, of_values)]
            index = index - first
        keys, values = (
            torch.cat([_taken(*pack, index, q.dtype), _taken(*cache, inside, q.dtype).transpose(0, 1)], 1)
            for pack, cache in zip(packs, (of_keys, of_values), strict=True)
        )
        if not keys.shape[1]:
            continue
        # Heads keep different numbers of entries: each KV head is a batch element of its own, with its own mask.
        heads = wide[rows].unflatten(1, (k_cache.shape[2], -1)).transpose(0, 1)
        before = (positions < limit[rows, None]).expand(len(seen), -1, -1)
        hidden = torch.cat([seen[:, None].expand(-1, before.shape[1], -1), before], 2).logical_not_()
        mask = mask_of(hidden, wide.dtype)
        found = attend(heads, keys[:, :, None], values[:, :, None], mask, hidden.all(2), scale)
        out[rows] = found.transpose(0, 1).flatten(1, 2)
    return out


def _taken(stored: Tensor, scale: Tensor | None, index: Tensor, like: torch.dtype) -> Tensor:
    """Take vectors at an index; those with scales in fp32, or in `like` if that is wider."""
    return unscaled(take(stored, index), None if scale is None else take(scale, index), like)


def _over_key_rows(
    out: Tensor,
    q: Tensor,
    keys: tuple[Tensor, Tensor | None],
    values: tuple[Tensor, Tensor | None],
    key_positions: Tensor,
    cu_rows: Tensor,
    cu_keys: Tensor,
    limit: Tensor,
    scale: float,
    fresh: Sequence[bool],
) -> None:
    """Write to `out` the attention of `fresh` sequences over key rows, padded as packed_attention pads them."""
    counts = cu_keys.diff().tolist()
    widths = [padded_length(count) if count and new else 0 for count, new in zip(counts, fresh, strict=True)]
    for group in groups(cu_rows, widths):
        first, end = (cu_keys[group.sequences + i].long()[:, None] for i in (0, 1))
        index = first + torch.arange(group.keys, device=q.device)
        live = index < end
        index = torch.where(live, index, first)
        at, most = key_positions[index], limit[group.rows]
        hidden = (at[:, None, :] >= most[:, :, None]).logical_or_(~live[:, None, :])
        blind = at[:, :1] >= most  # positions ascend: a row that does not see the first key sees none
        k, v = (_taken(*rows, index, q.dtype) for rows in (keys, values))
        mask = mask_of(hidden, k.dtype)
        found = attend(group.take(q).to(k.dtype), k, v, mask, blind, scale)
        group.scatter(out, found.to(q.dtype))


def _kept(entries: int, count: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Entries i64[Hkv, K] of a sequence from its counts i32[Hkv], and flags bool[Hkv, K] of those that its heads keep.

    Raises:
        InputError: the entries do not lie within the packed caches.
    """
    total, most = int(count.sum()), int(count.max())
    if total and not 0 <= first <= entries - total:
        raise InputError(
            f"dgraph::sparse_attention: the heads of a sequence keep {total} entries from {first} on, but the packed "
            f"caches have {entries}. Pass larger ones, or another pack_start."
        )
    seen = torch.arange(most, device=count.device) < count[:, None]
    begin = first + count.cumsum(0) - count
    # A place without an entry repeats the first one, because its value must be finite.
    return torch.where(seen, begin[:, None] + torch.arange(most, device=count.device), first), seen


def _heads_of(count: Tensor) -> Tensor:
    """Head i64 of each entry of a sequence, from its counts i32[Hkv]."""
    return torch.arange(len(count), device=count.device).repeat_interleave(count)


def _slots(positions: Tensor, table: Tensor, page: int) -> Tensor:
    """Slots i64 of one sequence's positions, by its table i32[P], in a cache whose pages lie end to end.

    Raises:
        InputError: the table is too short, or has no page for a position.
    """
    last = int(positions.max()) if positions.numel() else -1
    if last >= len(table) * page:
        raise InputError(
            f"dgraph::sparse_attention: a row sees position {last} in the cache, but the page table holds "
            f"{len(table)} pages of {page}. Pass a wider page table."
        )
    pages = table[positions // page].long()
    if bool((pages < 0).any()):
        raise InputError(
            "dgraph::sparse_attention: a row sees a position in a page that its sequence does not have (its "
            "page_table entry is negative). Assign and write every page of the window, and of kept positions, first."
        )
    return pages * page + positions % page


def entries_of(k_pack: Tensor | None, v_pack: Tensor | None, pack_index: Tensor | None) -> int:
    """Number of kept entries that there is room for.

    Raises:
        InputError: entries that are neither packed nor positions, or both.
    """
    found = [len(x) for x in (k_pack, v_pack, pack_index) if x is not None]
    if len(found) != 1 + (pack_index is None):
        raise InputError(
            "dgraph::sparse_attention: kept entries are either packed, k_pack and v_pack, or positions in the cache, "
            "pack_index; give the one or the other."
        )
    return found[0]


def fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    mixed = (SELECT, REUSE, DENSE, REPACK, REUSE, DENSE)
    for name, call in {
        "one sequence, equal heads": partial(
            draw, actions=[REUSE], rows=[4], windows=[(8, 12)], counts=[[6, 6]], group=1, sees_all=True
        ),
        "ragged heads, some keep nothing, a sequence without a window": partial(
            draw,
            actions=[REUSE, REPACK, REUSE],
            rows=[3, 5, 1],
            windows=[(5, 21), (0, 0), (16, 19)],
            counts=[[0, 70, 3], [9, 1, 0], [0, 0, 40]],
            group=3,
        ),
        "limits inside of a window that is most of the keys": partial(
            draw,
            actions=[REUSE] * 2,
            rows=[9, 17],
            windows=[(3, 150), (64, 96)],
            counts=[[2, 1], [33, 0]],
            page=16,
            group=1,
        ),
        "nothing to see": partial(
            draw, actions=[REUSE, DENSE], rows=[3, 2], windows=[(4, 4), (0, 0)], counts=[[0], [0]], keys=[3, 0]
        ),
        "every action, a sequence without rows": partial(
            draw,
            actions=mixed,
            rows=[5, 4, 33, 6, 0, 2],
            windows=[(0, 4), (8, 12), (2, 9), (7, 20), (0, 4), (1, 2)],
            counts=[[3, 8]] * 6,
            d=10,
        ),
        "rows are a subset of the key rows": partial(
            draw,
            actions=[DENSE, REUSE, SELECT],
            rows=[7, 2, 1],
            windows=[(0, 8)] * 3,
            counts=[[4, 5]] * 3,
            keys=[40, 0, 70],
            page=8,
        ),
        "no rows": partial(draw, actions=[REUSE, DENSE], rows=[0, 0], windows=[(0, 2)] * 2, counts=[[1]] * 2),
    }.items():
        seed = int(torch.randint(1 << 30, (1,), generator=generator))
        plain, padded = (call(generator=torch.Generator().manual_seed(seed), padding=p) for p in (0, 5))
        yield Sample(name, plain, padded)
        if name.startswith(("ragged", "every", "rows are")):
            for stored in (False, True):
                what = "float8, key rows as well" if stored else "float8"
                yield Sample(f"{name}, {what}", in_float8(plain, stored), in_float8(padded, stored))
            for what, of in (("in pages", (plain, padded)), ("in pages, float8", map(in_float8, (plain, padded)))):
                yield Sample(f"{name}, {what}", *(in_pages(torch.Generator().manual_seed(seed), each) for each in of))


OP = define(
    "sparse_attention",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    own_rows=("k", "v", "key_positions", "k_scale", "v_scale"),
    scales={
        "k": "k_scale",
        "v": "v_scale",
        "k_cache": "k_cache_scale",
        "v_cache": "v_cache_scale",
        "k_pack": "k_pack_scale",
        "v_pack": "v_pack_scale",
    },
    padding=(0,),
    kernel="dgraph.ops.attention.triton.sparse_attention:kernel",
    rounds=True,
)
