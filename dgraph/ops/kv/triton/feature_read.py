"""dgraph::feature_read on CUDA: one program per row copies its slot, or writes zeros."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block, owner_of, power_of_two


def kernel(cache: Tensor, positions: Tensor, page_table: Tensor, cu_rows: Tensor) -> Tensor:
    """dgraph::feature_read; see its contract."""
    step = cache.stride(2) if cache.dim() == 3 else 1  # scales of keys lie by head
    if cache.dim() > 3:
        check_slots("feature_read", cache=cache)
    n, page, b = positions.shape[0], cache.shape[1], cu_rows.shape[0] - 1
    out = torch.empty((n, *cache.shape[2:]), dtype=cache.dtype, device=cache.device)
    width = math.prod(cache.shape[2:])
    if not out.numel():
        return out
    page_table = dense_rows(page_table)
    _read[(n,)](
        cache, positions, page_table, cu_rows, out, b, page_table.stride(0), *cache.stride()[:2],
        step, page, width, power_of_two(width, 16, 4096), offsets_block(b), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _read(
    cache_ptr, positions_ptr, table_ptr, cu_ptr, out_ptr, b, table_row, cache_page, cache_slot, step,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    page = tl.full([], -1, tl.int64)
    position = page
    if row < tl.load(cu_ptr + b):
        s = owner_of(cu_ptr, b, row, OFFSETS)
        position = tl.load(positions_ptr + row).to(tl.int64)
        page = tl.load(table_ptr + s.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
    slot = page * cache_page + position % PAGE * cache_slot
    for first in range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(cache_ptr + slot + at * step, mask=(page >= 0) & (at < SIZE), other=0.0)
        tl.store(out_ptr + row * SIZE + at, value, mask=at < SIZE)
