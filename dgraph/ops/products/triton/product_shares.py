"""Division of the tiles of a product among programs, one of which a multiprocessor runs.

Whole tiles go in rounds over all programs. The tiles that are left, fewer than the programs, are cut along the inner
dimension into shares of one length, in one of two ways. Either no share has parts of two tiles. Then a program writes
one set of sums at most. No tile is cut where more than half of the programs would have one each. Or shares are EVEN:
all programs have one, which may end in the next tile. Then sums are up to twice as many. So this is for few rows, whose
sums are small and which wait for memory. There 96 of 132 programs read 0.8 of what all do (on an H100).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _quotient(a, b):
    """a // b for a from 0 to 2**20 and a positive b, in much less time than integers take.

    The half keeps the value that is rounded at least 0.5 / b away from an integer. The error is below a / b / 2**21.
    """
    return ((a + 0.5) / b.to(tl.float32)).to(tl.int32)


@triton.jit
def _division(rows, d_out, d_in, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
              PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr = False):  # fmt: skip
    """Tiles over rows and over columns, iterations of each, and the number of whole ones, which are the first.

    For the other tiles, shares of each (0 if they are even) and iterations of a share.
    """
    across, along = tl.cdiv(rows, ROWS), tl.cdiv(d_out, COLUMNS)
    tiles, deep = across * along, tl.maximum(tl.cdiv(d_in, DEPTH), 1)
    left = tiles % PROGRAMS
    most = tl.minimum(_quotient(PROGRAMS, tl.maximum(left, 1)), SPLITS)
    share = _quotient(deep + most - 1, most)
    if EVEN:
        even = tl.maximum((left * deep + PROGRAMS - 1) // PROGRAMS, (deep + SPLITS - 1) // SPLITS)
        share = tl.where(even * 4 > share * 3, share, even)  # more sums must save a quarter of the time
        shares, whole = 0, tiles - left
    else:
        shares = _quotient(deep + share - 1, share)  # none of them is empty
        whole = tl.where(shares > 1, tiles - left, tiles)
    return across, along, deep, whole, shares, share


@triton.jit
def _place(tile, across, along, GROUP: tl.constexpr):
    """Place of a tile over rows and over columns: GROUP tiles over rows next to each other, then the next columns."""
    wide = GROUP * along
    group = _quotient(tile, wide)
    inside, first = tile - group * wide, group * GROUP
    high = tl.maximum(tl.minimum(across - first, GROUP), 1)
    c = _quotient(inside, high)
    return first + inside - c * high, c


@triton.jit
def _pieces(division, PROGRAMS: tl.constexpr, EVEN: tl.constexpr = False):
    """Number of a program's whole tiles, and of these and its shares of other tiles together."""
    across, along, deep, whole, shares, share = division
    program = tl.program_id(0)
    mine = tl.cdiv(tl.maximum(whole - program, 0), PROGRAMS)
    left = across * along - whole
    if EVEN:
        first, last = program * share, tl.minimum((program + 1) * share, left * deep)
        more = tl.where(first < last, _quotient(last - 1, deep) - _quotient(first, deep) + 1, 0)
    else:
        more = (program < left * shares).to(tl.int32)
    return mine, mine + more


@triton.jit
def _piece(i, mine, division, PROGRAMS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr = False):
    """Place of a program's i-th piece over rows and columns, its first iteration and its end, and which share it is.

    A share has four numbers: the tile's number among those shared, the share's number, the number of shares, and the
    place of the first of them in the workspace. The others lie behind that.
    """
    across, along, deep, whole, shares, share = division
    program = tl.program_id(0)
    if EVEN:
        place = _quotient(program * share, deep) + tl.maximum(i - mine, 0)
        start = place * deep
        foremost = _quotient(start, share)  # the program that has the tile's first iteration
        own, count = program - foremost, _quotient(start + deep - 1, share) - foremost + 1
        first = tl.maximum(program * share - start, 0)
        last = tl.minimum((program + 1) * share - start, deep)
        begins = foremost + place
    else:
        place = _quotient(program, shares)
        own, count = program - place * shares, shares
        first, last = own * share, tl.minimum(own * share + share, deep)
        begins = place * shares
    tile = tl.where(i < mine, program + i * PROGRAMS, whole + place)
    first, last = tl.where(i < mine, 0, first), tl.where(i < mine, deep, last)
    r, c = _place(tile, across, along, GROUP)
    return r, c, first, last, (place, own, count, begins)
