"""Products by quantised weights on CUDA, which are dequantised in registers.

One program computes a tile: ROWS rows of x by COLUMNS rows of the weight. If tiles are fewer than the device can work
on at a time, it computes a share of one along the inner dimension. The last to end adds the shares up. The weight is
the left factor, whose numbers come from registers, and x the right one, of as few rows as there are. Where a scale is
of a whole row of the weight, numbers are multiplied as they are and the sums scaled. Where it is of a group of columns
that a tile's iterations end with, the sums of an iteration are scaled, otherwise each number. In a PAIR a tile takes
COLUMNS / 2 rows of gate and as many of up (see product.py).

Rows of the weight beyond the last one are read as the last one is, and their results are not written.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.families.quantised import WHOLE, QuantisedWeight
from dgraph.ops.attention.triton.attention_tiling import multiprocessors
from dgraph.ops.counters import zeros
from dgraph.ops.products.stored import dequantised_first
from dgraph.ops.products.triton.product import _corner, _live_rows, _rows_of_tile, _store
from dgraph.ops.products.triton.words import kind_of, multiply_words

OF_ROWS, OF_GROUPS, OF_NUMBERS = 0, 1, 2
"""Values that are scaled: sums, sums of an iteration, or numbers before they are multiplied."""


@dataclass(frozen=True)
class Tile:
    """Sizes of a tile, and of the program that computes it.

    Attributes:
        up_to: the largest number of rows of x that takes it.
        rows, columns: size in the result; columns are rows of the weight.
        depth: inner values per iteration.
        warps, stages: warps of a program, and iterations in flight.
        programs: programs of a multiprocessor, among which fewer tiles are shared; 0: tiles are not shared.
    """

    up_to: int
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int = 0


TILES = (
    Tile(16, 16, 128, 128, 4, 4, 4),
    Tile(32, 32, 64, 128, 4, 4, 4),
    Tile(64, 64, 128, 128, 4, 4, 4),
    Tile(2**31 - 1, 64, 128, 128, 4, 3),
)
"""Tiles by rising number of rows; chosen by timing of 15 on an H200, that of 32 rows without another beside it."""
SHARES, LEAST = 8, 4
"""Shares of a tile at most, and iterations of a share at least."""


def tile_for(rows: int, tiles: Sequence[Tile] = TILES) -> Tile:
    """Choose the tile for a number of rows of x."""
    return next(tile for tile in tiles if rows <= tile.up_to)


@dataclass(frozen=True)
class Layout:
    """A weight as the kernels read it.

    Attributes:
        values: as they are stored, or, where kernels unpack these, their words of 32 bits; columns lie side by side.
        scales, zeros: f32 [..., blocks of rows, blocks of columns]; zeros are the scales if the weight has no zeros.
        high, group: rows and columns of a block.
        scaled: OF_ROWS, OF_GROUPS or OF_NUMBERS, the values that are scaled.
        words: kind of numbers that words hold (words.py); 0: values are no words.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    high: int
    group: int
    scaled: int
    words: int

    @classmethod
    def of(cls, weight: QuantisedWeight, depth: int, dtype: torch.dtype) -> Layout:
        """Lay a weight out for iterations over `depth` values, and a product in `dtype`."""
        high, group = weight.block
        rows, columns = weight.shape[-2:]
        high, group = (rows if high == WHOLE else high), (columns if group == WHOLE else group)
        wide = weight.zeros is not None and dtype == torch.float16  # which a number less its zero may be too large for
        grouped = OF_GROUPS if group % depth == 0 and not wide else OF_NUMBERS
        scaled = OF_ROWS if weight.scales.shape[-1] == 1 and not wide else grouped
        values = weight.values if weight.values.stride(-1) == 1 else weight.values.contiguous()
        words = kind_of(values, dtype) if weight.zeros is None and scaled != OF_NUMBERS else 0
        scales = weight.scales.contiguous()
        zeros = scales if weight.zeros is None else weight.zeros.contiguous()
        return cls(values.view(torch.int32) if words else values, scales, zeros, high, group, scaled, words)


def launch(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    cu_rows: Tensor | None,
    pair: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Multiply x [N, d_in] by a quantised weight; a pair gives silu(gate) * up.

    For many rows it is faster to multiply by the weight that `taken` gives.

    Args:
        cu_rows: its last entry is the number of live rows, on the device; the others are not written. None: all are.
        tile: overrides the tile for the number of rows.
    """
    (n, d_in), d_out = x.shape, weight.shape[0] // 2 if pair else weight.shape[0]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tile = tile or tile_for(n)
    of = Layout.of(weight, tile.depth, x.dtype)
    tiles = triton.cdiv(n, tile.rows) * triton.cdiv(d_out, tile.columns // 2 if pair else tile.columns)
    shares = max(min(tile.programs * multiprocessors(x.device) // tiles, SHARES, d_in // tile.depth // LEAST), 1)
    part, ended = out, out
    if shares > 1:
        part = torch.empty((tiles * shares, tile.rows * tile.columns), dtype=torch.float32, device=x.device)
        ended = zeros(tiles, x.device)
    _multiply_stored[(tiles * shares,)](
        x, of.values, of.scales, of.zeros, x if bias is None else bias, out, part, ended,
        x if cu_rows is None else cu_rows, 0 if cu_rows is None else cu_rows.shape[0] - 1, n, shares, d_out, d_in,
        x.stride(0), of.values.stride(0), of.scales.stride(0), of.high, of.group, of.scaled, of.words,
        weight.values.dtype == torch.uint8, weight.zeros is not None, bias is not None, cu_rows is not None, pair,
        tile.rows, tile.columns, tile.depth, d_in % tile.depth == 0, SHARES if shares > 1 else 1,
        "ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _numbers(
    v_ptr, z_ptr, row, k, d_in, v_row, s_row, HIGH: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    ZEROS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Numbers f32 of rows of the weight, column k and those after it, less their zeros."""
    column = k + tl.arange(0, DEPTH)
    there = (column < d_in)[None, :]
    if FOUR:
        pairs = k // 2 + tl.arange(0, DEPTH // 2)
        at = row.to(tl.int64)[:, None] * v_row + pairs[None, :]
        both = tl.load(v_ptr + at, mask=(pairs < d_in // 2)[None, :], other=136)
        found = tl.join((both & 15).to(tl.float32), (both >> 4).to(tl.float32)).reshape(COLUMNS, DEPTH)
    else:
        at = row.to(tl.int64)[:, None] * v_row + column[None, :]
        found = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
    if ZEROS:
        place = (row // HIGH).to(tl.int64)[:, None] * s_row + (column // GROUP)[None, :]
        found = tl.where(there, found - tl.load(z_ptr + place, mask=there, other=0.0), 0.0)
    elif FOUR:
        found -= 8.0
    return found


@triton.jit
def _load_some(ptr, at, column, end, EVEN: tl.constexpr):
    """Load places [..., columns]; zeros from column `end` on, unless EVEN says that columns end there."""
    return tl.load(ptr + at) if EVEN else tl.load(ptr + at, mask=(column < end)[None, :], other=0)


@triton.jit
def _tile(
    x_ptr, v_ptr, s_ptr, z_ptr, row, x_rows, x_live, begin, end, d_in, x_row, v_row, s_row,
    HIGH: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr, FOUR: tl.constexpr,
    ZEROS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums f32 [COLUMNS, ROWS] over columns begin..end of some rows of the weight and of x."""
    NUMBERS: tl.constexpr = 8 if FOUR else 4  # of a word
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    of_rows = (row // HIGH).to(tl.int64) * s_row
    if SCALED == 1:
        scale = tl.load(s_ptr + of_rows + begin // GROUP)
    for k in range(begin, end, DEPTH):
        column = k + tl.arange(0, DEPTH)
        x_there = x_live[:, None] if EVEN else x_live[:, None] & (column < d_in)[None, :]
        x = tl.load(x_ptr + x_rows.to(tl.int64)[:, None] * x_row + column[None, :], mask=x_there, other=0.0)
        if SCALED == 1:
            following = tl.load(s_ptr + of_rows + tl.minimum(k + DEPTH, d_in - 1) // GROUP)  # ahead of its use
        if WORDS:
            place = k // NUMBERS + tl.arange(0, DEPTH // NUMBERS)
            at = row.to(tl.int64)[:, None] * v_row + place[None, :]
            word = _load_some(v_ptr, at, place, d_in // NUMBERS, EVEN)
            if SCALED == 1:
                part = multiply_words(word, x, tl.zeros_like(acc), WORDS, ROWS, COLUMNS, DEPTH)
                acc += part * scale[:, None]
            else:
                acc = multiply_words(word, x, acc, WORDS, ROWS, COLUMNS, DEPTH)
        else:
            w = _numbers(v_ptr, z_ptr, row, k, d_in, v_row, s_row, HIGH, GROUP, FOUR, ZEROS, COLUMNS, DEPTH)
            if SCALED == 2:
                w *= _load_some(s_ptr, of_rows[:, None] + (column // GROUP)[None, :], column, d_in, EVEN)
            part = tl.dot(w.to(x.dtype), x.T, input_precision=PRECISION)
            if SCALED == 1:
                part *= scale[:, None]
            acc += part
        if SCALED == 1:
            scale = following
    if SCALED == 0:
        acc *= tl.load(s_ptr + of_rows)[:, None]
    return acc


@triton.jit(do_not_specialize=["b", "n", "shares"])
def _multiply_stored(
    x_ptr, v_ptr, s_ptr, z_ptr, bias_ptr, out_ptr, part_ptr, ended_ptr, cu_ptr, b, n, shares, d_out, d_in,
    x_row, v_row, s_row,
    HIGH: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr, FOUR: tl.constexpr,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, COUNTED: tl.constexpr, PAIR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, MOST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a tile, or a share of one. MOST: the most shares of a tile."""
    WIDE: tl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    rows = _live_rows(cu_ptr, b, n) if COUNTED else n
    tile, own = tl.program_id(0) // shares, tl.program_id(0) % shares
    r, first = _corner(tile, d_out, ROWS, WIDE)
    if r >= rows:
        return
    x_rows = r + tl.arange(0, ROWS)
    share = tl.cdiv(tl.cdiv(d_in, DEPTH), shares) * DEPTH
    acc = _tile(
        x_ptr, v_ptr, s_ptr, z_ptr, _rows_of_tile(first, d_out, COLUMNS, WIDE), x_rows, x_rows < rows,
        own * share, tl.minimum((own + 1) * share, d_in), d_in, x_row, v_row, s_row,
        HIGH, GROUP, SCALED, WORDS, FOUR, ZEROS, ROWS, COLUMNS, DEPTH, EVEN, PRECISION,
    )  # fmt: skip
    last = True
    if MOST > 1:
        at = tile.to(tl.int64) * shares * (ROWS * COLUMNS)
        at += tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(part_ptr + own * (ROWS * COLUMNS) + at, acc)
        tl.debug_barrier()
        last = tl.atomic_add(ended_ptr + tile, 1, sem="acq_rel") == shares - 1
        if last:
            acc = tl.zeros_like(acc)
            for i in tl.static_range(MOST):
                # Past the first level of cache, which does not see the writes of others.
                share_ptr = part_ptr + i * (ROWS * COLUMNS) + at
                acc += tl.load(share_ptr, mask=at * 0 + i < shares, other=0.0, cache_modifier=".cg")
    if last:
        _store(out_ptr, bias_ptr, acc.T, x_rows, first, rows, d_out, ROWS, COLUMNS, BIAS, PAIR)


def multiply_grouped(x: Tensor, weight: QuantisedWeight, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its quantised weight -> [N, d_out].

    Args:
        x: [N, d_in]; rows from ends[e - 1] on and up to ends[e] are multiplied by weight e.
        weight: a stack of quantised weights.
        ends: i32[E]; rows after the last end are not written.
    """
    n, d_out = x.shape[0], weight.shape[1]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    tile = tile_for(-(-n // len(weight)))
    of = Layout.of(weight, tile.depth, x.dtype)
    _multiply_group[(len(weight), triton.cdiv(d_out, tile.columns))](
        x, of.values, of.scales, of.zeros, out, ends, d_out, x.shape[1], x.stride(0), of.values.stride(0),
        of.values.stride(1), of.scales.stride(0), of.scales.stride(1), of.high, of.group, of.scaled, of.words,
        weight.values.dtype == torch.uint8, weight.zeros is not None,
        tile.rows, tile.columns, tile.depth, x.shape[1] % tile.depth == 0,
        "ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _multiply_group(
    x_ptr, v_ptr, s_ptr, z_ptr, out_ptr, ends_ptr, d_out, d_in, x_row, v_item, v_row, s_item, s_row,
    HIGH: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, WORDS: tl.constexpr, FOUR: tl.constexpr,
    ZEROS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply one expert's rows, a tile after the other, by some rows of its weight."""
    expert = tl.program_id(0)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    item, first = expert.to(tl.int64), tl.program_id(1) * COLUMNS
    row = _rows_of_tile(first, d_out, COLUMNS, COLUMNS)
    for r in range(begin, end, ROWS):
        x_rows = r + tl.arange(0, ROWS)
        acc = _tile(
            x_ptr, v_ptr + item * v_item, s_ptr + item * s_item, z_ptr + item * s_item, row,
            x_rows, x_rows < end, 0, d_in, d_in, x_row, v_row, s_row,
            HIGH, GROUP, SCALED, WORDS, FOUR, ZEROS, ROWS, COLUMNS, DEPTH, EVEN, PRECISION,
        )  # fmt: skip
        _store(out_ptr, out_ptr, acc.T, x_rows, first, end, d_out, ROWS, COLUMNS, False, False)


def taken(weight: Tensor | QuantisedWeight, x: Tensor) -> Tensor | QuantisedWeight:
    """Weight as the product of rows x [..., columns] takes it: for many rows a quantised one is dequantised."""
    if isinstance(weight, QuantisedWeight) and dequantised_first(x, weight):
        return dequantised(weight, x.dtype)
    return weight


def dequantised(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantise a weight [rows, columns] to a floating dtype, in memory of its own."""
    rows, columns = weight.shape
    out = torch.empty((rows, columns), dtype=dtype, device=weight.values.device)
    high, depth = PLAIN
    of = Layout.of(weight, depth, torch.float32)
    if out.numel():
        _dequantise[(triton.cdiv(rows, high) * triton.cdiv(columns, depth),)](
            of.values, of.scales, of.zeros, out, rows, columns, of.values.stride(0), of.scales.stride(0), of.high,
            of.group, of.scaled, weight.values.dtype == torch.uint8, weight.zeros is not None, high, depth, num_warps=4,
        )  # fmt: skip
    return out


PLAIN = (32, 128)
"""Rows and columns of a weight that one program dequantises."""


@triton.jit
def _dequantise(
    v_ptr, s_ptr, z_ptr, out_ptr, rows, d_in, v_row, s_row, HIGH: tl.constexpr, GROUP: tl.constexpr,
    SCALED: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    first, k = _corner(tl.program_id(0), d_in, ROWS, DEPTH)
    row, column = _rows_of_tile(first, rows, ROWS, ROWS), k + tl.arange(0, DEPTH)
    there = (column < d_in)[None, :]
    found = _numbers(v_ptr, z_ptr, row, k, d_in, v_row, s_row, HIGH, GROUP, FOUR, ZEROS, ROWS, DEPTH)
    of_rows = (row // HIGH).to(tl.int64) * s_row
    if SCALED == 2:
        found *= tl.load(s_ptr + of_rows[:, None] + (column // GROUP)[None, :], mask=there, other=0.0)
    else:
        found *= tl.load(s_ptr + of_rows + k // GROUP)[:, None]
    at = row.to(tl.int64)[:, None] * d_in + column[None, :]
    tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=there)
