"""dgraph::sparse_attention on CUDA.

Two launches write disjoint rows. `_attend_kept` takes the sequences that reuse kept entries, and the padding rows.
As in paged_attention, a program takes a tile of rows, all query heads of one KV head, and a share of the keys. The rows
are of one sequence. The keys are first the entries that the head keeps, then the window. Packed entries of a head lie
side by side, so that a block of them is one bulk copy from wherever it starts. Entries in pages are looked up by their
positions, and gathered vector by vector. Heads keep different numbers of them, so that each head divides its own keys
into shares. `_attend_rows` (`sparse_dense`) takes the sequences that see the key rows of the step; it is not launched
if there are none. Each skips the tiles of the other.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.attention.sparse import REPACK, REUSE
from dgraph.ops.attention.sparse_attention import entries_of
from dgraph.ops.attention.triton import attention_tiling
from dgraph.ops.attention.triton.attention_shares import finished, shares_for
from dgraph.ops.attention.triton.attention_tiling import multiprocessors
from dgraph.ops.attention.triton.paged_attention import blocks_of, load_keys
from dgraph.ops.attention.triton.sparse_dense import attend_rows, dense_tiling
from dgraph.ops.attention.triton.sparse_tiles import fold, load_rows, load_slots, matrices_of
from dgraph.ops.kv.triton.scales import check_scales, halved, load_scales, scales_at, scales_of
from dgraph.ops.padded import check_heads
from dgraph.ops.triton.rows import dense_rows, offsets_block, power_of_two, sequence_at

_REUSE, _REPACK = tl.constexpr(REUSE), tl.constexpr(REPACK)


@dataclass(frozen=True)
class Tiling:
    """Sizes of the launches.

    Attributes:
        kept: sizes of `_attend_kept`; its stages are those of the loop over the window, where a page is looked up in
            front of each load.
        kept_stages: iterations in flight over the entries. Each takes a buffer, or every second one if these are in
            pages.
        dense: sizes of `_attend_rows`, where block_m counts the rows of one query head; it has no shares.
    """

    kept: attention_tiling.Tiling
    kept_stages: int
    dense: attention_tiling.Tiling


def tiling_for(
    n: int,
    b: int,
    heads: tuple[int, int],
    d: int,
    entries: int,
    itemsize: int,
    multiprocessors: int,
    dense: bool,
    in_pages: bool = False,
) -> Tiling:
    """The tiling for a shape: n rows of b sequences, `heads` query and KV heads, room for `entries` kept entries.

    The number of keys that a head sees is known to the device alone. Heads may keep more than their even share of the
    entries, and the window holds the rows or more; so twice the share and the rows stand for the keys.
    """
    keys = 2 * -(-entries // (max(b, 1) * heads[1])) + -(-n // max(b, 1))
    block_m = attention_tiling.widest_tile(n, b, heads, multiprocessors)
    kept = attention_tiling.tiling_for(n, b, heads, d, 128, keys, itemsize, multiprocessors, block_m)
    if dense:  # the step is bound by its dense sequences, and shares are added up over all rows
        kept = replace(kept, splits=1)
    wide = power_of_two(d, 16) > 128
    if kept.block_m >= 128 and not wide:
        kept = replace(kept, block_n=min(kept.block_n, 64))
    kept = replace(kept, stages=min(kept.stages, 4))
    # Tiles of 64 rows: with four buffers, only one program would fit on a multiprocessor.
    stages = 1 if itemsize > 2 else 3 if wide or kept.block_m == 64 else 4
    if in_pages:  # a block of keys waits for its pages, and these for its positions: as many buffers take more stages
        stages = 2 * stages - 1
    return Tiling(kept, stages, dense_tiling(n, b, d, itemsize))


def kernel(
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
    tiling: Tiling | None = None,
    *,
    kind: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """dgraph::sparse_attention; see its contract.

    Args:
        tiling: overrides the sizes chosen for the shape.
        kind: returns the results of dgraph::rows_quantise on the rows [N, Hq * D], counted by cu_rows, in this kind.
    """
    check_heads("sparse_attention", q, k_cache.transpose(1, 2), 1)
    entries = entries_of(k_pack, v_pack, pack_index)
    paged, packed = (k_cache_scale, v_cache_scale), (k_pack_scale, v_pack_scale)
    check_scales("sparse_attention", k_cache=(k_cache, paged[0]), v_cache=(v_cache, paged[1]))
    check_scales("sparse_attention", k=(k, k_scale), v=(v, v_scale))
    (n, heads, d), (_, page, kv_heads, _), b = q.shape, k_cache.shape, cu_rows.shape[0] - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return finished(out, None, kind, cu_rows)
    if tiling is None:
        cores = multiprocessors(q.device)
        tiling = tiling_for(n, b, (heads, kv_heads), d, entries, q.element_size(), cores, dense, k_pack is None)
    sizes = tiling.kept
    group, width, splits = heads // kv_heads, power_of_two(d, 16), sizes.splits
    rows = sizes.block_m // group
    q, page_table, pack_count, window = map(dense_rows, (q, page_table, pack_count, window))
    if scale < 0:  # the largest score is taken before the scale
        q, scale = -q, -scale
    blocks = blocks_of(k_cache, v_cache, sizes.block_n) if sizes.bulk else None
    packs, pack_rows = None, (0, 0)
    if k_pack is not None and v_pack is not None:
        check_scales("sparse_attention", k_pack=(k_pack, packed[0]), v_pack=(v_pack, packed[1]))
        k_pack, v_pack = dense_rows(k_pack), dense_rows(v_pack)
        packs = matrices_of(k_pack, v_pack, sizes.block_n) if sizes.bulk else None
        pack_rows = k_pack.stride(0), v_pack.stride(0)
    shares = shares_for(q, splits) if splits > 1 else None
    part, mass = shares or (out, out)
    _attend_kept[(kv_heads, splits, b + 1 + n // rows)](
        q, k_cache, v_cache, *(blocks or (k_cache, v_cache)), k_pack, v_pack, *(packs or (k_pack, v_pack)), pack_index,
        pack_count, pack_start, page_table, cu_rows, limit, window, action, out, part, mass,
        *paged, *packed, n, b, page_table.shape[1] * page, layer,
        q.stride(0), page_table.stride(0), *pack_rows, pack_count.stride(0),
        *pack_start.stride(), window.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        scale * math.log2(math.e),
        page, group, heads, power_of_two(kv_heads), d, width, rows, sizes.block_m, sizes.block_n, splits,
        sizes.stages, tiling.kept_stages, offsets_block(b), "ieee" if q.dtype == torch.float32 else "tf32",
        blocks is not None, packs is not None,
        num_warps=sizes.warps,
    )  # fmt: skip
    if dense:  # last: adding up writes all rows
        finished(out, shares, None, cu_rows)
        shares = None
        attend_rows(q, k, v, key_positions, cu_rows, cu_keys, limit, action, out, scale, tiling.dense, k_scale, v_scale)
    return finished(out, shares, kind, cu_rows)


@triton.jit(do_not_specialize=["layer"])
def _attend_kept(
    q_ptr, k_ptr, v_ptr, k_blocks, v_blocks, kp_ptr, vp_ptr, kp_blocks, vp_blocks, index_ptr,
    count_ptr, start_ptr, table_ptr, cu_ptr, limit_ptr, window_ptr, action_ptr, out_ptr, part_ptr, mass_ptr,
    k_scale_ptr, v_scale_ptr, kp_scale_ptr, vp_scale_ptr, n, b, keys, layer,
    q_row, table_row, kp_row, vp_row, count_row, start_layer, start_row, window_row,
    k_page, k_slot, k_head, v_page, v_slot, v_head,
    scale,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, KEPT_STAGES: tl.constexpr, OFFSETS: tl.constexpr, PRECISION: tl.constexpr,
    BULK: tl.constexpr, KEPT_BULK: tl.constexpr,
):  # fmt: skip
    head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s = sequence_at(cu_ptr, b, tile, ROWS, OFFSETS)
    start = tl.load(cu_ptr + s)
    end = tl.load(cu_ptr + s + 1, mask=s < b, other=n)
    action = tl.load(action_ptr + s, mask=s < b, other=_REUSE)
    first_row = start + (tile - start // ROWS - s) * ROWS
    if (first_row >= end) | ((action != _REUSE) & (action != _REPACK)):
        return
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    row = first_row + m // GROUP
    live = (m // GROUP < ROWS) & (row < end)
    limit = tl.load(limit_ptr + row, mask=live, other=0)

    # The keys of this head: `count` entries in `packed` blocks, then the window in blocks that page borders bound;
    # none for padding rows.
    h = tl.arange(0, KV_HEADS)
    counts = tl.load(count_ptr + s * count_row + h, mask=(h <= head) & (s < b), other=0)
    count = tl.sum(tl.where(h == head, counts, 0))
    begin = tl.load(start_ptr + layer * start_layer + s * start_row, mask=s < b, other=0) + tl.sum(counts) - count
    low = tl.load(window_ptr + s * window_row, mask=s < b, other=0)
    high = tl.minimum(tl.load(window_ptr + s * window_row + 1, mask=s < b, other=0), keys)
    longest = tl.minimum(tl.max(limit), high)
    shortest = tl.minimum(tl.min(tl.where(live, limit, longest)), high)
    packed, full = tl.cdiv(count, BLOCK_N), count // BLOCK_N
    base = low // BLOCK_N
    blocks = packed + tl.where(low < longest, tl.cdiv(longest, BLOCK_N) - base, 0)
    share = tl.cdiv(blocks, SPLITS)
    first = tl.minimum(split * share, blocks)
    last = tl.minimum(first + share, blocks)

    value = (row.to(tl.int64) * HEADS + head * GROUP + m % GROUP)[:, None]
    q_at = row.to(tl.int64)[:, None] * q_row + ((head * GROUP + m % GROUP) * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    k_ptr += head.to(tl.int64) * k_head
    v_ptr += head.to(tl.int64) * v_head
    if index_ptr is not None:
        index_ptr += begin
    else:
        kp_ptr += begin.to(tl.int64) * kp_row
        vp_ptr += begin.to(tl.int64) * vp_row
    table_ptr += s.to(tl.int64) * table_row
    if k_scale_ptr is not None:
        k_scale_ptr += head * PAGE
        v_scale_ptr += head * PAGE
        if index_ptr is None:
            kp_scale_ptr += begin
            vp_scale_ptr += begin
        q, q_by = halved(q)
        by = scale * q_by
    else:
        by = tl.full([BLOCK_M], scale, tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for block in tl.range(tl.minimum(first, full), tl.minimum(last, full), num_stages=KEPT_STAGES):
        entry = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if index_ptr is not None:
            position = tl.load(index_ptr + entry)
            page = tl.load(table_ptr + position // PAGE).to(tl.int64)
            k, v = load_slots(
                k_ptr, v_ptr, page, position % PAGE, entry < count, k_page, k_slot, v_page, v_slot, D, WIDTH, False
            )
        elif KEPT_BULK:
            k = kp_blocks.load([begin + block * BLOCK_N, 0]).T
            v = vp_blocks.load([begin + block * BLOCK_N, 0])
        else:
            k, v = load_rows(kp_ptr, vp_ptr, block * BLOCK_N, count, kp_row, vp_row, D, WIDTH, BLOCK_N, False)
        if k_scale_ptr is not None and index_ptr is not None:
            at = scales_at(page, position % PAGE, PAGE, HEADS // GROUP)
            k_by, v_by = scales_of(k_scale_ptr, v_scale_ptr, at, entry < count)
        elif k_scale_ptr is not None:
            k_by, v_by = scales_of(kp_scale_ptr, vp_scale_ptr, entry, entry < count)
        else:
            k_by, v_by = None, None
        top, total, acc = fold(q, k, v, True, top, total, acc, by, k_by, v_by, PRECISION, False)

    # Blocks of the window that every row of the tile sees need no mask.
    from_block, to_block = tl.maximum(first - packed, 0) + base, tl.maximum(last - packed, 0) + base
    plain = tl.minimum(tl.maximum(tl.cdiv(low, BLOCK_N), from_block), to_block)
    after = tl.maximum(tl.minimum(shortest // BLOCK_N, to_block), plain)
    for block in tl.range(plain, after, num_stages=STAGES):
        key = block * BLOCK_N
        if BULK:
            slot = tl.load(table_ptr + key // PAGE) * PAGE + key % PAGE
            k = k_blocks.load([slot, head * D]).T
            v = v_blocks.load([slot, head * D])
        else:
            k, v = load_keys(
                k_ptr, v_ptr, table_ptr, key, longest, k_page, k_slot, v_page, v_slot, PAGE, D, WIDTH, BLOCK_N, False
            )
        if k_scale_ptr is not None:
            k_by, v_by = load_scales(
                k_scale_ptr, v_scale_ptr, table_ptr, key, longest, PAGE, HEADS // GROUP, BLOCK_N, False
            )
        else:
            k_by, v_by = None, None
        top, total, acc = fold(q, k, v, True, top, total, acc, by, k_by, v_by, PRECISION, False)

    if (first <= full) & (full < last) & (full < packed):
        entry = full * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = entry < count
        if index_ptr is not None:
            position = tl.load(index_ptr + entry, mask=inside, other=0)
            page = tl.load(table_ptr + position // PAGE, mask=inside, other=0).to(tl.int64)
            k, v = load_slots(
                k_ptr, v_ptr, page, position % PAGE, inside, k_page, k_slot, v_page, v_slot, D, WIDTH, True
            )
        else:
            k, v = load_rows(kp_ptr, vp_ptr, full * BLOCK_N, count, kp_row, vp_row, D, WIDTH, BLOCK_N, True)
        if k_scale_ptr is not None and index_ptr is not None:
            at = scales_at(page, position % PAGE, PAGE, HEADS // GROUP)
            k_by, v_by = scales_of(k_scale_ptr, v_scale_ptr, at, inside)
        elif k_scale_ptr is not None:
            k_by, v_by = scales_of(kp_scale_ptr, vp_scale_ptr, entry, inside)
        else:
            k_by, v_by = None, None
        top, total, acc = fold(q, k, v, inside[None, :], top, total, acc, by, k_by, v_by, PRECISION, True)
    for i in tl.range(0, plain - from_block + to_block - after, num_stages=1):
        block = from_block + i
        block += tl.where(block < plain, 0, after - plain)
        position = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (position >= low) & (position < longest)
        page = tl.load(table_ptr + position // PAGE, mask=inside, other=0).to(tl.int64)
        k, v = load_slots(k_ptr, v_ptr, page, position % PAGE, inside, k_page, k_slot, v_page, v_slot, D, WIDTH, True)
        seen = (position[None, :] >= low) & (position[None, :] < tl.minimum(limit, high)[:, None])
        if k_scale_ptr is not None:
            at = scales_at(page, position % PAGE, PAGE, HEADS // GROUP)
            k_by, v_by = scales_of(k_scale_ptr, v_scale_ptr, at, inside)
        else:
            k_by, v_by = None, None
        top, total, acc = fold(q, k, v, seen, top, total, acc, by, k_by, v_by, PRECISION, True)

    found = acc / tl.where(total > 0, total, 1.0)[:, None]
    there = live[:, None] & (d < D)[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + value * D + d[None, :], found.to(out_ptr.dtype.element_ty), mask=there)
    else:
        rank = split.to(tl.int64) * n * HEADS
        mass = top + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(mass_ptr + rank + row * HEADS + head * GROUP + m % GROUP, mass, mask=live)
        if first < last:
            tl.store(part_ptr + (rank + value) * D + d[None, :], found, mask=there)
