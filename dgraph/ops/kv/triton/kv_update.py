"""dgraph::kv_update on CUDA: one program per row copies its key and its value to its slot.

It reads the old value before it overwrites it, for the difference.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.kv.triton.scales import check_scales, heads_of, load_scaled, quantised, scales_at, store_scaled
from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block, owner_of, power_of_two


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
) -> Tensor:
    """dgraph::kv_update; see its contract."""
    (n, kv_heads, d), b = k.shape, cu_rows.shape[0] - 1
    check_slots("kv_update", k_cache=k_cache, v_cache=v_cache)
    check_scales("kv_update", k_cache=(k_cache, k_scale), v_cache=(v_cache, v_scale))
    change = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not change.numel():
        return change
    k, v, page_table = dense_rows(k), dense_rows(v), dense_rows(page_table)
    _update[(n,)](
        k, v, k_cache, v_cache, positions, page_table, cu_rows, change, k_scale, v_scale,
        b, k.stride(0), v.stride(0), page_table.stride(0), *k_cache.stride()[:2], *v_cache.stride()[:2],
        k_cache.shape[1], kv_heads * d, power_of_two(kv_heads * d, 16, 4096), offsets_block(b),
        *heads_of(kv_heads, d, k_scale), num_warps=4,
    )  # fmt: skip
    return change


@triton.jit
def _update(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, table_ptr, cu_ptr, change_ptr, k_scale_ptr, v_scale_ptr,
    b, k_row, v_row, table_row, k_page, k_slot, v_page, v_slot,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
    HEADS: tl.constexpr, SOME: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    page = tl.full([], -1, tl.int64)
    position = page
    if row < tl.load(cu_ptr + b):
        s = owner_of(cu_ptr, b, row, OFFSETS)
        position = tl.load(positions_ptr + row).to(tl.int64)
        page = tl.load(table_ptr + s.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
    live = page >= 0
    k_at = page * k_page + position % PAGE * k_slot
    v_at = page * v_page + position % PAGE * v_slot
    if k_scale_ptr is not None:
        slot = scales_at(page, position % PAGE, PAGE, HEADS)
        store_scaled(k_ptr + row * k_row, k_cache_ptr + k_at, k_scale_ptr + slot, live, PAGE, HEADS, SOME, D, WIDTH)
        v_cache_ptr, v_scale_ptr = v_cache_ptr + v_at, v_scale_ptr + slot
        for first in range(0, HEADS, SOME):
            head, d = first + tl.arange(0, SOME), tl.arange(0, WIDTH)
            at, inside = head[:, None] * D + d[None, :], (head < HEADS)[:, None] & (d < D)[None, :]
            before = load_scaled(v_cache_ptr, v_scale_ptr, live, first, PAGE, HEADS, SOME, D, WIDTH)
            value = tl.load(v_ptr + row * v_row + at, mask=live & inside, other=0.0).to(tl.float32)
            stored, scale = quantised(value)
            tl.debug_barrier()  # as below
            tl.store(v_cache_ptr + at, stored.to(v_cache_ptr.dtype.element_ty), mask=live & inside)
            tl.store(v_scale_ptr + head * PAGE, scale, mask=live & (head < HEADS))
            change = stored * scale[:, None] - before
            tl.store(change_ptr + row * SIZE + at, change.to(change_ptr.dtype.element_ty), mask=inside)
        return
    for first in range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = live & (at < SIZE)
        key = tl.load(k_ptr + row * k_row + at, mask=inside)
        value = tl.load(v_ptr + row * v_row + at, mask=inside, other=0.0)
        before = tl.load(v_cache_ptr + v_at + at, mask=inside, other=0.0)
        change = value.to(tl.float32) - before.to(tl.float32)
        tl.debug_barrier()  # a block narrower than the program is held by several threads: all have read it now
        tl.store(k_cache_ptr + k_at + at, key, mask=inside)
        tl.store(v_cache_ptr + v_at + at, value, mask=inside)
        tl.store(change_ptr + row * SIZE + at, change.to(change_ptr.dtype.element_ty), mask=at < SIZE)
