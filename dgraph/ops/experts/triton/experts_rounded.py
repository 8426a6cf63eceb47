"""Rows in 8 bits between and in the products of dgraph::experts, on CUDA.

Products are those of grouped.py where it takes them. Elsewhere they are as in eight_bits.py, with the tile for the
number of rows that an expert has if all have as many. One program has some rows of an expert's weight. It takes all
rows of x that go to this expert, a tile after the other.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.families.quantised import KINDS, WHOLE, QuantisedRows, QuantisedWeight
from dgraph.ops.experts.triton import grouped
from dgraph.ops.products.triton.activations import gated
from dgraph.ops.products.triton.eight_bits import IMPRECISE, TILES, sum_numbers
from dgraph.ops.products.triton.product import _rows_of_tile, _store
from dgraph.ops.products.triton.rows_quantise import ROUNDING, rounded
from dgraph.ops.products.triton.stored import tile_for
from dgraph.ops.triton.rows import power_of_two

TOGETHER = 2048
"""Values of gate that one program takes, unless a row has more."""


def multiply_grouped(x: QuantisedRows, weight: QuantisedWeight, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its weight -> [N, d_out] of the rows' dtype.

    Args:
        x: [N, d_in]; rows from ends[e - 1] on and up to ends[e] are multiplied by weight e.
        weight: a stack of weights of the same kind as x, with a scale for each row.
        ends: i32[E]; rows after the last end are not written.
    """
    if grouped.pays(x.values, weight.values):
        return grouped.multiply(x, weight, ends)
    (n, d_in), (experts, d_out) = x.shape, weight.shape[:2]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    tile = tile_for(-(-n // experts), TILES)
    values, numbers = (t if t.stride(-1) == 1 else t.contiguous() for t in (x.values, weight.values))
    scales = weight.scales.contiguous()
    high = d_out if weight.block[0] == WHOLE else weight.block[0]
    _multiply_group_numbers[(experts, triton.cdiv(d_out, tile.columns))](
        values, x.scales.contiguous(), numbers, scales, out, ends, d_out, d_in, values.stride(0), numbers.stride(0),
        numbers.stride(1), scales.stride(0), high, values.dtype == torch.int8, tile.rows, tile.columns, tile.depth,
        IMPRECISE, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def gate(both: Tensor, ends: Tensor, kind: str, silu: bool) -> QuantisedRows:
    """Compute act(gate) * up of [N, 2f], in the dtype of both, and round each row to a kind.

    Rows after the last end are not written. A program has whole rows: products are read once, and no more is written
    than numbers and scales.
    """
    n, f = both.shape[0], both.shape[1] // 2
    values = torch.empty((n, f), dtype=KINDS[kind].dtype, device=both.device)
    scales = torch.empty((n, 1), dtype=torch.float32, device=both.device)
    block = power_of_two(f, 16)
    some = max(1, TOGETHER // block)
    _gate_and_round_rows[(triton.cdiv(n, some),)](
        both, values, scales, ends, len(ends) - 1, both.stride(0), f, some, block, silu,
        values.dtype == torch.int8, KINDS[kind].reach, num_warps=4 if block <= 2048 else 8, **ROUNDING,
    )  # fmt: skip
    return QuantisedRows(values, scales, both.dtype)


@triton.jit
def _multiply_group_numbers(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, ends_ptr, d_out, d_in, x_row, w_item, w_row, s_item,
    HIGH: tl.constexpr, INTEGERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    IMPRECISE: tl.constexpr,
):  # fmt: skip
    """Multiply one expert's rows, a tile after the other, by some rows of its weight."""
    expert = tl.program_id(0)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    first = tl.program_id(1) * COLUMNS
    row = _rows_of_tile(first, d_out, COLUMNS, COLUMNS)
    w_at = w_ptr + expert.to(tl.int64) * w_item + row.to(tl.int64) * w_row
    by = tl.load(w_scale_ptr + expert.to(tl.int64) * s_item + row // HIGH)
    for r in range(begin, end, ROWS):
        x_rows = r + tl.arange(0, ROWS)
        read = tl.minimum(x_rows, end - 1)
        x_at = x_ptr + read.to(tl.int64) * x_row
        acc = sum_numbers(x_at, w_at, d_in, INTEGERS, ROWS, COLUMNS, DEPTH, IMPRECISE)
        found = acc.to(tl.float32) * tl.load(x_scale_ptr + read)[None, :] * by[:, None]
        _store(out_ptr, out_ptr, found.T, x_rows, first, end, d_out, ROWS, COLUMNS, False, False)


@triton.jit
def gated_rows(both_ptr, row, column, mask, both_row, SIZE: tl.constexpr, SILU: tl.constexpr):
    """Compute act(gate) * up of some rows and columns, in f32; zeros outside of the mask."""
    at = both_ptr + row.to(tl.int64)[:, None] * both_row + column[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=mask, other=0.0).to(tl.float32)
    return gated(gate, up, SILU)


@triton.jit(do_not_specialize=["last"])
def _gate_and_round_rows(
    both_ptr, values_ptr, scales_ptr, ends_ptr, last, both_row, SIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SILU: tl.constexpr, INTEGERS: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Gate and round whole rows before the last bound."""
    first, end = tl.program_id(0) * ROWS, tl.load(ends_ptr + last)
    if first >= end:
        return
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (row < end)[:, None] & (column < SIZE)[None, :]
    found = gated_rows(both_ptr, row, column, mask, both_row, SIZE, SILU).to(both_ptr.dtype.element_ty).to(tl.float32)
    numbers, scale = rounded(found, ROWS, INTEGERS, REACH)
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(values_ptr + at, numbers.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + row, scale, mask=row < end)
