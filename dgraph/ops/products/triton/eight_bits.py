"""Products of rows and weights that are both 8-bit numbers, on CUDA: the matrix units multiply them as they are.

One program computes a tile, as in stored.py: ROWS rows of x by COLUMNS rows of the weight, which is the left factor.
Sums are in int32 of int8, and in fp32 of float8, of which matrix units add up at most IMPRECISE products in fewer bits.
They are scaled by the row's scale, then by the weight's. In a PAIR a tile takes COLUMNS / 2 rows of gate and as many of
up (see product.py).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.families.quantised import WHOLE, QuantisedRows, QuantisedWeight
from dgraph.ops.attention.triton.attention_tiling import multiprocessors
from dgraph.ops.products.triton import product_cases, product_roles
from dgraph.ops.products.triton.product import _corner, _live_rows, _rows_of_tile, _store
from dgraph.ops.products.triton.stored import Tile, tile_for

TILES = (
    Tile(16, 16, 64, 256, 4, 4),
    Tile(32, 32, 64, 256, 4, 4),
    Tile(64, 64, 128, 128, 4, 4),
    Tile(2**31 - 1, 128, 128, 128, 8, 4),
)
"""Tiles by rising number of rows; not yet chosen by timing."""
IMPRECISE = 128
"""Products of float8 that are summed in the bits of the matrix units; no more than a tile is deep."""
GROUP = 8
"""Tiles over rows that run side by side on one part of the weight."""


def launch(
    x: QuantisedRows,
    weight: QuantisedWeight,
    bias: Tensor | None,
    cu_rows: Tensor | None,
    pair: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply rows [N, d_in] by a weight of the same kind; a pair gives silu(gate) * up.

    Args:
        cu_rows: its last entry is the number of live rows, on the device; the others are not written. None: all are.
        tile: overrides the tile for the number of rows.

    Returns:
        [N, d_out] of the rows' dtype.
    """
    (n, d_in), d_out = x.shape, weight.shape[0] // 2 if pair else weight.shape[0]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    values, numbers = (t if t.stride(1) == 1 else t.contiguous() for t in (x.values, weight.values))
    scales, by = x.scales.contiguous(), weight.scales.contiguous()
    high = len(weight) if weight.block[0] == WHOLE else weight.block[0]
    if tile is None and product_roles.fits(values, numbers):
        choices = product_cases.cases(pair, itemsize=1, most=n)
        programs = multiprocessors(x.device)
        product_roles.launch(values, numbers, bias, cu_rows, out, choices, programs, GROUP, pair, (scales, by, high))
        return out
    tile = tile or tile_for(n, TILES)
    grid = (triton.cdiv(n, tile.rows) * triton.cdiv(d_out, tile.columns // 2 if pair else tile.columns),)
    _multiply_numbers[grid](
        values, scales, numbers, by, scales if bias is None else bias, out,
        scales if cu_rows is None else cu_rows, 0 if cu_rows is None else cu_rows.shape[0] - 1, n, d_out, d_in,
        values.stride(0), numbers.stride(0), high, values.dtype == torch.int8, bias is not None, cu_rows is not None,
        pair, tile.rows, tile.columns, tile.depth, IMPRECISE, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["b", "n"])
def _multiply_numbers(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, cu_ptr, b, n, d_out, d_in, x_row, w_row,
    HIGH: tl.constexpr, INTEGERS: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IMPRECISE: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    rows = _live_rows(cu_ptr, b, n) if COUNTED else n
    r, first = _corner(tl.program_id(0), d_out, ROWS, WIDE)
    if r >= rows:
        return
    row, x_rows = _rows_of_tile(first, d_out, COLUMNS, WIDE), r + tl.arange(0, ROWS)
    read = tl.minimum(x_rows, rows - 1)
    x_at, w_at = x_ptr + read.to(tl.int64) * x_row, w_ptr + row.to(tl.int64) * w_row
    acc = sum_numbers(x_at, w_at, d_in, INTEGERS, ROWS, COLUMNS, DEPTH, IMPRECISE)
    found = acc.to(tl.float32) * tl.load(x_scale_ptr + read)[None, :]
    found *= tl.load(w_scale_ptr + row // HIGH)[:, None]
    _store(out_ptr, bias_ptr, found.T, x_rows, first, rows, d_out, ROWS, COLUMNS, BIAS, PAIR)


@triton.jit
def sum_numbers(
    x_at, w_at, d_in, INTEGERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    IMPRECISE: tl.constexpr,
):  # fmt: skip
    """Sum the products of COLUMNS rows of a weight and ROWS rows of x, unscaled; x_at, w_at: where each row begins."""
    acc = tl.zeros([COLUMNS, ROWS], tl.int32 if INTEGERS else tl.float32)
    for k in range(0, d_in, DEPTH):
        column = k + tl.arange(0, DEPTH)
        there = (column < d_in)[None, :]
        x = tl.load(x_at[:, None] + column[None, :], mask=there, other=0.0)
        w = tl.load(w_at[:, None] + column[None, :], mask=there, other=0.0)
        if INTEGERS:
            acc = tl.dot(w, x.T, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(w, x.T, acc, max_num_imprecise_acc=IMPRECISE)
    return acc
