"""Tiles of the product in roles (product_roles.py), their layout in its ring, and the choice among them.

Rows and columns are those of the result; a box is a part of either factor. Along the inner dimension a box has BYTES
bytes, whether values have 16 or 8 bits. Either takes as long to load and to multiply.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dgraph.ops.products.triton.product_shares import _quotient

BOX, LOW, BYTES = gl.constexpr(64), gl.constexpr(16), gl.constexpr(128)
"""Rows of a box, and of a low one, and bytes of each row; the loading warp loads a box at a time."""
BOXES, MOST_STAGES = gl.constexpr(26), gl.constexpr(8)
"""Boxes that the ring holds, as many as fit into shared memory, and its stages at most."""
ANY = 2**31 - 1
"""Upper end of a range of row counts without a limit."""
FEW = 64
"""Rows of the lower tiles, the least height of an instruction, and the most rows for which these are taken."""


@dataclass(frozen=True)
class Case:
    """Tiles that a range of row counts may take.

    Attributes:
        above, up_to: the range, without and with its end.
        rows, columns: size of a tile: 128 by 64, 96, 128, 192 or 256; or, for a range of at most `FEW` rows, `FEW` by
            32, 48, 64 or 96. In a pair (see product.py) 128 by 128 or 256, or `FEW` by 64 or 128.
        splits: shares of a tile at most; 1, as one of 128 by 256 must have, divides none.
    """

    above: int
    up_to: int
    rows: int
    columns: int
    splits: int


def cases(pair: bool, itemsize: int = 2, most: int = ANY) -> tuple[Case, ...]:
    """Cases that the kernel chooses from, for values of `itemsize` bytes and `most` rows at most.

    Others would be compiled for nothing. With one byte no tile has 256 columns. Sums of float8 are held twice, and
    registers do not hold that many. For int8, Triton knows no instruction of that width.
    """
    narrow = (64, 128) if pair else (32, 48, 64, 96)
    wide = [(128, 4), (256, 1)] if pair else [(64, 4), (96, 4), (128, 4), (192, 4), (256, 1)]
    found = [Case(0, FEW, FEW, columns, 8) for columns in narrow]
    if most > FEW:
        found += [Case(FEW, ANY, 128, columns, splits) for columns, splits in wide if columns < 256 or itemsize > 1]
    return tuple(found)


@gluon.constexpr_function
def _units(rows, columns):
    """Boxes along the inner dimension in a stage: two where products take less time than handing them over does."""
    return 2 if rows < 128 and columns <= 128 else 1


@gluon.constexpr_function
def _stages(rows, columns):
    return min(BOXES * 64 // (rows + columns) // _units(rows, columns), MOST_STAGES)


@gluon.constexpr_function
def _parts(rows, columns):
    """Columns of the one or two accumulators of a tile, each of one instruction."""
    most = 1 << (columns.bit_length() - 1)
    return most, columns - most


@gluon.constexpr_function
def _ring(rows, columns):
    """Begin of x in the ring, in rows of a box, and of either accumulator's part of the weight.

    Each part holds all stages. In this order each begins at a multiple of the rows that an instruction reads of it.
    """
    deep = _stages(rows, columns) * _units(rows, columns)
    return 0, deep * rows, deep * (rows + _parts(rows, columns)[0])


@gluon.constexpr_function
def _each(part):
    """Columns of gate, and of up, that lie side by side in an accumulator of a pair. All warps multiply 128 rows, and
    half of them half of the columns of 64: so each has gate and up of the same columns.
    """
    return part[1] // (2 if part[0] == 128 else 4)


@gluon.constexpr_function
def _boxes(rows, columns, pair):
    """Boxes of the weight that are loaded for a tile, five numbers each.

    The first two are the place of the first unit's box in the ring, and the distance to that of the next unit. Both
    count rows of a box. Then follow the first column in the tile; 1 if the box is of up in a pair, else 0; and rows of
    the box.
    """
    found, column = [], 0
    for begin, wide in zip(_ring(rows, columns)[1:], _parts(rows, columns), strict=True):
        each = _each((rows, wide)) if pair else wide
        size = 64 if each % 64 == 0 else 16
        for at in range(0, wide, max(each, 1)):
            up = at // each % 2 if pair else 0
            found += [(begin + at + i, wide, column + i, up, size) for i in range(0, each, size)]
            column += each if up or not pair else 0
    return tuple(found)


@gluon.jit
def _choose(rows, d_out, deep, CASES: gl.constexpr, PROGRAMS: gl.constexpr, PAIR: gl.constexpr):
    """Choose the case that takes the least time, and the most shares of its tiles.

    Times are microseconds, as measured on an H200. No product takes less than the reading of its weight.
    """
    weight = deep * (gl.cdiv(d_out, LOW) * (2 if PAIR else 1)).to(gl.float32) * (LOW * BYTES / 4.2e6)
    least, chosen, splits = gl.to_tensor(float("inf")), gl.to_tensor(-1), gl.to_tensor(1)
    for i in gl.static_range(len(CASES)):
        if (rows > CASES[i][0]) & (rows <= CASES[i][1]):
            MANY: gl.constexpr = CASES[i][2] == 128
            WIDE: gl.constexpr = CASES[i][3] // 2 if PAIR else CASES[i][3]
            tiles = gl.cdiv(rows, CASES[i][2]) * gl.cdiv(d_out, WIDE)
            left = tiles % PROGRAMS
            shares = gl.minimum(_quotient(PROGRAMS, gl.maximum(left, 1)), CASES[i][4])
            if MANY:
                full, whole, shared = _times_of_many(deep, tiles, shares, CASES[i][3] / 64, PROGRAMS)
            else:
                full, whole, shared = _times_of_few(weight, tiles, left, shares, CASES[i][3] / 64, PROGRAMS)
            apart = (left > 0) & (shares > 1) & (shared < whole)
            took = full + gl.where(left > 0, gl.where(apart, shared, whole), 0.0)
            if MANY:
                took = gl.maximum(took, weight + gl.where(apart, 3.0, 0.0)) + 0.1 * took
            better = took < least
            chosen = gl.where(better, i, chosen)
            splits = gl.where(better, gl.where(apart, shares, 1), splits)
            least = gl.minimum(took, least)
    return chosen, splits


@gluon.jit
def _times_of_many(deep, tiles, shares, SIZE: gl.constexpr, PROGRAMS: gl.constexpr):
    """Times of all full rounds, of the round of the tiles that are left, and of that round if they are shared.

    Sharing may cost more than it saves. SIZE: boxes of the weight in a tile.
    """
    PACE: gl.constexpr = 0.055 + 0.15 * SIZE  # of an iteration over a box, of which the inner dimension has `deep`
    EXTRA: gl.constexpr = (SIZE - 1) * (SIZE - 1) / 3  # of a tile beside them
    some = shares.to(gl.float32)
    whole = deep * PACE + EXTRA
    return (tiles // PROGRAMS).to(gl.float32) * whole, whole, deep / some * PACE + EXTRA + 1.7 + 1.1 * SIZE * some


@gluon.jit
def _times_of_few(weight, tiles, left, shares, SIZE: gl.constexpr, PROGRAMS: gl.constexpr):
    """The same where programs wait for the weight alone, and 0.88 of them read as much as all do."""
    each, last = weight / tiles.to(gl.float32), left.to(gl.float32)
    beside = 0.64 * SIZE + 0.1 * gl.cdiv(tiles, PROGRAMS).to(gl.float32)
    whole = gl.maximum(last, 0.88 * PROGRAMS) * each
    shared = gl.maximum(last, 0.88 * PROGRAMS / shares.to(gl.float32)) * each + 2.0
    return (tiles - left).to(gl.float32) * each + beside, whole, shared
