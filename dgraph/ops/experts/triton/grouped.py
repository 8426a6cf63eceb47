"""Products of rows and the weight of their group, on CUDA, with or without the activation of a gated unit.

A group is the rows of an expert. One program computes COLUMNS columns of the result for all rows of a group, a tile of
ROWS after the other. It reads its part of the weight once if the rows fit into one tile. The weight is the left factor,
so that a tile may have few rows. Both factors are loaded by the bulk copy engine; results of a tile for rows of the
next group are not stored. With few rows, reading the weights takes all the time. The library's product reads them at
seven tenths of the speed (benchmarks/results/experts.md).

Both factors may be numbers of 8 bits. Their sums (int32 of int8, fp32 of float8) are scaled by the row's scale, then by
the weight's. Matrix units add up products of float8 in fewer bits than fp32 has. So the sums of each iteration are
added up outside of them.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgraph.families.quantised import WHOLE, QuantisedRows, QuantisedWeight
from dgraph.ops.products.triton.activations import gated
from dgraph.ops.products.triton.stored import Tile, tile_for

TILES = (
    Tile(8, 16, 128, 64, 4, 6),
    Tile(24, 32, 128, 128, 4, 4),
    Tile(48, 64, 256, 64, 8, 4),
    Tile(192, 256, 128, 64, 8, 4),
)
"""Tiles by rising number of rows of a group, if all have as many; the best for both products of 19 timed on an H200.
For more rows than those of the last tile the library's product is faster.
"""
TILES_OF_UNITS = (Tile(8, 16, 128, 128, 4, 4), *TILES[1:])
"""Tiles of gate and up as one product, of whose columns each has half. They are within 2 % of the best of 12 timed on
an H100 with 2 to 32 rows of a group.
"""
TILES_OF_NUMBERS = (
    Tile(8, 16, 128, 128, 4, 6),
    Tile(24, 32, 128, 128, 4, 5),
    Tile(96, 64, 128, 128, 4, 4),
    Tile(384, 128, 128, 256, 8, 3),
)
"""Tiles of numbers of 8 bits: up to 16 rows of a group the best of 20 timed on an H200. For 64 to 256 rows, one tile
serves both products, at up to 1.33 times the best time of either.
"""


def pays(x: Tensor, weight: Tensor) -> bool:
    """True if the kernel takes rows [N, d_in] and weights [E, d_out, d_in], or the numbers of both, and is fast.

    The rows must be few enough, and layouts and device such that the kernel takes them.
    """
    if len(x) > tiles(x)[-1].up_to * len(weight):
        return False
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    if x.device.type == "cpu" and x.element_size() not in (1, 4):  # Triton's interpreter takes bf16 for integers
        return False
    aligned = all(t.data_ptr() % 16 == 0 and t.is_contiguous() for t in (x, weight))
    return aligned and x.dtype == weight.dtype and x.shape[1] * x.element_size() % 16 == 0


def tiles(x: Tensor) -> tuple[Tile, ...]:
    """Tiles for rows of this dtype, by number of rows of a group."""
    return TILES_OF_NUMBERS if x.element_size() == 1 else TILES


def multiply(
    x: Tensor | QuantisedRows, weight: Tensor | QuantisedWeight, ends: Tensor, tile: Tile | None = None
) -> Tensor:
    """Multiply the rows of each group by its weight -> [N, d_out].

    Args:
        x, weight: [N, d_in] and [E, d_out, d_in]; both plain, or both 8-bit numbers of one kind with a scale per row.
        ends: i32[E]; rows from ends[e - 1] on and up to ends[e] are multiplied by weight e. Rows after the last end are
            not written.
        tile: overrides the tile for the number of rows; without it there must be one for them (see `pays`).
    """
    (n, d_in), (groups, d_out, _) = x.shape, weight.shape
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    scales, by, high = out, out, 0
    if isinstance(x, QuantisedRows):
        assert isinstance(weight, QuantisedWeight)
        scales, by = x.scales.contiguous(), weight.scales.contiguous()
        high = d_out if weight.block[0] == WHOLE else weight.block[0]
        x, weight = x.values, weight.values
    assert isinstance(weight, Tensor)
    tile = tile or tile_for(-(-n // groups), tiles(x))
    flat = weight.view(groups * d_out, d_in)
    rows = TensorDescriptor(x, [n, d_in], [d_in, 1], [tile.rows, tile.depth])
    columns = TensorDescriptor(flat, list(flat.shape), [d_in, 1], [tile.columns, tile.depth])
    _multiply_rows_of_groups[(triton.cdiv(d_out, tile.columns), groups)](
        rows, columns, scales, by, out, ends, d_out, d_in, high, tile.rows, tile.columns, tile.depth,
        "ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def multiply_units(x: Tensor, weight: Tensor, ends: Tensor, silu: bool, tile: Tile | None = None) -> Tensor:
    """Compute act(gate) * up of the same product [N, 2f], of plain rows and weights -> [N, f].

    The weights [E, 2f, d_in] have gate's rows before those of up. A tile has half of its columns from either.
    """
    (n, d_in), (groups, both, _) = x.shape, weight.shape
    size = both // 2
    out = torch.empty((n, size), dtype=x.dtype, device=x.device)
    tile = tile or tile_for(-(-n // groups), TILES_OF_UNITS)
    flat, half = weight.view(groups * both, d_in), tile.columns // 2
    rows = TensorDescriptor(x, [n, d_in], [d_in, 1], [tile.rows, tile.depth])
    columns = TensorDescriptor(flat, list(flat.shape), [d_in, 1], [half, tile.depth])
    _multiply_units_of_groups[(triton.cdiv(size, half), groups)](
        rows, columns, out, ends, size, d_in, silu, tile.rows, half, tile.depth,
        "ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _multiply_rows_of_groups(
    x_blocks, w_blocks, x_scale_ptr, w_scale_ptr, out_ptr, ends_ptr, d_out, d_in,
    HIGH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of a group. HIGH: rows of the weight that share a scale; 0 without scales."""
    SUMS: tl.constexpr = tl.int32 if x_blocks.dtype.is_int() else tl.float32
    first, group = tl.program_id(0) * COLUMNS, tl.program_id(1)
    begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    column = first + tl.arange(0, COLUMNS)
    for r in range(begin, end, ROWS):
        row = r + tl.arange(0, ROWS)
        acc = tl.zeros([COLUMNS, ROWS], SUMS)
        for k in range(0, d_in, DEPTH):
            w = w_blocks.load([group * d_out + first, k])
            x = x_blocks.load([r, k])
            # Triton adds products of float8 to acc in fp32; with others it lets the matrix units go on from acc. If
            # max_num_imprecise_acc tells it to do the former, most instructions wait for the one before.
            acc += tl.dot(w, x.T, input_precision=PRECISION, out_dtype=SUMS)
        if HIGH > 0:
            by = w_scale_ptr + group * tl.cdiv(d_out, HIGH) + column // HIGH
            acc = acc.to(tl.float32) * tl.load(x_scale_ptr + row, mask=row < end, other=0.0)[None, :]
            acc *= tl.load(by, mask=column < d_out, other=0.0)[:, None]
        at = row.to(tl.int64)[:, None] * d_out + column[None, :]
        inside = (row < end)[:, None] & (column < d_out)[None, :]
        tl.store(out_ptr + at, acc.T.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_units_of_groups(
    x_blocks, w_blocks, out_ptr, ends_ptr, size, d_in,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply and gate the rows of a group. COLUMNS: columns of the result, each from a row of gate and one of up."""
    first, group = tl.program_id(0) * COLUMNS, tl.program_id(1)
    begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    at_gate = group * 2 * size + first
    column = first + tl.arange(0, COLUMNS)
    for r in range(begin, end, ROWS):
        row = r + tl.arange(0, ROWS)
        gate, up = tl.zeros([COLUMNS, ROWS], tl.float32), tl.zeros([COLUMNS, ROWS], tl.float32)
        for k in range(0, d_in, DEPTH):
            x = x_blocks.load([r, k]).T
            gate = tl.dot(w_blocks.load([at_gate, k]), x, gate, input_precision=PRECISION)
            up = tl.dot(w_blocks.load([at_gate + size, k]), x, up, input_precision=PRECISION)
        found = gated(gate, up, SILU).T
        inside = (row < end)[:, None] & (column < size)[None, :]
        at = row.to(tl.int64)[:, None] * size + column[None, :]
        tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=inside)
