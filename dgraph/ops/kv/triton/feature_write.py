"""dgraph::feature_write on CUDA: one program per row copies its values to its slot."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block, owner_of, power_of_two


def kernel(
    values: Tensor, cache: Tensor, positions: Tensor, page_table: Tensor, cu_rows: Tensor, only: Tensor | None = None
) -> None:
    """dgraph::feature_write; see its contract. With `only` bool[N], the rows that it flags alone are written."""
    (n, width), b = values.shape, cu_rows.shape[0] - 1
    check_slots("feature_write", cache=cache)
    if not values.numel() or not b:
        return
    values, page_table = dense_rows(values), dense_rows(page_table)
    _write_feature[(n,)](
        values, cache, positions, page_table, cu_rows, only,
        b, values.stride(0), page_table.stride(0), *cache.stride()[:2],
        cache.shape[1], width, power_of_two(width, 16, 4096), offsets_block(b), num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_feature(
    values_ptr, cache_ptr, positions_ptr, table_ptr, cu_ptr, only_ptr,
    b, values_row, table_row, cache_page, cache_slot,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(cu_ptr + b):
        return
    s = owner_of(cu_ptr, b, row, OFFSETS)
    position = tl.load(positions_ptr + row).to(tl.int64)
    page = tl.load(table_ptr + s.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
    if only_ptr is not None:
        page = tl.where(tl.load(only_ptr + row) != 0, page, -1)
    if page < 0:
        return
    slot = page * cache_page + position % PAGE * cache_slot
    for first in range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + row * values_row + at, mask=at < SIZE)
        tl.store(cache_ptr + slot + at, value, mask=at < SIZE)
