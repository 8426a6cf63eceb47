"""Rows of partial_attention on CUDA: the kind of each row, a list of each kind, and the salient rows."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.selection.triton.drift import drifted
from dgraph.ops.selection.triton.keep_index import kept_before
from dgraph.ops.triton.rows import power_of_two

BLOCK, TOGETHER = 256, 8
"""Rows that one program divides, and rows that one decides."""


def divide(
    index: Tensor,
    cu_changed: Tensor,
    full: Tensor,
    positions: Tensor,
    tables: tuple[Tensor, Tensor],
    cu_rows: Tensor,
    page: int,
    every: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Divide rows by kind, and find the slots of rows and changed keys.

    Args:
        tables: of keys, and of contexts; by these are the slots of changed keys, and of rows.
        every: all live rows are exact.

    Returns:
        exact u8[N]: the row is in the index or full; padding rows are not.
        order i32[2, N]: the exact rows in ascending order, and the other live rows; after them, anything.
        offsets i32[2, b+1]: offsets of each sequence in the two lists.
        slots i32[N]: page * slots of a page + place in it, of each live row.
        changed i32[2, K]: slot and position of each changed row.
    """
    (n, room), b = (full.shape[0], index.shape[0]), cu_rows.shape[0] - 1
    exact = torch.empty(n, dtype=torch.uint8, device=full.device)
    order, slots = (torch.empty((*size, n), dtype=torch.int32, device=full.device) for size in ((2,), ()))
    offsets = torch.empty((2, b + 1), dtype=torch.int32, device=full.device)
    changed = torch.empty((2, room), dtype=torch.int32, device=full.device)
    tiles = triton.cdiv(n, BLOCK)
    _describe[(tiles + triton.cdiv(room, BLOCK),)](
        index.contiguous(), cu_changed, full.contiguous(), positions, *tables, cu_rows, exact, slots, changed,
        n, b, room, tiles, *(table.stride(0) for table in tables), every, page, room.bit_length(), BLOCK,
        power_of_two(b, 16, 32), num_warps=4,
    )  # fmt: skip
    _divide[(tiles + b + 1,)](
        exact, cu_rows, order, offsets, n, b, tiles, BLOCK, power_of_two(n, BLOCK, 4096), num_warps=4
    )
    return exact, order, offsets, slots, changed


def decide(sums: Tensor, full: Tensor, cu_rows: Tensor, context: Tensor, tau: float | None) -> Tensor:
    """Flag the salient rows, bool[N], from the sums [3, H, N] of the cosines; zero the padding rows of `context`.

    Without a tau, return the sums over heads instead, f32[N, 3].
    """
    (_, heads, n), size = sums.shape, context[0].numel()
    found = torch.empty(n, dtype=torch.bool, device=sums.device) if tau is not None else sums.new_empty((n, 3))
    _decide[(triton.cdiv(n, TOGETHER),)](
        sums, full.contiguous(), cu_rows, context, found, n, cu_rows.shape[0] - 1, 0.0 if tau is None else tau,
        heads, power_of_two(heads), size, power_of_two(size, 16, 2048), TOGETHER, tau is not None, num_warps=4,
    )  # fmt: skip
    return found


@triton.jit
def _slots(
    positions_ptr, table_ptr, cu_ptr, b, row, live, table_row,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Slot and position of each of BLOCK rows."""
    s = tl.full([BLOCK], -1, tl.int32)
    for first in range(0, b, OFFSETS):
        i = first + tl.arange(0, OFFSETS)
        start = tl.load(cu_ptr + i, mask=i < b, other=0)
        s += tl.sum(((start[None, :] <= row[:, None]) & (i < b)[None, :]).to(tl.int32), 1)
    position = tl.load(positions_ptr + row, mask=live, other=0)
    page = tl.load(table_ptr + s.to(tl.int64) * table_row + position // PAGE, mask=live, other=0)
    return (page * PAGE + position % PAGE).to(tl.int32), position.to(tl.int32)


@triton.jit
def _describe(
    index_ptr, cu_changed_ptr, full_ptr, positions_ptr, table_ptr, c_table_ptr, cu_ptr, exact_ptr, slots_ptr,
    changed_ptr, n, b, room, tiles, table_row, c_table_row,
    EVERY: tl.constexpr, PAGE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Write kind and slot of rows; slot and position of changed rows."""
    tile = tl.program_id(0)
    count = tl.minimum(tl.load(cu_changed_ptr + b), room).to(tl.int32)
    if tile < tiles:
        row = tile * BLOCK + tl.arange(0, BLOCK)
        live = row < tl.minimum(tl.load(cu_ptr + b), n)
        # Search the first entry of the ascending index that is not below the row.
        low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + count
        for _ in range(STEPS):
            middle = (low + high) // 2
            open_ = low < high
            below = open_ & (tl.load(index_ptr + middle, mask=open_, other=0) < row)
            low, high = tl.where(below, middle + 1, low), tl.where(open_ & (below == 0), middle, high)
        listed = (low < count) & (tl.load(index_ptr + low, mask=low < count, other=-1) == row)
        exact = live & (EVERY | listed | (tl.load(full_ptr + row, mask=live, other=0) != 0))
        tl.store(exact_ptr + row, exact.to(tl.uint8), mask=row < n)
        slot, _position = _slots(positions_ptr, c_table_ptr, cu_ptr, b, row, live, c_table_row, PAGE, BLOCK, OFFSETS)
        tl.store(slots_ptr + row, slot, mask=live)
    else:
        at = (tile - tiles) * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(index_ptr + at, mask=at < count, other=0).to(tl.int32)
        slot, position = _slots(positions_ptr, table_ptr, cu_ptr, b, row, at < count, table_row, PAGE, BLOCK, OFFSETS)
        tl.store(changed_ptr + at, slot, mask=at < count)
        tl.store(changed_ptr + room + at, position, mask=at < count)


@triton.jit
def _divide(
    exact_ptr, cu_ptr, order_ptr, offsets_ptr, n, b, tiles, BLOCK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """List rows; each program counts the exact ones before its own, single bytes, instead of waiting for another."""
    tile = tl.program_id(0)
    if tile >= tiles:
        s = tile - tiles
        start = tl.minimum(tl.load(cu_ptr + s), n)
        found = kept_before(exact_ptr, start, WIDE)
        tl.store(offsets_ptr + s, found.to(tl.int32))
        tl.store(offsets_ptr + b + 1 + s, (start - found).to(tl.int32))
        return
    live = tl.minimum(tl.load(cu_ptr + b), n)
    row = tile * BLOCK + tl.arange(0, BLOCK)
    flag = (tl.load(exact_ptr + row, mask=row < live, other=0) != 0) & (row < live)
    rank = kept_before(exact_ptr, tl.minimum(tile * BLOCK, live), WIDE) + tl.cumsum(flag.to(tl.int32), 0)
    place = tl.where(flag, rank - 1, n + row - rank)
    tl.store(order_ptr + place, row, mask=row < live)


@triton.jit
def _decide(
    sums_ptr, full_ptr, cu_ptr, context_ptr, found_ptr, n, b, tau,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    row, head = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    end = tl.load(cu_ptr + b)
    live = row < tl.minimum(end, n)
    at = row[:, None] + head[None, :] * n
    inside = live[:, None] & (head < HEADS)[None, :]
    dot = tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0), 1)
    new = tl.sum(tl.load(sums_ptr + n * HEADS + at, mask=inside, other=0.0), 1)
    old = tl.sum(tl.load(sums_ptr + 2 * n * HEADS + at, mask=inside, other=0.0), 1)
    if FLAGS:
        full = tl.load(full_ptr + row, mask=live, other=0) != 0
        tl.store(found_ptr + row, live & (full | drifted(dot, new, old, tau)), mask=row < n)
    else:
        tl.store(found_ptr + 3 * row, dot, mask=row < n)
        tl.store(found_ptr + 3 * row + 1, new, mask=row < n)
        tl.store(found_ptr + 3 * row + 2, old, mask=row < n)
    for i in range(tl.maximum(end - first, 0), tl.minimum(n - first, ROWS)):
        for column in range(0, SIZE, BLOCK):
            d = column + tl.arange(0, BLOCK)
            zero = tl.zeros([BLOCK], context_ptr.dtype.element_ty)
            tl.store(context_ptr + (first + i).to(tl.int64) * SIZE + d, zero, mask=d < SIZE)
