"""The kernels of dgraph::kv_votes and dgraph::kv_scores in tiles and shares of any size: interpreted, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT
from tests.amounts import every_value
from tests.ops.test_sparse_scores import ALL, Call, call_of
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import compare, expected

MANY = (2, *(0,) * 515, 3, 0, 1)


def check(interpreted: Interpreter, call: Call, *rest: Any, **options: Any) -> None:
    name = "kv_votes" if len(rest) > 2 else "kv_scores"
    left_out = () if name == "kv_votes" else ("key_positions", "limit")
    args = (*(value for key, value in call.items() if key not in left_out), *rest)
    result, _ = interpreted(name, args, **options)
    compare([result], expected(name, args))


@every_value(
    (
        "first, last, resident, cuts",
        [(0, ALL, 1, True), (-40, 0, 4, False), (-ALL - 1, ALL, 2, True), (500, ALL, 2, False)],
    ),
    (
        "sizes, heads",
        [
            ((16, 16, 16, 16), (4, 1)),
            ((32, 16, 32, 16), (2, 2)),
            ((16, 32, 64, 32), (7, 1)),
            ((64, 64, 16, 64), (6, 2)),
        ],
    ),
)
def test_votes_in_any_tiles_and_shares(
    interpreted: Interpreter,
    sizes: tuple[int, int, int, int],
    heads: tuple[int, int],
    first: int,
    last: int,
    resident: int,
    cuts: bool,
) -> None:
    from dgraph.ops.kv.triton.kv_votes import Tiling

    call = call_of(sum(sizes), [SELECT, DENSE, SELECT, SELECT], heads, (50, 9, 0, 21), cuts)
    check(interpreted, call, 0.4, first, last, tiling=Tiling(*sizes, warps=4, stages=1, resident=resident))


@pytest.mark.parametrize("quarters", [(0, 1), (1, 3), (3, 4)])
def test_a_part_of_the_rows_votes(interpreted: Interpreter, quarters: tuple[int, int]) -> None:
    call = call_of(5, [SELECT, DENSE, SELECT, SELECT], (4, 2), (31, 9, 0, 14))
    check(interpreted, call, 0.4, -ALL - 1, ALL, None, *quarters)


def test_scores_may_have_a_scale_of_any_sign(interpreted: Interpreter) -> None:
    call = call_of(1, rows=(30, 8))
    for scale in (-0.3, 0.0, 2.0):
        check(interpreted, call, scale, -ALL - 1, ALL)
        check(interpreted, call, scale, False)


@pytest.mark.parametrize(("block", "heads"), [(4, (2, 2)), (16, (4, 1)), (8, (6, 2)), (64, (3, 3))])
@pytest.mark.parametrize("shared", [True, False])
def test_scores_in_any_tiles(interpreted: Interpreter, shared: bool, heads: tuple[int, int], block: int) -> None:
    call = call_of(block, [SELECT, REUSE, SELECT, REPACK, SELECT], heads, (50, 9, 0, 12, 21))
    check(interpreted, call, 0.4, shared, block=block)


def test_more_sequences_than_fit_in_a_block_of_offsets(interpreted: Interpreter) -> None:
    call = call_of(7, [SELECT if rows else DENSE for rows in MANY], (1, 1), MANY, cuts=False)
    check(interpreted, call, 0.4, -ALL - 1, ALL)
    check(interpreted, call, 0.4, False)


def test_rows_and_keys_may_be_views(interpreted: Interpreter) -> None:
    call = call_of(9, rows=(20, 13), heads=(3, 3), cuts=False)
    wide = torch.cat([call["q"], call["k"]], 1)
    call |= {"q": wide[:, :3], "k": wide[:, 3:]}
    check(interpreted, call, 0.4, -9, ALL)
    check(interpreted, call, 0.4, True)
