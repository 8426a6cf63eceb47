"""dgraph::drift on CUDA: one program per row compares its context with its slot, and writes it there."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block, owner_of, power_of_two


def kernel(
    context: Tensor,
    c_cache: Tensor,
    full: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    tau: float,
) -> Tensor:
    """dgraph::drift; see its contract."""
    (n, heads, d), b = context.shape, cu_rows.shape[0] - 1
    check_slots("drift", c_cache=c_cache)
    salient = torch.empty(n, dtype=torch.bool, device=context.device)
    if not n:
        return salient
    context, page_table = dense_rows(context), dense_rows(page_table)
    _drift[(n,)](
        context, c_cache, full.contiguous(), positions, page_table, cu_rows, salient,
        b, tau, context.stride(0), page_table.stride(0), *c_cache.stride()[:2],
        c_cache.shape[1], heads * d, power_of_two(heads * d, 16, 4096), offsets_block(b), num_warps=4,
    )  # fmt: skip
    return salient


@triton.jit
def cosine_of(dot, new, old):
    """The cosine, from a dot product and two squared norms; it may be no number."""
    norms = tl.sqrt_rn(new) * tl.sqrt_rn(old)
    empty = tl.where((new == 0) & (old == 0), 1.0, 0.0)
    found = tl.where(norms == 0, empty, dot / tl.where(norms == 0, 1.0, norms))
    return tl.where(found > 1.0, 1.0, tl.where(found < -1.0, -1.0, found))


@triton.jit
def drifted(dot, new, old, tau):
    """Whether the cosine is below tau, from a dot product and two squared norms; no number is below anything."""
    return (cosine_of(dot, new, old) >= tau) == 0


@triton.jit
def _drift(
    context_ptr, cache_ptr, full_ptr, positions_ptr, table_ptr, cu_ptr, salient_ptr,
    b, tau, context_row, table_row, cache_page, cache_slot,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    page = tl.full([], -1, tl.int64)
    position = page
    if row < tl.load(cu_ptr + b):
        s = owner_of(cu_ptr, b, row, OFFSETS)
        position = tl.load(positions_ptr + row).to(tl.int64)
        page = tl.load(table_ptr + s.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
    if page < 0:
        tl.store(salient_ptr + row, tl.full([], 0, tl.int1))
        return
    slot = page * cache_page + position % PAGE * cache_slot
    dot, new_sum, old_sum = 0.0, 0.0, 0.0
    for first in range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(context_ptr + row * context_row + at, mask=at < SIZE, other=0.0)
        new = value.to(tl.float32)
        old = tl.load(cache_ptr + slot + at, mask=at < SIZE, other=0.0).to(tl.float32)
        dot += tl.sum(new * old)
        new_sum += tl.sum(new * new)
        old_sum += tl.sum(old * old)
        tl.debug_barrier()  # a block narrower than the program is held by several threads: all have read it now
        tl.store(cache_ptr + slot + at, value, mask=at < SIZE)
    full = tl.load(full_ptr + row) != 0
    tl.store(salient_ptr + row, full | drifted(dot, new_sum, old_sum, tau))
