"""Product over the live rows, whose number is on the device, for the kernels of rows_linear and rows_glu.

A tile is ROWS rows of x by COLUMNS rows of the weight. In a PAIR the weight has two halves, gate rows and up rows. A
tile takes COLUMNS/2 of each, at the same places of both. They are one factor, so the loop is that of a plain product.
The halves part only where a result is written: silu(gate) * up, half as wide as the tile.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from dgraph.ops.products.triton.product_shares import _division, _piece, _pieces, _place


@triton.jit
def _live_rows(cu_ptr, b, n):
    return tl.minimum(tl.load(cu_ptr + b), n).to(tl.int32)


@triton.jit
def _corner(tile, d_out, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """First row and column of a tile of the result; tiles are numbered along the columns first."""
    along = tl.cdiv(d_out, WIDE)
    return tile // along * ROWS, tile % along * WIDE


@triton.jit
def _rows_of_tile(first, d_out, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Rows of the weight that a tile reads whose columns begin at `first`, in a pair gate's and up's.

    Beyond the end the last one repeats.
    """
    place = tl.arange(0, COLUMNS)
    return tl.minimum(first + place % WIDE, d_out - 1) + place // WIDE * d_out


@triton.jit
def _load(blocks, ptr, first, rows, step, k, d_in, ROWS: tl.constexpr, DEPTH: tl.constexpr, BULK: tl.constexpr,
          PAIR: tl.constexpr):  # fmt: skip
    """Load ROWS rows from the first on; in a PAIR half, and as many of the second `rows`, at the same places."""
    if BULK and PAIR:
        found = blocks.load([0, first, k]).reshape(ROWS, DEPTH)
    elif BULK:
        found = blocks.load([first, k])
    else:
        column = k + tl.arange(0, DEPTH)
        if PAIR:
            place = tl.arange(0, ROWS)
            inside = first + place % (ROWS // 2)
            row, live = inside + place // (ROWS // 2) * rows, inside < rows
        else:
            row = first + tl.arange(0, ROWS)
            live = row < rows
        at = row.to(tl.int64)[:, None] * step + column[None, :]
        found = tl.load(ptr + at, mask=live[:, None] & (column < d_in)[None, :], other=0.0)
    return found


@triton.jit
def _store(out_ptr, bias_ptr, acc, row, first, rows, d_out, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
           BIAS: tl.constexpr, PAIR: tl.constexpr):  # fmt: skip
    """Store a tile of the result, from its first column on."""
    if PAIR:
        column = first + tl.arange(0, COLUMNS // 2)
        gate, up = tl.split(acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))
        if BIAS:
            gate += tl.load(bias_ptr + column, mask=column < d_out, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + d_out + column, mask=column < d_out, other=0.0).to(tl.float32)[None, :]
        found = gate * tl.sigmoid(gate) * up
    else:
        column = first + tl.arange(0, COLUMNS)
        found = acc
        if BIAS:
            found += tl.load(bias_ptr + column, mask=column < d_out, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * d_out + column[None, :]
    tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < d_out)[None, :])


@triton.jit
def _tiles(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, x_blocks, w_blocks, rows, n, d_out, d_in, x_row, w_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, BULK: tl.constexpr,
    PRECISION: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of one program: its whole ones, and then its share of another."""
    WIDE: tl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    division = _division(rows, d_out, d_in, ROWS, WIDE, DEPTH, PROGRAMS, SPLITS)
    mine, pieces = _pieces(division, PROGRAMS)
    for i in tl.range(0, pieces):
        r, c, first, last, _share = _piece(i, mine, division, PROGRAMS, GROUP)
        acc = tl.zeros([COLUMNS, ROWS] if SWAP else [ROWS, COLUMNS], tl.float32)
        for k in tl.range(first * DEPTH, last * DEPTH, DEPTH, num_stages=STAGES):
            x = _load(x_blocks, x_ptr, r * ROWS, n, x_row, k, d_in, ROWS, DEPTH, BULK, False)
            w = _load(w_blocks, w_ptr, c * WIDE, d_out, w_row, k, d_in, COLUMNS, DEPTH, BULK, PAIR)
            if SWAP:
                acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        found = acc.T if SWAP else acc
        row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        if last - first == division[2]:
            _store(out_ptr, bias_ptr, found, r * ROWS + row, c * WIDE, rows, d_out, ROWS, COLUMNS, BIAS, PAIR)
        else:
            at = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS) + row[:, None] * COLUMNS + column[None, :]
            tl.store(part_ptr + at, found, mask=(r * ROWS + row < rows)[:, None])


@triton.jit(do_not_specialize=["b", "n"])
def _multiply(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, cu_ptr, x_0, x_1, x_2, x_3, x_4, x_5, w_0, w_1, w_2, w_3, w_4, w_5,
    b, n, d_out, d_in, x_row, w_row,
    CASES: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    PAIR: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply in the tiles of the one case that holds: above some rows, up to some rows, then sizes of `Tiles`."""
    rows = _live_rows(cu_ptr, b, n)
    x_blocks, w_blocks = (x_0, x_1, x_2, x_3, x_4, x_5), (w_0, w_1, w_2, w_3, w_4, w_5)
    for i in tl.static_range(len(CASES)):
        if (rows > CASES[i][0]) & (rows <= CASES[i][1]):
            _tiles(
                x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, x_blocks[i], w_blocks[i], rows, n, d_out, d_in, x_row, w_row,
                CASES[i][2], CASES[i][3], CASES[i][4], CASES[i][5], CASES[i][6],
                GROUP, PROGRAMS, SPLITS, BIAS, BULK, PRECISION, PAIR,
            )  # fmt: skip


@triton.jit
def _sums(
    part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, PAIR: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    across, along, _, whole, shares, _ = _division(rows, d_out, d_in, ROWS, WIDE, DEPTH, PROGRAMS, SPLITS)
    row, column = tl.arange(0, SOME), tl.arange(0, COLUMNS)
    for i in range(tl.program_id(0), (across * along - whole) * (ROWS // SOME), tl.num_programs(0)):
        tile, inside = i // (ROWS // SOME), i % (ROWS // SOME) * SOME
        r, c = _place(whole + tile, across, along, GROUP)
        if r * ROWS + inside < rows:
            at = (inside + row)[:, None] * COLUMNS + column[None, :]
            live = (r * ROWS + inside + row < rows)[:, None]
            acc = tl.zeros([SOME, COLUMNS], tl.float32)
            for j in tl.static_range(SPLITS):
                slot = (tile * shares + j).to(tl.int64)
                acc += tl.load(part_ptr + slot * (ROWS * COLUMNS) + at, mask=live & (j < shares), other=0.0)
            _store(
                out_ptr, bias_ptr, acc, r * ROWS + inside + row, c * WIDE, rows, d_out, SOME, COLUMNS, BIAS, PAIR
            )  # fmt: skip


@triton.jit(do_not_specialize=["b", "n"])
def _add_up(
    part_ptr, bias_ptr, out_ptr, cu_ptr, b, n, d_out, d_in,
    CASES: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    PAIR: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Add up the shares of tiles that several programs computed, in order, from the workspace."""
    rows = _live_rows(cu_ptr, b, n)
    for i in tl.static_range(len(CASES)):
        if (rows > CASES[i][0]) & (rows <= CASES[i][1]):
            _sums(
                part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
                CASES[i][2], CASES[i][3], CASES[i][4], GROUP, PROGRAMS, SPLITS, BIAS, PAIR, SOME,
            )  # fmt: skip
