"""Which tiles the product in roles has (product_roles.py), what of them its ring holds, and which it takes of them.

Rows and columns are those of the result; a box is a part of either factor. Along the inner dimension it has so many
bytes, be they values of 16 or of 8 bits, which take as long to load and to multiply.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dgraph.ops.triton.product import _quotient

BOX, BYTES = gl.constexpr(64), gl.constexpr(128)
"""Rows of a box, and bytes of each: what the loading warp asks for at a time."""
BOXES, MOST_STAGES = gl.constexpr(26), gl.constexpr(8)
"""Boxes that the ring holds, as shared memory does, and stages that it has at most."""
ANY = 2**31 - 1
"""A largest row count that is none."""


@dataclass(frozen=True)
class Case:
    """Tiles that a range of row counts may take.

    Attributes:
        above, up_to: the range, without and with its end.
        rows, columns: of a tile: 128 by 64, 128, 192 or 256; or 16, 32 or 64, of which the range has no more, by 64 or
            128. In a pair (see product.py) by 128 or 256.
        splits: shares of a tile at most; 1, as one of 128 by 256 must have, divides none.
    """

    above: int
    up_to: int
    rows: int
    columns: int
    splits: int


def cases(pair: bool, itemsize: int = 2) -> tuple[Case, ...]:
    """What the kernel chooses from, for values of so many bytes.

    Of one byte no tile has 256 columns: sums of float8 are held twice, and registers do not hold so many; of int8,
    Triton knows no instruction that is so wide.
    """
    few = [(0, 16), (16, 32), (32, 64)]
    narrow = (128, 256) if pair else (64, 128)
    wide = [(128, 4), (256, 1)] if pair else [(64, 4), (128, 4), (192, 4), (256, 1)]
    return (
        *(Case(above, rows, rows, columns, 8) for above, rows in few for columns in narrow),
        *(Case(64, ANY, 128, columns, splits) for columns, splits in wide if columns < 256 or itemsize > 1),
    )


@gluon.constexpr_function
def _units(rows, columns):
    """Boxes along the inner dimension in a stage: two where products take less time than handing them over does."""
    return 2 if rows < 128 and columns <= 128 else 1


@gluon.constexpr_function
def _stages(rows, columns):
    return min(BOXES * 64 // (rows + columns) // _units(rows, columns), MOST_STAGES)


@gluon.constexpr_function
def _parts(rows, columns, pair):
    """Shapes of the one or two accumulators of a tile, each of one instruction; those of few rows are turned round."""
    if rows == 128:
        found = (128, 128 if columns == 192 else columns), (128, 64 if columns == 192 else 0)
    else:
        high = 64 if columns == 64 or (pair and columns == 128) else 128
        found = (high, rows), (columns - high, rows if columns > high else 0)
    return found


@gluon.constexpr_function
def _ring(rows, columns, pair):
    """Where in the ring, in rows of a box, x begins and what either accumulator takes of the weight.

    Each holds all stages. In this order each begins at a multiple of what an instruction reads of it.
    """
    high, wide = _parts(rows, columns, pair)[0]
    deep = _stages(rows, columns) * _units(rows, columns)
    return (0, deep * rows, deep * (rows + wide)) if rows == 128 else (deep * columns, 0, deep * high)


@gluon.jit
def _choose(rows, d_out, deep, CASES: gl.constexpr, PROGRAMS: gl.constexpr, PAIR: gl.constexpr):
    """The case that takes the least time, and shares of its tiles at most.

    Times are microseconds, as measured on an H200: of an iteration over a box, of which the inner dimension has `deep`,
    of what a tile takes beside them, and of adding up shares, which may be more than they save. No product takes less
    than the reading of its weight.
    """
    deep = deep.to(gl.float32)
    weight = deep * (gl.cdiv(d_out, BOX) * (2 if PAIR else 1)).to(gl.float32) * (BOX * BYTES / 4.2e6)
    least, chosen, splits = gl.to_tensor(float("inf")), gl.to_tensor(-1), gl.to_tensor(1)
    for i in gl.static_range(len(CASES)):
        if (rows > CASES[i][0]) & (rows <= CASES[i][1]):
            ROWS: gl.constexpr = CASES[i][2]
            WIDE: gl.constexpr = CASES[i][3] // 2 if PAIR else CASES[i][3]
            SIZE: gl.constexpr = CASES[i][3] / 64
            PACE: gl.constexpr = 0.09 + 0.088 * SIZE if ROWS < 128 else 0.055 + 0.15 * SIZE
            EXTRA: gl.constexpr = (SIZE - 1) * (SIZE - 1) / 3 if ROWS == 128 else 0.0
            tiles = gl.cdiv(rows, ROWS) * gl.cdiv(d_out, WIDE)
            left = tiles % PROGRAMS
            shares = gl.minimum(_quotient(PROGRAMS, gl.maximum(left, 1)), CASES[i][4])
            some = shares.to(gl.float32)
            whole = deep * PACE + EXTRA
            shared = deep / some * PACE + EXTRA + 1.7 + 1.1 * SIZE * some * (ROWS / 128)
            apart = (left > 0) & (shares > 1) & (shared < whole)
            took = (tiles // PROGRAMS).to(gl.float32) * whole + gl.where(left > 0, gl.where(apart, shared, whole), 0.0)
            took = gl.maximum(took, weight + gl.where(apart, 3.0, 0.0)) + 0.1 * took
            better = took < least
            chosen = gl.where(better, i, chosen)
            splits = gl.where(better, gl.where(apart, shares, 1), splits)
            least = gl.minimum(took, least)
    return chosen, splits
