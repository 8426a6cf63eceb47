"""dgraph::least_similar on CUDA: one kernel compares and writes each row, another counts the rows before it.

A row's rank is the number of rows of its sequence that come before it, which takes a comparison with each of them: few
rows adapt, and two launches cost less than sorting.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.triton.drift import cosine_of
from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block, owner_of, power_of_two

RANKED = 1024
"""Rows that a row is compared with at a time."""


def kernel(
    v: Tensor,
    v_cache: Tensor,
    full: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    share: float,
    adapt: Tensor | None = None,
) -> Tensor:
    """dgraph::least_similar; see its contract. Nothing is read on the host."""
    check_slots("least_similar", v_cache=v_cache)
    n, heads, d = v.shape
    chosen = torch.empty(n, dtype=torch.bool, device=v.device)
    if not n:
        return chosen
    b = cu_rows.shape[0] - 1
    v, page_table, full = dense_rows(v), dense_rows(page_table), full.contiguous()
    similar = torch.empty(n, dtype=torch.float32, device=v.device)
    # A tensor: as an argument it would be rounded to fp32.
    exact = torch.full((1,), share, dtype=torch.float64, device=v.device)
    _compare[(n,)](
        v, v_cache, full, full if adapt is None else adapt.contiguous(), positions, page_table, cu_rows, similar,
        b, v.stride(0), page_table.stride(0), *v_cache.stride()[:2],
        v_cache.shape[1], heads * d, power_of_two(heads * d, 16, 4096), offsets_block(b), adapt is not None,
        num_warps=4,
    )  # fmt: skip
    _least[(n,)](
        similar, full, exact, cu_rows, chosen, b,
        min(power_of_two(n, 16), RANKED), offsets_block(b), num_warps=4,
    )  # fmt: skip
    return chosen


@triton.jit
def _compare(
    v_ptr, cache_ptr, full_ptr, adapt_ptr, positions_ptr, table_ptr, cu_ptr, similar_ptr,
    b, v_row, table_row, cache_page, cache_slot,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr, ADAPT: tl.constexpr,
):  # fmt: skip
    """similar = the cosine, -2 for no number, and 2 for a row that does not adapt; writes v to the cache."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.full([], -1, tl.int64)
    position = page
    full = row < 0
    adapts = full
    if row < tl.load(cu_ptr + b):
        s = owner_of(cu_ptr, b, row, OFFSETS)
        position = tl.load(positions_ptr + row).to(tl.int64)
        page = tl.load(table_ptr + s.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
        full = tl.load(full_ptr + row) != 0
        adapts = full == 0
        if ADAPT:
            adapts = adapts & (tl.load(adapt_ptr + row) != 0)
    if (page < 0) | ((full | adapts) == 0):
        tl.store(similar_ptr + row, 2.0)
        return
    slot = page * cache_page + position % PAGE * cache_slot
    dot, new_sum, old_sum = 0.0, 0.0, 0.0
    for first in range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(v_ptr + row * v_row + at, mask=at < SIZE, other=0.0)
        new = value.to(tl.float32)
        old = tl.load(cache_ptr + slot + at, mask=at < SIZE, other=0.0).to(tl.float32)
        dot += tl.sum(new * old)
        new_sum += tl.sum(new * new)
        old_sum += tl.sum(old * old)
        tl.debug_barrier()  # a block narrower than the program is held by several threads: all have read it now
        tl.store(cache_ptr + slot + at, value, mask=at < SIZE)
    found = cosine_of(dot, new_sum, old_sum)
    found = tl.where(found == found, found, -2.0)
    tl.store(similar_ptr + row, tl.where(adapts, found, 2.0))


@triton.jit
def _least(
    similar_ptr, full_ptr, share_ptr, cu_ptr, chosen_ptr, b, BLOCK: tl.constexpr, OFFSETS: tl.constexpr
):  # fmt: skip
    """chosen = full, or among the first share * n of the n rows of the sequence that adapt."""
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
