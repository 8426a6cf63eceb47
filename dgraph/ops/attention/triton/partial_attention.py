"""dgraph::partial_attention on CUDA.

Rows are divided on the device into those that need exact attention and the others, each kind in a list of its own
(`partial_rows`). As in paged_attention, a program takes a tile of rows, all query heads of one KV head, and a share of
the keys. Its rows are of one kind and one sequence.

 - Exact rows read keys and values.
 - The others read the keys, for the largest score and the sum of the weights, and no values. Then they read the keys
   of the changed rows again, and the differences of their values: twice the products for the few, but no mask, no
   map from keys to changes, and no values for the many.

There are two launches. `_mixed` takes the other rows, and next to them the exact rows of sequences that have few. The
tiles of these are as narrow as they are few. They are bound by the reading of values while their neighbours are bound
by products. `_exact` takes the exact rows of sequences that have many. A launch without work ends at once. The program
that writes the context of a row adds up, for its heads, the three sums of the cosine. A last kernel adds those over the
heads, in order.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.attention.triton import attention_tiling
from dgraph.ops.attention.triton.attention_tiling import multiprocessors
from dgraph.ops.attention.triton.paged_attention import blocks_of
from dgraph.ops.attention.triton.partial_rows import decide, divide
from dgraph.ops.attention.triton.partial_tiles import changes, exactly, finish, leave, queries, scan
from dgraph.ops.kv.triton.scales import check_scales
from dgraph.ops.padded import check_heads
from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block, power_of_two, sequence_at
from dgraph.ops.tuning import attention_shape, chosen


@dataclass(frozen=True)
class Tiling:
    """Sizes of the launches.

    Attributes:
        exact: tiling of `_exact`; its block_m, splits and warps are those of `_mixed` as well.
        block_n, stages: keys per iteration, and iterations in flight, of `_mixed`.
        least, few: rows of the stacked matrix of the narrow tiles, which take the exact rows of a sequence that has
            no more; 0 for none.
        changes: changed keys per iteration.
        registers: most registers of a thread of `_mixed`, so that more programs fit next to each other; 0: no bound.
    """

    exact: attention_tiling.Tiling
    block_n: int = 64
    stages: int = 4
    least: int = 16
    few: int = 64
    changes: int = 32
    registers: int = 128


def tiling_for(
    n: int, b: int, heads: tuple[int, int], d: int, page: int, keys: int, itemsize: int, multiprocessors: int
) -> Tiling:
    """The tiling for a shape, from that of paged_attention; the arguments are the same."""
    block_m = attention_tiling.widest_tile(n, b, heads, multiprocessors)
    exact = attention_tiling.tiling_for(n, b, heads, d, page, keys, itemsize, multiprocessors, block_m)
    block_n = min(exact.block_n, 64)
    least, few = (size if heads[0] // heads[1] <= size < exact.block_m else 0 for size in (16, 64))
    if itemsize > 2:
        return Tiling(exact, block_n, 1, least, 0, 16, 0)
    crowded = exact.warps == 8 and power_of_two(d, 16) <= 128
    return Tiling(exact, block_n, exact.stages, least, few, 32, 128 if crowded else 0)


def kernel(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    dv: Tensor,
    index: Tensor,
    cu_changed: Tensor,
    c_cache: Tensor,
    full: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
    tau: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    c_table: Tensor | None = None,
    tiling: Tiling | None = None,
    flags: bool = True,
) -> tuple[Tensor, Tensor]:
    """dgraph::partial_attention, or with flags=False dgraph::partial_context; see the contracts. `tiling` overrides the
    sizes chosen for the shape.
    """
    op = "partial_attention" if flags else "partial_context"
    check_heads(op, q, k_cache.transpose(1, 2), 1)
    check_slots(op, c_cache=c_cache)
    check_scales(op, k_cache=(k_cache, k_scale), v_cache=(v_cache, v_scale))
    (n, heads, d), (_, page, kv_heads, _), b = q.shape, k_cache.shape, cu_rows.shape[0] - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out, full.new_zeros(n) if flags else q.new_zeros((n, 3), dtype=torch.float32)
    keys = page_table.shape[1] * page
    tiling = tiling or chosen(op, attention_shape(q, k_cache, page_table))
    if tiling is None:
        tiling = tiling_for(n, b, (heads, kv_heads), d, page, keys, q.element_size(), multiprocessors(q.device))
    sizes = tiling.exact
    group, width, splits = heads // kv_heads, power_of_two(d, 16), sizes.splits
    rows = sizes.block_m // group
    q, dv, page_table = dense_rows(q), dense_rows(dv), dense_rows(page_table)
    if scale < 0:  # the largest score is taken before the scale
        q, scale = -q, -scale
    tables = page_table, page_table if c_table is None else dense_rows(c_table)
    exact, order, offsets, slots, changed = divide(index, cu_changed, full, positions, tables, cu_rows, page, tau > 1)
    sums = torch.empty((3, heads, n), dtype=torch.float32, device=q.device)
    part, mass = out, sums
    if splits > 1:
        part = torch.empty((splits, n, heads, d), dtype=torch.float32, device=q.device)
        mass = torch.empty((2, splits, n, heads), dtype=torch.float32, device=q.device)

    def launch(function: Any, grid: tuple[int, ...], block_n: int, stages: int, *more: int, **options: int) -> None:
        blocks = blocks_of(k_cache, v_cache, block_n) if sizes.bulk else None
        function[grid](
            q, k_cache, v_cache, *(blocks or (k_cache, v_cache)), dv, c_cache, page_table, order, offsets, slots,
            limit, changed, cu_changed, out, sums, part, mass,
            k_scale, v_scale, n, b, keys, dv.shape[0], q.stride(0), dv.stride(0), page_table.stride(0),
            *k_cache.stride()[:3], *v_cache.stride()[:3], *c_cache.stride()[:2],
            scale * math.log2(math.e),
            page, group, heads, d, width, rows, sizes.block_m, block_n, stages, splits, offsets_block(b),
            "ieee" if q.dtype == torch.float32 else "tf32", blocks is not None, *more,
            num_warps=sizes.warps, **options,
        )  # fmt: skip

    bound = {"maxnreg": tiling.registers} if tiling.registers and q.device.type == "cuda" else {}
    narrow = max(tiling.least, tiling.few)
    room = multiprocessors(q.device) * (1 if sizes.warps == 8 else 2)
    most = (b + n // rows) * kv_heads * splits
    mixed = (kv_heads, splits, 2 * b + n // rows)
    launch(_mixed, mixed, tiling.block_n, tiling.stages, tiling.least, tiling.few, tiling.changes, **bound)
    launch(_exact, (min(room, most),), sizes.block_n, sizes.stages, narrow, power_of_two(b, 16))
    if splits > 1:
        _add_up[(n, heads)](
            part, mass, exact, c_cache, slots, cu_rows, out, sums, n, b, heads, *c_cache.stride()[:2],
            page, d, width, splits, power_of_two(splits), num_warps=max(width // 128, 1),
        )  # fmt: skip
    return out, decide(sums, full, cu_rows, out, tau if flags else None)


@triton.jit
def _exact(
    q_ptr, k_ptr, v_ptr, k_blocks, v_blocks, dv_ptr, c_ptr, table_ptr, order_ptr, offsets_ptr, slots_ptr,
    limit_ptr, changed_ptr, cu_changed_ptr, out_ptr, sums_ptr, part_ptr, mass_ptr,
    k_scale_ptr, v_scale_ptr, n, b, keys, room, q_row, dv_row, table_row,
    k_page, k_slot, k_head, v_page, v_slot, v_head, c_page, c_slot,
    scale,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    OFFSETS: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
    NARROW: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Attend exact rows. As many programs as run at a time share the tiles; a launch without one ends in one round."""
    i = tl.arange(0, SEQUENCES)
    start = tl.load(offsets_ptr + i, mask=i < b, other=0)
    count = tl.load(offsets_ptr + i + 1, mask=i < b, other=0) - start
    tiles = tl.where(count * GROUP > NARROW, tl.cdiv(count, ROWS), 0)
    ends = tl.cumsum(tiles, 0)
    for unit in range(tl.program_id(0), tl.sum(tiles) * (HEADS // GROUP) * SPLITS, tl.num_programs(0)):
        work = tl.full([], unit, tl.int32)
        head, split = work % (HEADS // GROUP), work // (HEADS // GROUP) % SPLITS
        tile = work // (HEADS // GROUP) // SPLITS
        s = tl.sum((ends <= tile).to(tl.int32))
        first = tl.sum(tl.where(i == s, start + (tile - ends + tiles) * ROWS, 0))
        end = tl.sum(tl.where(i == s, start + count, 0))
        k_by_ptr, v_by_ptr = k_scale_ptr, v_scale_ptr
        if k_scale_ptr is not None:
            k_by_ptr, v_by_ptr = k_scale_ptr + head * PAGE, v_scale_ptr + head * PAGE
        exactly(
            q_ptr, k_ptr + head.to(tl.int64) * k_head, v_ptr + head.to(tl.int64) * v_head, k_blocks, v_blocks, c_ptr,
            table_ptr + s.to(tl.int64) * table_row, order_ptr, slots_ptr, limit_ptr,
            out_ptr, sums_ptr, part_ptr, mass_ptr,
            first, end, head, split, n, keys, q_row, k_page, k_slot, v_page, v_slot, c_page, c_slot, scale,
            k_by_ptr, v_by_ptr, PAGE, GROUP, HEADS, D, WIDTH, ROWS, BLOCK_M, BLOCK_N, STAGES, SPLITS, PRECISION, BULK,
        )  # fmt: skip


@triton.jit
def _mixed(
    q_ptr, k_ptr, v_ptr, k_blocks, v_blocks, dv_ptr, c_ptr, table_ptr, order_ptr, offsets_ptr, slots_ptr,
    limit_ptr, changed_ptr, cu_changed_ptr, out_ptr, sums_ptr, part_ptr, mass_ptr,
    k_scale_ptr, v_scale_ptr, n, b, keys, room, q_row, dv_row, table_row,
    k_page, k_slot, k_head, v_page, v_slot, v_head, c_page, c_slot,
    scale,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    OFFSETS: tl.constexpr, PRECISION: tl.constexpr, BULK: tl.constexpr,
    LEAST: tl.constexpr, FEW: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """The first tile of a sequence takes its exact rows if they are few; the tiles after it take the others."""
    head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    others_ptr = offsets_ptr + b + 1
    s = sequence_at(others_ptr, b, tile, ROWS, OFFSETS, 2)
    if s >= b:
        return
    start, end = tl.load(others_ptr + s), tl.load(others_ptr + s + 1)
    tile -= start // ROWS + 2 * s
    k_ptr += head.to(tl.int64) * k_head
    v_ptr += head.to(tl.int64) * v_head
    table_ptr += s.to(tl.int64) * table_row
    if k_scale_ptr is not None:
        k_scale_ptr += head * PAGE
        v_scale_ptr += head * PAGE
    if tile == 0:
        first, last = tl.load(offsets_ptr + s), tl.load(offsets_ptr + s + 1)
        high = (last - first) * GROUP
        if LEAST > 0:  # noqa: SIM102
            if (high > 0) & (high <= LEAST):
                exactly(
                    q_ptr, k_ptr, v_ptr, k_blocks, v_blocks, c_ptr, table_ptr, order_ptr, slots_ptr, limit_ptr,
                    out_ptr, sums_ptr, part_ptr, mass_ptr,
                    first, last, head, split, n, keys, q_row, k_page, k_slot, v_page, v_slot, c_page, c_slot, scale,
                    k_scale_ptr, v_scale_ptr,
                    PAGE, GROUP, HEADS, D, WIDTH, ROWS, LEAST, BLOCK_N, STAGES, SPLITS, PRECISION, BULK,
                )  # fmt: skip
        if FEW > 0:  # noqa: SIM102
            if (high > LEAST) & (high <= FEW):
                exactly(
                    q_ptr, k_ptr, v_ptr, k_blocks, v_blocks, c_ptr, table_ptr, order_ptr, slots_ptr, limit_ptr,
                    out_ptr, sums_ptr, part_ptr, mass_ptr,
                    first, last, head, split, n, keys, q_row, k_page, k_slot, v_page, v_slot, c_page, c_slot, scale,
                    k_scale_ptr, v_scale_ptr,
                    PAGE, GROUP, HEADS, D, WIDTH, ROWS, FEW, BLOCK_N, STAGES, SPLITS, PRECISION, BULK,
                )  # fmt: skip
    elif start + (tile - 1) * ROWS < end:
        first = start + (tile - 1) * ROWS
        q, by, row, live, limit = queries(
            q_ptr, order_ptr + n, limit_ptr, first, end, head, q_row, scale, GROUP, D, WIDTH, ROWS, BLOCK_M,
            k_scale_ptr is not None,
        )  # fmt: skip
        begin, last = tl.load(cu_changed_ptr + s), tl.load(cu_changed_ptr + s + 1)
        keys = tl.where(begin < last, keys, 0)  # without a change there is nothing to weigh
        top, total, acc = scan(
            q, live, limit, k_ptr, v_ptr, k_blocks, v_blocks, table_ptr, keys, split, head * D,
            k_page, k_slot, v_page, v_slot, by, k_scale_ptr, v_scale_ptr,
            PAGE, HEADS // GROUP, D, WIDTH, BLOCK_M, BLOCK_N, STAGES, SPLITS, PRECISION, BULK, False,
        )  # fmt: skip
        if SPLITS > 1:
            share = tl.cdiv(tl.cdiv(last - begin, CHANGES), SPLITS) * CHANGES
            begin += split * share
            last = tl.minimum(begin + share, last)
        top, total, acc = changes(
            q, limit, top, total, k_ptr, dv_ptr + head * D, changed_ptr, room, begin, last,
            tl.minimum(tl.max(limit), keys), dv_row, k_page, k_slot, by, k_scale_ptr,
            PAGE, HEADS // GROUP, D, WIDTH, BLOCK_M, CHANGES, SPLITS, PRECISION,
        )  # fmt: skip
        leave(
            acc, top, total, row, live, head, split, slots_ptr, c_ptr, out_ptr, sums_ptr, part_ptr, mass_ptr, n,
            c_page, c_slot, True, PAGE, GROUP, HEADS, D, WIDTH, BLOCK_M, SPLITS,
        )  # fmt: skip


@triton.jit
def _add_up(
    part_ptr, mass_ptr, exact_ptr, c_ptr, slots_ptr, cu_ptr, out_ptr, sums_ptr, n, b, heads, c_page, c_slot,
    PAGE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Add up the shares of a row and a head, each relative to its largest score; all are loaded at once."""
    row = tl.program_id(0)
    if row >= tl.load(cu_ptr + b):
        return
    d, split = tl.arange(0, WIDTH), tl.arange(0, BLOCK_S)
    count = tl.full([], n, tl.int64) * heads
    at = split * count + row * heads + tl.program_id(1)
    top = tl.load(mass_ptr + at, mask=split < SPLITS, other=float("-inf"))
    mass = tl.load(mass_ptr + SPLITS * count + at, mask=split < SPLITS, other=0.0)
    there = (split < SPLITS)[:, None] & (d < D)[None, :]
    part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(mass * weight, 0)
    found = tl.sum(tl.where((top > float("-inf"))[:, None], part, 0.0) * weight[:, None], 0)
    found /= tl.where(total > 0, total, 1.0)
    one = tl.arange(0, 1)
    finish(
        found[None, :], row + one, tl.program_id(1) + one, one == 0, slots_ptr, c_ptr, out_ptr, sums_ptr, n, heads,
        c_page, c_slot, tl.load(exact_ptr + row) == 0, PAGE, D, WIDTH,
    )  # fmt: skip
