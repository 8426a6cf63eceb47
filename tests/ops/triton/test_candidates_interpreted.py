"""Tilings that tuning tries: few, the default first, each right; and the values that they are timed on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dgraph.ops import OPS
from dgraph.ops.tuning import AttentionShape, LinearShape, LogitsShape, Shape
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import attention, compare, expected, flat, heading, mutated, partial, product, settled

MULTIPROCESSORS = 132


def attentions(dtype: str, stored: str | None = None) -> list[Shape]:
    """A few rows of many sequences, many of few; pages of one block and of several; one head per group and four; heads
    of 512.
    """
    return [
        AttentionShape(64, 64, 32, 8, 128, 32, 32768, dtype, stored or dtype),
        AttentionShape(512, 4, 32, 32, 128, 128, 4096, dtype, stored or dtype),
        AttentionShape(4096, 128, 32, 8, 128, 128, 2048, dtype, stored or dtype),
        AttentionShape(256, 1, 32, 8, 256, 16, 256, dtype, stored or dtype),
        AttentionShape(2048, 8, 16, 2, 512, 256, 2048, dtype, stored or dtype),
    ]


TUNED = sorted(op.name for op in OPS.values() if op.tuning is not None)


def shapes(op: str, dtype: str = "bfloat16") -> list[Shape]:
    if op == "rows_linear":
        return [LinearShape(rows, 4096, 6144, dtype) for rows in (16, 64, 512, 4096)]
    if op == "lm_head":
        return [LogitsShape(rows, 151_936, dtype) for rows in (4, 256, 1024)] + [LogitsShape(8, 700, dtype)]
    return attentions(dtype)


def tilings(op: str, dtype: str = "bfloat16") -> list[Any]:
    return list(dict.fromkeys(p for s in shapes(op, dtype) for p in OPS[op].tunable.candidates(s, MULTIPROCESSORS)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", TUNED)
def test_lists_are_short_and_begin_with_the_default(op: str, dtype: str) -> None:
    from dgraph.ops.attention.triton import attention_tiling, partial_attention
    from dgraph.ops.lm_head.triton import lm_head
    from dgraph.ops.products.triton import rows_linear
    from dgraph.ops.triton.candidates import MOST, itemsize

    for shape in shapes(op, dtype):
        if isinstance(shape, AttentionShape):
            sizes = (shape.heads, shape.kv_heads), shape.head_dim, shape.page, shape.keys, itemsize(shape)
            kernel = partial_attention if op.startswith("partial") else attention_tiling
            default: Any = kernel.tiling_for(shape.rows, shape.sequences, *sizes, MULTIPROCESSORS)
        elif isinstance(shape, LinearShape):
            default = rows_linear.tiling_for(itemsize(shape))
        else:
            default = lm_head.tiling_for(shape.rows, shape.vocab)
        found = OPS[op].tunable.candidates(shape, MULTIPROCESSORS)
        assert found[0] == default
        assert len(set(found)) == len(found) <= MOST == 12
        if dtype == "bfloat16":
            assert len(found) >= 3, shape


def test_over_keys_in_float8_warps_in_roles_have_other_shares() -> None:
    from dgraph.ops.triton.candidates import attention as of

    one = AttentionShape(32, 1, 32, 32, 128, 128, 1152, "bfloat16", "float8_e4m3fn")
    default, *others = of(one, MULTIPROCESSORS)
    assert (default.roles, default.splits) == (True, 3)
    assert sorted(tiling.splits for tiling in others if tiling.roles) == [1, 6]
    assert any(not tiling.roles for tiling in others)
    assert not any(tiling.roles for tiling in of(replace(one, head_dim=64), MULTIPROCESSORS))


def test_tilings_of_attention_stay_within_what_they_may_be() -> None:
    from dgraph.ops.triton.candidates import attention as of

    for shape in attentions("bfloat16"):
        assert isinstance(shape, AttentionShape)
        _, *others = of(shape, MULTIPROCESSORS)
        for tiling in others:
            assert tiling.splits <= 16
            assert shape.heads // shape.kv_heads <= tiling.block_m <= 128
            assert not tiling.bulk or shape.page % tiling.block_n == 0, "or it is another tiling under a false name"
            assert shape.head_dim <= 128 or tiling.block_n <= 64


@pytest.mark.release
def test_every_tiling_of_attention_is_right(interpreted: Interpreter) -> None:
    args = attention((9, 0, 5, 2), (300, 0, 12, 33), page=32, heads=(4, 1), d=16)
    want = expected("paged_attention", args)
    for tiling in tilings("paged_attention"):
        result, _ = interpreted("paged_attention", args, tiling=tiling)
        compare(flat(result), want)


@pytest.mark.release
def test_every_tiling_of_partial_attention_is_right(interpreted: Interpreter) -> None:
    args = partial((18, 0, 5, 9), (70, 0, 12, 33), full=(3,), page=32, heads=(4, 1))
    want = expected("partial_attention", args)
    for tiling in tilings("partial_attention"):
        result, after = interpreted("partial_attention", args, tiling=tiling)
        compare(flat(result) + mutated("partial_attention", after), want)


@pytest.mark.release
@pytest.mark.parametrize("rows", [3, 50])
def test_every_tiling_of_products_is_right(interpreted: Interpreter, rows: int) -> None:
    args = product(rows, 60, 144, 112, bias=True)
    want = expected("rows_linear", args)
    for tiling in tilings("rows_linear"):
        result, _ = interpreted("rows_linear", args, tiling=tiling)
        compare(settled("rows_linear", args, flat(result)), want)


@pytest.mark.release
def test_every_tiling_of_logits_gives_the_same_tokens(interpreted: Interpreter) -> None:
    from dgraph.ops.lm_head.lm_head import decode_logits

    h, weight, bias, masked, temperature, seed, _, suppress = heading(3)
    logits = torch.nn.functional.linear(h, weight, bias)
    logits[0] = 2.0  # every id ties
    masked[:] = torch.tensor([True, True, False])
    want = decode_logits(logits, temperature, seed, suppress)
    call = (logits, masked, temperature, seed, suppress, torch.empty(3, dtype=torch.int64), *torch.empty(3, 3))
    found = tilings("lm_head")
    for tiling in [p for p in found if p.splits <= 3] + [max(found, key=lambda p: p.splits)]:
        _, after = interpreted("lm_head", call, function="reduce_logits", tiling=tiling)
        assert after[5][masked].equal(want.token[masked])
        compare([x[masked] for x in after[6:]], [x[masked] for x in want[1:]])


TRIALS = """
import torch
from tests.ops.triton.interpreter import interpret_all
interpret_all()
from dataclasses import replace
from dgraph.lowering.timing import check_equal
from dgraph.ops.triton import trials
from dgraph.ops import OPS
from dgraph.ops.tuning import AttentionShape, LinearShape, LogitsShape

trials.KEYS, trials.ROOM = 48, 1 << 15
attention = AttentionShape(21, 4, 4, 2, 16, 16, 64, "float32", "float32")
float8 = replace(attention, stored="float8_e4m3fn")
shapes = {
    "paged_attention": [attention, replace(attention, rows=3), replace(attention, keys=16, sequences=1), float8],
    "partial_attention": [attention, replace(attention, rows=3), float8],
    "partial_context": [attention],
    "rows_linear": [LinearShape(20, 32, 48, "float32"), LinearShape(1, 16, 16, "float32")],
    "lm_head": [LogitsShape(5, 100, "float32")],
}
flat = lambda value: [value] if isinstance(value, torch.Tensor) else list(value)
for op, listed in shapes.items():
    for shape in listed:
        trial = OPS[op].tunable.trial(shape, torch.device("cpu"))
        results = []
        for tiling in OPS[op].tunable.candidates(replace(shape, dtype="bfloat16"), 4)[:3]:
            trial.reset()
            results.append([x.clone() for load in trial.loads for x in flat(load[0](tiling))])
            assert all(x.float().abs().sum() > 0 for x in results[-1] if x.is_floating_point()), op
            check_equal(results[-1], results[0])
        sizes = [len(load) for load in trial.loads]
        print(op, len(results), len(results[0]), sizes)
"""


@pytest.mark.release
def test_the_values_that_tilings_are_timed_on() -> None:
    root = Path(__file__).parents[3]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRIALS], capture_output=True, text=True, cwd=root, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    results = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert {name for name, _ in results} == set(TUNED)
    assert dict(results[::-1])["rows_linear"] == "3 4 [5, 5, 5, 5]", "tilings, results, weights of each load"
    assert dict(results[::-1])["lm_head"] == "3 4 [8]"
