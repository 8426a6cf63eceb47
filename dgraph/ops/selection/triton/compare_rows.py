"""dgraph::compare_rows on CUDA: one program per row adds up the sums of its cosine, and writes it to its slot."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.kv.triton.scales import check_scales, heads_of, load_scaled, quantised, scales_at
from dgraph.ops.triton.rows import check_slots, dense_rows, offsets_block, owner_of, power_of_two


def kernel(
    new: Tensor,
    cache: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    only: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """dgraph::compare_rows; see its contract."""
    (n, heads, d), b = new.shape, cu_rows.shape[0] - 1
    check_slots("compare_rows", cache=cache)
    check_scales("compare_rows", cache=(cache, scale))
    sums = torch.empty((n, 3), dtype=torch.float32, device=new.device)
    if not n:
        return sums
    new, page_table = dense_rows(new), dense_rows(page_table)
    _sum_rows[(n,)](
        new, cache, sums if only is None else only.contiguous(), positions, page_table, cu_rows, sums, scale,
        b, new.stride(0), page_table.stride(0), *cache.stride()[:2],
        cache.shape[1], heads * d, block_of(heads * d), offsets_block(b), only is not None,
        *heads_of(heads, d, scale), num_warps=4,
    )  # fmt: skip
    return sums


def block_of(size: int) -> int:
    """Values of a row that a program reads at once."""
    return power_of_two(size, 16, 4096)


@triton.jit
def place_of(
    positions_ptr, table_ptr, cu_ptr, b, row, table_row, PAGE: tl.constexpr, OFFSETS: tl.constexpr
):  # fmt: skip
    """Page and place of a row in a paged cache; page -1 for a padding row, and for one whose position has no page."""
    page = tl.full([], -1, tl.int64)
    place = page
    if row < tl.load(cu_ptr + b):
        s = owner_of(cu_ptr, b, row, OFFSETS)
        position = tl.load(positions_ptr + row).to(tl.int64)
        page = tl.load(table_ptr + s.to(tl.int64) * table_row + position // PAGE).to(tl.int64)
        place = position % PAGE
    return page, place


@triton.jit
def renew(row_ptr, slot_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the product of a row with its slot, the square of the row and that of the slot, which then takes the row."""
    dot, new_sum, old_sum = 0.0, 0.0, 0.0
    for first in range(0, SIZE, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(row_ptr + at, mask=at < SIZE, other=0.0)
        new = value.to(tl.float32)
        old = tl.load(slot_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
        dot += tl.sum(new * old)
        new_sum += tl.sum(new * new)
        old_sum += tl.sum(old * old)
        tl.debug_barrier()  # a block narrower than the program is held by several threads: all have read it now
        tl.store(slot_ptr + at, value, mask=at < SIZE)
    return dot, new_sum, old_sum


@triton.jit
def renew_scaled(
    row_ptr, slot_ptr, scale_ptr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, SOME: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Do the same for a slot in float8: the vectors that it holds, and then takes, are rounded and scaled."""
    dot, new_sum, old_sum = 0.0, 0.0, 0.0
    for first in range(0, HEADS, SOME):
        head, d = first + tl.arange(0, SOME), tl.arange(0, WIDTH)
        at, inside = head[:, None] * D + d[None, :], (head < HEADS)[:, None] & (d < D)[None, :]
        new = tl.load(row_ptr + at, mask=inside, other=0.0).to(tl.float32)
        old = load_scaled(slot_ptr, scale_ptr, first >= 0, first, PAGE, HEADS, SOME, D, WIDTH)
        dot += tl.sum(new * old)
        new_sum += tl.sum(new * new)
        old_sum += tl.sum(old * old)
        stored, scale = quantised(new)
        tl.debug_barrier()  # as in `renew`
        tl.store(slot_ptr + at, stored.to(slot_ptr.dtype.element_ty), mask=inside)
        tl.store(scale_ptr + head * PAGE, scale, mask=head < HEADS)
    return dot, new_sum, old_sum


@triton.jit
def cosine_of(dot, new, old):
    """Cosine from a dot product and two squared norms; it may be NaN."""
    norms = tl.sqrt_rn(new) * tl.sqrt_rn(old)
    empty = tl.where((new == 0) & (old == 0), 1.0, 0.0)
    found = tl.where(norms == 0, empty, dot / tl.where(norms == 0, 1.0, norms))
    return tl.where(found > 1.0, 1.0, tl.where(found < -1.0, -1.0, found))


@triton.jit
def _sum_rows(
    new_ptr, cache_ptr, only_ptr, positions_ptr, table_ptr, cu_ptr, sums_ptr, scale_ptr,
    b, new_row, table_row, cache_page, cache_slot,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr, ONLY: tl.constexpr,
    HEADS: tl.constexpr, SOME: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    page, place = place_of(positions_ptr, table_ptr, cu_ptr, b, row, table_row, PAGE, OFFSETS)
    if ONLY:  # noqa: SIM102
        if page >= 0:
            page = tl.where(tl.load(only_ptr + row) != 0, page, -1)
    dot, new_sum, old_sum = 0.0, 0.0, 0.0
    if page >= 0:
        slot = page * cache_page + place * cache_slot
        if scale_ptr is not None:
            scale_ptr += scales_at(page, place, PAGE, HEADS)
            dot, new_sum, old_sum = renew_scaled(
                new_ptr + row * new_row, cache_ptr + slot, scale_ptr, PAGE, HEADS, SOME, D, WIDTH
            )
        else:
            dot, new_sum, old_sum = renew(new_ptr + row * new_row, cache_ptr + slot, SIZE, BLOCK)
    tl.store(sums_ptr + 3 * row, dot)
    tl.store(sums_ptr + 3 * row + 1, new_sum)
    tl.store(sums_ptr + 3 * row + 2, old_sum)
