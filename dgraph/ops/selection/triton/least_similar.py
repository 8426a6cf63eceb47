"""dgraph::least_similar on CUDA: one kernel compares and writes each row, another counts the rows before it.

A row's rank is the number of rows of its sequence that come before it, which takes a comparison with each of them. Few
rows adapt, and two launches cost less than sorting.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.kv.triton.scales import check_scales, heads_of, scales_at
from dgraph.ops.selection.triton.compare_rows import block_of, cosine_of, place_of, renew, renew_scaled
from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block, owner_of, power_of_two

RANKED = 1024
"""Rows that a program looks at, or a row is compared with, at a time."""


def kernel(
    v: Tensor,
    v_cache: Tensor,
    full: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    share: float,
    adapt: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """dgraph::least_similar; see its contract. Nothing is read on the host."""
    check_slots("least_similar", v_cache=v_cache)
    check_scales("least_similar", v_cache=(v_cache, v_scale))
    n, heads, d = v.shape
    if not n:
        return full.new_empty(0)
    b = cu_rows.shape[0] - 1
    v, page_table, full = dense_rows(v), dense_rows(page_table), full.contiguous()
    similar = torch.empty(n, dtype=torch.float32, device=v.device)
    _compare[(n,)](
        v, v_cache, full, full if adapt is None else adapt.contiguous(), positions, page_table, cu_rows, similar,
        v_scale, b, v.stride(0), page_table.stride(0), *v_cache.stride()[:2],
        v_cache.shape[1], heads * d, block_of(heads * d), offsets_block(b), adapt is not None,
        *heads_of(heads, d, v_scale), num_warps=4,
    )  # fmt: skip
    return least_of(similar, full, cu_rows, share)


def least_of(similar: Tensor, full: Tensor, cu_rows: Tensor, share: float) -> Tensor:
    """Flag the rows that are full, and those that `_least` chooses."""
    n, b = len(full), cu_rows.shape[0] - 1
    chosen = torch.empty(n, dtype=torch.bool, device=full.device)
    # A tensor: as an argument it would be rounded to fp32.
    exact = torch.full((1,), share, dtype=torch.float64, device=full.device)
    _least[(n,)](
        similar, full, exact, cu_rows, chosen, b,
        min(power_of_two(n, 16), RANKED), offsets_block(b), num_warps=4,
    )  # fmt: skip
    return chosen


@triton.jit
def _compare(
    v_ptr, cache_ptr, full_ptr, adapt_ptr, positions_ptr, table_ptr, cu_ptr, similar_ptr, scale_ptr,
    b, v_row, table_row, cache_page, cache_slot,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr, ADAPT: tl.constexpr,
    HEADS: tl.constexpr, SOME: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write similar = the cosine, -2 for NaN, and 2 for a row that does not adapt; write v to the cache."""
    row = tl.program_id(0).to(tl.int64)
    page, place = place_of(positions_ptr, table_ptr, cu_ptr, b, row, table_row, PAGE, OFFSETS)
    full = row < 0
    adapts = full
    if row < tl.load(cu_ptr + b):
        full = tl.load(full_ptr + row) != 0
        adapts = full == 0
        if ADAPT:
            adapts = adapts & (tl.load(adapt_ptr + row) != 0)
    if (page < 0) | ((full | adapts) == 0):
        tl.store(similar_ptr + row, 2.0)
        return
    slot = page * cache_page + place * cache_slot
    if scale_ptr is not None:
        scale_ptr += scales_at(page, place, PAGE, HEADS)
        row_ptr, slot_ptr = v_ptr + row * v_row, cache_ptr + slot
        dot, new_sum, old_sum = renew_scaled(row_ptr, slot_ptr, scale_ptr, PAGE, HEADS, SOME, D, WIDTH)
    else:
        dot, new_sum, old_sum = renew(v_ptr + row * v_row, cache_ptr + slot, SIZE, BLOCK)
    tl.store(similar_ptr + row, tl.where(adapts, ranked(dot, new_sum, old_sum), 2.0))


@triton.jit
def ranked(dot, new, old):
    """Cosine by which rows are ranked, -2 for NaN."""
    found = cosine_of(dot, new, old)
    return tl.where(found == found, found, -2.0)


@triton.jit
def _least(
    similar_ptr, full_ptr, share_ptr, cu_ptr, chosen_ptr, b, BLOCK: tl.constexpr, OFFSETS: tl.constexpr
):  # fmt: skip
    """Write chosen = full, or among the first share * n of the n rows of the sequence that adapt."""
    row = tl.program_id(0)
    if row >= tl.load(cu_ptr + b):
        tl.store(chosen_ptr + row, tl.full([], 0, tl.int1))
        return
    mine = tl.load(similar_ptr + row)
    if mine > 1.5:
        tl.store(chosen_ptr + row, tl.load(full_ptr + row) != 0)
        return
    s = owner_of(cu_ptr, b, row, OFFSETS)
    start, end = tl.load(cu_ptr + s), tl.load(cu_ptr + s + 1)
    before = tl.full([], 0, tl.int32)
    count = before
    for first in range(start, end, BLOCK):
        other = first + tl.arange(0, BLOCK)
        found = tl.load(similar_ptr + other, mask=other < end, other=2.0)
        count += tl.sum((found < 1.5).to(tl.int32))
        before += tl.sum(((found < mine) | ((found == mine) & (other < row))).to(tl.int32))
    most = tl.floor(tl.load(share_ptr) * count.to(tl.float64)).to(tl.int32)
    tl.store(chosen_ptr + row, before < most)
