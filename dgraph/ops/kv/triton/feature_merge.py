"""dgraph::feature_merge on CUDA: one program per row finds the row in the list and copies from there, or its slot."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block, owner_of, power_of_two


def kernel(new: Tensor, index: Tensor, cache: Tensor, positions: Tensor, page_table: Tensor, cu_rows: Tensor) -> Tensor:
    """dgraph::feature_merge; see its contract."""
    n, room, page, b = positions.shape[0], index.shape[0], cache.shape[1], cu_rows.shape[0] - 1
    check_slots("feature_merge", cache=cache)
    out = torch.empty((n, *new.shape[1:]), dtype=new.dtype, device=new.device)
    if not out.numel():
        return out
    new, page_table = dense_rows(new), dense_rows(page_table)
    width = math.prod(new.shape[1:])
    _merge[(n,)](
        new, index.contiguous(), cache, positions, page_table, cu_rows, out,
        b, room, new.stride(0), page_table.stride(0), *cache.stride()[:2],
        room.bit_length(), page, width, power_of_two(width, 16, 4096), offsets_block(b), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _merge(
    new_ptr, index_ptr, cache_ptr, positions_ptr, table_ptr, cu_ptr, out_ptr,
    b, room, new_row, table_row, cache_page, cache_slot,
    STEPS: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    page = tl.full([], -1, tl.int64)
    position = page
    # Search the first entry that is not below the row; -1 after the last counts as such. Entry j is at least j.
    low = tl.full([], 0, tl.int64)
    high = low
    if row < tl.load(cu_ptr + b):
        s = owner_of(cu_ptr, b, row, OFFSETS)
        position = tl.load(positions_ptr + row).to(tl.int64)
        page = tl.load(table_ptr + s.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
        high = tl.minimum(row + 1, room).to(tl.int64)
    end = high
    for _ in range(STEPS):
        middle = (low + high) // 2
        within = low < high
        entry = tl.load(index_ptr + middle, mask=within, other=0)
        below = within & (entry >= 0) & (entry < row)
        low, high = tl.where(below, middle + 1, low), tl.where(within & (below == 0), middle, high)
    listed = (low < end) & (tl.load(index_ptr + low, mask=low < end, other=-1) == row)
    slot = page * cache_page + position % PAGE * cache_slot
    for first in range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < SIZE
        held = tl.load(cache_ptr + slot + at, mask=inside & (page >= 0) & (listed == 0), other=0.0)
        value = tl.load(new_ptr + low * new_row + at, mask=inside & listed, other=0.0)
        value = tl.where(listed, value, held)
        tl.store(cache_ptr + slot + at, value, mask=inside & (page >= 0) & listed)
        tl.store(out_ptr + row * SIZE + at, value, mask=inside)
