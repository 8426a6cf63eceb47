"""dgraph::kv_write on CUDA: one program per row copies its key and its value to its slot."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.kv.triton.scales import check_scales, heads_of, scales_at, store_scaled
from dgraph.ops.triton.rows import dense_rows, offsets_block, owner_of, power_of_two, start_of, wait


def kernel(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """dgraph::kv_write; see its contract."""
    (n, kv_heads, d), b = k.shape, cu_rows.shape[0] - 1
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride()[2:] != (d, 1):
            raise InputError(
                f"dgraph::kv_write: a slot of {name} [pages, page, Hkv, D] must be contiguous (strides {d}, 1), got "
                f"strides {cache.stride()[2:]}. Allocate the cache in that layout."
            )
    check_scales("kv_write", k_cache=(k_cache, k_scale), v_cache=(v_cache, v_scale))
    if not n or not b:
        return
    k, v, page_table = dense_rows(k), dense_rows(v), dense_rows(page_table)
    _write[(n,)](
        k, v, k_cache, v_cache, positions, page_table, cu_rows, k_scale, v_scale, skip,
        b, k.stride(0), v.stride(0), page_table.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2],
        k_cache.shape[1], kv_heads * d, power_of_two(kv_heads * d, 16, 4096), offsets_block(b),
        *heads_of(kv_heads, d, k_scale), num_warps=4, **start_of(k.device),
    )  # fmt: skip


@triton.jit
def _write(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, table_ptr, cu_ptr, k_scale_ptr, v_scale_ptr, skip_ptr,
    b, k_row, v_row, table_row, k_page, k_slot, v_page, v_slot,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
    HEADS: tl.constexpr, SOME: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0)
    k_ptr += row.to(tl.int64) * k_row
    v_ptr += row.to(tl.int64) * v_row
    # Loads that depend on no other are issued at once, also by a row that is not live.
    live, position = tl.load(cu_ptr + b), tl.load(positions_ptr + row)
    at = tl.arange(0, BLOCK)
    if k_scale_ptr is None and BLOCK >= SIZE:
        key = tl.load(k_ptr + at, mask=at < SIZE)
        value = tl.load(v_ptr + at, mask=at < SIZE)
    s = owner_of(cu_ptr, b, row, OFFSETS)
    if row >= live:
        return
    page = tl.load(table_ptr + s.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
    if skip_ptr is not None:
        page = tl.where(tl.load(skip_ptr + row) != 0, -1, page)
    if page < 0:
        return
    k_at = page * k_page + position % PAGE * k_slot
    v_at = page * v_page + position % PAGE * v_slot
    if k_scale_ptr is not None:
        slot = scales_at(page, position % PAGE, PAGE, HEADS)
        store_scaled(k_ptr, k_cache_ptr + k_at, k_scale_ptr + slot, row >= 0, PAGE, HEADS, SOME, D, WIDTH)
        store_scaled(v_ptr, v_cache_ptr + v_at, v_scale_ptr + slot, row >= 0, PAGE, HEADS, SOME, D, WIDTH)
    elif BLOCK >= SIZE:
        tl.store(k_cache_ptr + k_at + at, key, mask=at < SIZE)
        tl.store(v_cache_ptr + v_at + at, value, mask=at < SIZE)
    else:
        for first in range(0, SIZE, BLOCK):
            at = first + tl.arange(0, BLOCK)
            key = tl.load(k_ptr + at, mask=at < SIZE)
            value = tl.load(v_ptr + at, mask=at < SIZE)
            tl.store(k_cache_ptr + k_at + at, key, mask=at < SIZE)
            tl.store(v_cache_ptr + v_at + at, value, mask=at < SIZE)
