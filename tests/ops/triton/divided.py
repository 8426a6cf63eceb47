"""How programs divide the tiles of a product among themselves, as interpreted.

python -m tests.ops.triton.divided
"""

from __future__ import annotations

import json

from tests.ops.triton.interpreter import interpret_all

interpret_all()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from dgraph.ops.products.triton.product_shares import _division, _piece, _pieces  # noqa: E402
from tests.ops.triton.divisions import CASES, Division  # noqa: E402

MOST = 80
"""Pieces of a program."""
FIELDS = 9


@triton.jit
def _list_pieces(
    out_ptr, rows, d_out, d_in, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr, PIECES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    division = _division(rows, d_out, d_in, ROWS, COLUMNS, DEPTH, PROGRAMS, SPLITS, EVEN)
    mine, pieces = _pieces(division, PROGRAMS, EVEN)
    for i in range(0, pieces):
        r, c, first, last, share = _piece(i, mine, division, PROGRAMS, 8, EVEN)
        at = out_ptr + (tl.program_id(0) * PIECES + i) * EACH
        tl.store(at, i < mine)
        tl.store(at + 1, r)
        tl.store(at + 2, c)
        tl.store(at + 3, first)
        tl.store(at + 4, last)
        tl.store(at + 5, share[0])
        tl.store(at + 6, share[1])
        tl.store(at + 7, share[2])
        tl.store(at + 8, share[3])


def listed(case: Division) -> list[list[list[int]]]:
    """The pieces of each program."""
    out = torch.full((case.programs, MOST, FIELDS), -1, dtype=torch.int32)
    sizes = case.rows, case.d_out, case.d_in, case.high, case.wide, case.deep
    _list_pieces[(case.programs,)](out, *sizes, case.programs, case.splits, case.even, MOST, FIELDS)
    return [[piece for piece in mine if piece[0] >= 0] for mine in out.tolist()]


if __name__ == "__main__":
    print(json.dumps({name: listed(case) for name, case in CASES.items()}))
