"""dgraph::drift on CUDA: one program per row compares its context with its slot, and writes it there."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.selection.triton.compare_rows import block_of, cosine_of, place_of, renew
from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block


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
        c_cache.shape[1], heads * d, block_of(heads * d), offsets_block(b), num_warps=4,
    )  # fmt: skip
    return salient


@triton.jit
def drifted(dot, new, old, tau):
    """True if the cosine of a dot product and two squared norms is below tau; NaN counts as below any tau."""
    return (cosine_of(dot, new, old) >= tau) == 0


@triton.jit
def _drift(
    context_ptr, cache_ptr, full_ptr, positions_ptr, table_ptr, cu_ptr, salient_ptr,
    b, tau, context_row, table_row, cache_page, cache_slot,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    page, place = place_of(positions_ptr, table_ptr, cu_ptr, b, row, table_row, PAGE, OFFSETS)
    if page < 0:
        tl.store(salient_ptr + row, tl.full([], 0, tl.int1))
        return
    slot = page * cache_page + place * cache_slot
    dot, new_sum, old_sum = renew(context_ptr + row * context_row, cache_ptr + slot, SIZE, BLOCK)
    full = tl.load(full_ptr + row) != 0
    tl.store(salient_ptr + row, full | drifted(dot, new_sum, old_sum, tau))
