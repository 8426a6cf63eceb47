"""Products by quantised weights on CUDA: what is stored of a weight is dequantised in registers.

One program computes a tile: ROWS rows of x by COLUMNS rows of the weight. The weight is the left factor, whose numbers
come from registers, and x the right one, of as few rows as there are. Where a scale is of a whole row of the weight,
numbers are multiplied as they are and the sums scaled; where it is of a group of columns that a tile's iterations end
with, the sums of an iteration; otherwise each number. In a PAIR a tile takes COLUMNS / 2 rows of gate and as many of up
(see product.py).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.triton.product import _live_rows, _store
from dgraph.quantised import WHOLE, QuantisedWeight

OF_ROWS, OF_GROUPS, OF_NUMBERS = 0, 1, 2
"""What is scaled: sums, sums of an iteration, or numbers before they are multiplied."""


@dataclass(frozen=True)
class Tile:
    """Sizes of a tile, and of what computes it.

    Attributes:
        up_to: the largest number of rows of x that takes it.
        rows, columns: of the result; columns are rows of the weight.
        depth: inner values per iteration.
        warps, stages: of a program, and iterations in flight.
    """

    up_to: int
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = (
    Tile(16, 16, 64, 128, 4, 4),
    Tile(32, 32, 64, 128, 4, 4),
    Tile(64, 64, 64, 128, 4, 4),
    Tile(2**31 - 1, 128, 128, 64, 8, 3),
)
"""By rising number of rows; not yet chosen by timing."""


def tile_for(rows: int) -> Tile:
    """The tile for so many rows of x."""
    return next(tile for tile in TILES if rows <= tile.up_to)


def launch(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    cu_rows: Tensor | None,
    pair: bool = False,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The product of x [N, d_in] and a quantised weight; of a pair silu(gate) * up.

    Args:
        cu_rows: the last entry says how many rows are live, on the device; the others are not written. None: all.
        tile: in place of that for so many rows.
        out: where the result goes, contiguous; None: new memory.
    """
    (n, d_in), d_out = x.shape, weight.shape[0] // 2 if pair else weight.shape[0]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device) if out is None else out
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = tile or tile_for(n)
    wide = tile.columns // 2 if pair else tile.columns
    values, scales, high, group, scaled, four = layout_of(weight, tile.depth)
    zeros = scales if weight.zeros is None else weight.zeros.contiguous()
    count = x if cu_rows is None else cu_rows
    grid = (triton.cdiv(n, tile.rows) * triton.cdiv(d_out, wide),)
    _multiply_stored[grid](
        x, values, scales, zeros, x if bias is None else bias, out, count,
        0 if cu_rows is None else cu_rows.shape[0] - 1, n, d_out, d_in, x.stride(0), values.stride(0), scales.stride(0),
        high, group, scaled, four, weight.zeros is not None, bias is not None, cu_rows is not None, pair,
        tile.rows, tile.columns, tile.depth, "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def layout_of(weight: QuantisedWeight, depth: int) -> tuple[Tensor, Tensor, int, int, int, bool]:
    """Values and scales as the kernel reads them, rows and columns of a block, what is scaled, and whether numbers are
    of 4 bits.
    """
    high, group = weight.block
    rows, columns = weight.shape[-2:]
    high, group = (rows if high == WHOLE else high), (columns if group == WHOLE else group)
    grouped = OF_GROUPS if group % depth == 0 else OF_NUMBERS
    scaled = OF_ROWS if weight.scales.shape[-1] == 1 else grouped
    values = weight.values if weight.values.stride(-1) == 1 else weight.values.contiguous()
    return values, weight.scales.contiguous(), high, group, scaled, values.dtype == torch.uint8


@triton.jit
def _numbers(
    v_ptr, z_ptr, row, live, k, d_in, v_row, s_row, HIGH: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    ZEROS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """f32 numbers of rows of the weight, k and those after it, from which zeros are taken."""
    column = k + tl.arange(0, DEPTH)
    if FOUR:
        pairs = k // 2 + tl.arange(0, DEPTH // 2)
        at = row.to(tl.int64)[:, None] * v_row + pairs[None, :]
        both = tl.load(v_ptr + at, mask=live[:, None] & (pairs < d_in // 2)[None, :], other=136)
        found = tl.join((both & 15).to(tl.float32), (both >> 4).to(tl.float32)).reshape(COLUMNS, DEPTH)
    else:
        at = row.to(tl.int64)[:, None] * v_row + column[None, :]
        found = tl.load(v_ptr + at, mask=live[:, None] & (column < d_in)[None, :], other=0.0).to(tl.float32)
    if ZEROS:
        place = (row // HIGH).to(tl.int64)[:, None] * s_row + (column // GROUP)[None, :]
        zero = tl.load(z_ptr + place, mask=live[:, None] & (column < d_in)[None, :], other=0.0)
        found = tl.where((column < d_in)[None, :], found - zero, 0.0)
    elif FOUR:
        found -= 8.0
    return found


@triton.jit
def _tile(
    x_ptr, v_ptr, s_ptr, z_ptr, row, live, x_rows, x_live, d_in, x_row, v_row, s_row,
    HIGH: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """f32 sums [COLUMNS, ROWS] of some rows of the weight and of x."""
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for k in range(0, d_in, DEPTH):
        column = k + tl.arange(0, DEPTH)
        at = x_rows.to(tl.int64)[:, None] * x_row + column[None, :]
        x = tl.load(x_ptr + at, mask=x_live[:, None] & (column < d_in)[None, :], other=0.0)
        w = _numbers(v_ptr, z_ptr, row, live, k, d_in, v_row, s_row, HIGH, GROUP, FOUR, ZEROS, COLUMNS, DEPTH)
        if SCALED == 2:
            place = (row // HIGH).to(tl.int64)[:, None] * s_row + (column // GROUP)[None, :]
            w *= tl.load(s_ptr + place, mask=live[:, None] & (column < d_in)[None, :], other=0.0)
        part = tl.dot(w.to(x.dtype), x.T, input_precision=PRECISION)
        if SCALED == 1:
            scale = tl.load(s_ptr + (row // HIGH).to(tl.int64) * s_row + k // GROUP, mask=live, other=0.0)
            part *= scale[:, None]
        acc += part
    if SCALED == 0:
        acc *= tl.load(s_ptr + (row // HIGH).to(tl.int64) * s_row, mask=live, other=0.0)[:, None]
    return acc


@triton.jit(do_not_specialize=["b", "n"])
def _multiply_stored(
    x_ptr, v_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, cu_ptr, b, n, d_out, d_in, x_row, v_row, s_row,
    HIGH: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, COUNTED: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    rows = _live_rows(cu_ptr, b, n) if COUNTED else n
    along = tl.cdiv(d_out, WIDE)
    r, first = tl.program_id(0) // along * ROWS, tl.program_id(0) % along * WIDE
    if r >= rows:
        return
    place = tl.arange(0, COLUMNS)
    inside = first + place % WIDE
    row, live = inside + place // WIDE * d_out, inside < d_out
    x_rows = r + tl.arange(0, ROWS)
    acc = _tile(
        x_ptr, v_ptr, s_ptr, z_ptr, row, live, x_rows, x_rows < rows, d_in, x_row, v_row, s_row,
        HIGH, GROUP, SCALED, FOUR, ZEROS, ROWS, COLUMNS, DEPTH, PRECISION,
    )  # fmt: skip
    _store(out_ptr, bias_ptr, acc.T, x_rows, first, rows, d_out, ROWS, COLUMNS, BIAS, PAIR)


def multiply_grouped(x: Tensor, weight: QuantisedWeight, ends: Tensor) -> Tensor:
    """x [N, d_in], whose rows up to ends[e] and from ends[e - 1] on are of weight e, by a stack of quantised weights
    -> [N, d_out]; rows after the last end are not written.
    """
    n, d_out = x.shape[0], weight.shape[1]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    tile = tile_for(-(-n // len(weight)))
    values, scales, high, group, scaled, four = layout_of(weight, tile.depth)
    zeros = scales if weight.zeros is None else weight.zeros.contiguous()
    _multiply_group[(len(weight), triton.cdiv(d_out, tile.columns))](
        x, values, scales, zeros, out, ends, d_out, x.shape[1], x.stride(0), values.stride(0), values.stride(1),
        scales.stride(0), scales.stride(1), high, group, scaled, four, weight.zeros is not None,
        tile.rows, tile.columns, tile.depth, "ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _multiply_group(
    x_ptr, v_ptr, s_ptr, z_ptr, out_ptr, ends_ptr, d_out, d_in, x_row, v_item, v_row, s_item, s_row,
    HIGH: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One expert's rows, a tile after the other, by some rows of its weight."""
    expert = tl.program_id(0)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    item, first = expert.to(tl.int64), tl.program_id(1) * COLUMNS
    row = first + tl.arange(0, COLUMNS)
    for r in range(begin, end, ROWS):
        x_rows = r + tl.arange(0, ROWS)
        acc = _tile(
            x_ptr, v_ptr + item * v_item, s_ptr + item * s_item, z_ptr + item * s_item, row, row < d_out,
            x_rows, x_rows < end, d_in, x_row, v_row, s_row,
            HIGH, GROUP, SCALED, FOUR, ZEROS, ROWS, COLUMNS, DEPTH, PRECISION,
        )  # fmt: skip
        _store(out_ptr, out_ptr, acc.T, x_rows, first, end, d_out, ROWS, COLUMNS, False, False)
