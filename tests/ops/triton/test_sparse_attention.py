"""The kernels of sparse_attention: interpreted in any tiles and shares, and on a GPU at the sizes of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dgraph.families.quantised import ROW_KINDS, quantised_rows
from dgraph.ops import OPS
from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT
from dgraph.ops.attention.sparse_draws import draw, in_float8, in_pages
from tests.amounts import every_value
from tests.ops.test_sparse_attention import random_call
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import compare, expected, moved

KEY_POSITIONS, CU_ROWS, LIMIT, ACTION, SCALE = 10, 11, 13, 15, 16
"""Places of arguments."""


def call(seed: int = 0, **options: Any) -> tuple[Any, ...]:
    """Every action; windows that begin and end inside of a block; heads that keep many entries, one or none."""
    sizes = {
        "actions": [REUSE, SELECT, REPACK, REUSE, DENSE, REUSE],
        "rows": [9, 20, 3, 0, 7, 5],
        "windows": [(21, 90), (0, 4), (16, 64), (3, 9), (5, 8), (0, 0)],
        "counts": [[70, 0], [1, 2], [16, 64], [2, 2], [9, 9], [0, 35]],
        "keys": [9, 50, 3, 0, 33, 5],
        "page": 16,
        "d": 16,
        "padding": 3,
    }
    return draw(torch.Generator().manual_seed(seed), **(sizes | options))


def paged(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return in_pages(torch.Generator().manual_seed(1), args)


def run(interpreted: Interpreter, args: tuple[Any, ...], **options: Any) -> None:
    found, _ = interpreted("sparse_attention", args, **options)
    compare([found], expected("sparse_attention", args))


@every_value(("bulk", [True, False]), ("block_m, block_n, splits", [(16, 16, 1), (8, 8, 3), (64, 32, 8), (32, 16, 2)]))
def test_interpreted_in_any_tiles_and_shares(
    interpreted: Interpreter, block_m: int, block_n: int, splits: int, bulk: bool
) -> None:
    from dgraph.ops.attention.triton import attention_tiling
    from dgraph.ops.attention.triton.sparse_attention import Tiling

    sizes = attention_tiling.Tiling(block_m, block_n, splits, 4, 1, bulk)
    for sees_all in (False, True):
        args = call(group=1 + 2 * sees_all, sees_all=sees_all)
        run(interpreted, args, tiling=Tiling(sizes, 1, sizes))
        rounded = in_float8(args, key_rows=sees_all)
        run(interpreted, rounded, tiling=Tiling(sizes, 1, sizes))
        run(interpreted, paged(rounded if sees_all else args), tiling=Tiling(sizes, 1, sizes))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_interpreted_rounding_what_it_gives(interpreted: Interpreter, kind: str, splits: int) -> None:
    """Of sequences that see all their rows as well, which are added after the shares, and of those that see none."""
    from dgraph.ops.attention.triton import attention_tiling
    from dgraph.ops.attention.triton.sparse_attention import Tiling

    sizes = attention_tiling.Tiling(16, 8, splits, 4, 1, True)
    for sees_all in (False, True):
        args = call(sees_all=sees_all)
        (values, scales), _ = interpreted("sparse_attention", args, tiling=Tiling(sizes, 1, sizes), kind=kind)
        live = int(args[CU_ROWS][-1])
        want, by = quantised_rows(expected("sparse_attention", args)[0][:live].flatten(1), kind)
        compare([scales[:live]], [by], 1e-5)
        assert (values[:live].float() != want.float()).float().mean() < 0.01
        compare([values[:live].float() * scales[:live]], [want.float() * by], 0.08)


@pytest.mark.parametrize("seed", range(8))
def test_interpreted_random_calls(interpreted: Interpreter, seed: int) -> None:
    args = tuple(random_call(seed + 500).values())
    run(interpreted, paged(args) if seed % 2 else args)


@pytest.mark.parametrize("page", [1, 7, 32, 128])
def test_interpreted_pages_of_any_size(interpreted: Interpreter, page: int) -> None:
    args = call(page=page, d=20 if page == 7 else 16)
    run(interpreted, args)
    run(interpreted, paged(args))


def test_interpreted_views_and_a_negative_scale(interpreted: Interpreter) -> None:
    args = list(call(sees_all=True))
    heads, group = args[1].shape[1], args[0].shape[1] // args[1].shape[1]
    together = torch.cat([args[0], args[1].new_zeros(len(args[0]), 2 * heads, 16)], 1)
    wide = torch.cat([args[1], args[2]], 1)
    args[0], args[1], args[2] = together[:, : heads * group], wide[:, :heads], wide[:, heads:]
    args[SCALE] = -args[SCALE]
    run(interpreted, tuple(args))


def test_interpreted_limits_beyond_everything_read_nothing_outside(interpreted: Interpreter) -> None:
    args = list(call(sees_all=True))
    want = expected("sparse_attention", tuple(args))
    args[LIMIT] = torch.full_like(args[LIMIT], 2**31 - 1)
    found, _ = interpreted("sparse_attention", args)
    compare([found], want)


@pytest.mark.parametrize("limit", [0, 15, 16, 17, 31, 48])
def test_interpreted_limits_at_the_borders_of_blocks(interpreted: Interpreter, limit: int) -> None:
    from dgraph.ops.attention.triton import attention_tiling
    from dgraph.ops.attention.triton.sparse_attention import Tiling

    sizes = attention_tiling.Tiling(16, 16, 1, 4, 1)
    options = {"actions": [DENSE, REUSE], "rows": [2, 2], "windows": [(0, 0), (0, 48)], "counts": [[0], [3]]}
    args = list(call(**options, keys=[48, 0], sees_all=True))
    args[KEY_POSITIONS][:48] = torch.arange(48)
    args[LIMIT] = torch.full_like(args[LIMIT], limit)
    run(interpreted, tuple(args), tiling=Tiling(sizes, 1, sizes))


def test_interpreted_many_sequences_and_blocks_of_keys(interpreted: Interpreter) -> None:
    """More blocks of key rows than are compared with the limits at once."""
    from dgraph.ops.attention.triton import attention_tiling
    from dgraph.ops.attention.triton.sparse_attention import Tiling

    sizes = attention_tiling.Tiling(16, 2, 1, 4, 1, False)
    few = {"actions": [DENSE], "rows": [2], "windows": [(0, 0)], "counts": [[0]], "keys": [1030], "group": 1, "d": 8}
    args = call(**few, sees_all=True)
    run(interpreted, args, tiling=Tiling(sizes, 1, sizes))
    many = 513
    actions = [DENSE if s % 3 else REUSE for s in range(many)]
    rows = [int(s in (0, 4, 300, 512)) * 2 for s in range(many)]
    options = {"windows": [(0, 3)] * many, "counts": [[2]] * many, "group": 1, "d": 8}
    run(interpreted, call(actions=actions, rows=rows, keys=rows, **options))


def test_shares_are_not_added_up_next_to_dense_sequences() -> None:
    from dgraph.ops.attention.triton.sparse_attention import tiling_for

    sizes = 8, 1, (32, 32), 128, 32 * 2048, 2, 132
    assert tiling_for(*sizes, dense=False).kept.splits > 1
    assert tiling_for(*sizes, dense=True).kept.splits == 1


@pytest.mark.parametrize("itemsize", [2, 4])
def test_gathered_keys_are_as_many_in_flight_as_packed_ones(itemsize: int) -> None:
    """A gather waits for two others, so that it is in flight in every second of the stages alone."""
    from dgraph.ops.attention.triton.sparse_attention import tiling_for

    for d in (128, 256):
        sizes = 32 * 32, 32, (32, 8), d, 32 * 8 * 2048, itemsize, 132
        packed, paged = (tiling_for(*sizes, dense=False, in_pages=p) for p in (False, True))
        assert (paged.kept, paged.dense) == (packed.kept, packed.dense)
        assert paged.kept_stages == 2 * packed.kept_stages - 1
        assert (packed.kept_stages > 1) == (itemsize == 2)


SIZES = {
    "blocks of a batch": {
        "actions": [REUSE, REPACK, REUSE],
        "rows": [32, 32, 7],
        "windows": [(600, 632), (64, 96), (100, 132)],
        "counts": [[300, 0, 513, 64], [1, 2, 700, 128], [0, 0, 0, 0]],
    },
    "windows of a response": {
        "actions": [REUSE, REUSE],
        "rows": [300, 17],
        "windows": [(333, 633), (5, 512)],
        "counts": [[256, 100, 0, 31], [90, 7, 700, 12]],
    },
    "every action": {
        "actions": [DENSE, REUSE, SELECT, REPACK],
        "rows": [400, 32, 129, 60],
        "windows": [(0, 32), (40, 72), (1, 9), (200, 300)],
        "counts": [[3, 4, 5, 6], [200, 0, 64, 65], [1, 1, 1, 1], [40, 300, 2, 9]],
        "keys": [400, 32, 700, 60],
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("dtype", "page", "d", "group"),
    [
        (torch.bfloat16, 128, 128, 1),
        (torch.bfloat16, 32, 128, 4),
        (torch.bfloat16, 64, 256, 2),
        (torch.bfloat16, 8, 80, 7),
        (torch.float16, 16, 64, 1),
        (torch.float32, 16, 128, 2),
    ],
)
def test_at_the_sizes_of_models(name: str, group: int, page: int, d: int, dtype: torch.dtype) -> None:
    for sees_all in (False, True):
        sizes = SIZES[name] | {"group": group, "page": page, "d": d, "sees_all": sees_all}
        args = moved(call(seed=group, **({"keys": None} | sizes)), "cpu", dtype)
        want = expected("sparse_attention", moved(args, "cpu", torch.float32))
        got = OPS["sparse_attention"].overload(*moved(args, "cuda"))
        near = 2e-5 if dtype == torch.float32 else 2e-2
        compare([got], want, near)
        compare([OPS["sparse_attention"].overload(*moved(paged(args), "cuda"))], want, near)


@pytest.mark.gpu
@pytest.mark.parametrize("place", [tuple, paged])
def test_a_captured_call_follows_the_phases_on_the_device(place: Any) -> None:
    args = moved(place(call(sees_all=True)), "cuda", torch.bfloat16)
    OPS["sparse_attention"].overload(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OPS["sparse_attention"].overload(*args)
    for actions in ([DENSE] * 6, [REUSE] * 6, [REPACK, DENSE, REUSE, REUSE, SELECT, REPACK]):
        args[ACTION].copy_(torch.tensor(actions))
        args[0].neg_()
        graph.replay()
        want = expected("sparse_attention", moved(moved(args, "cpu"), "cpu", torch.float32))
        compare([out], want, 2e-2)
