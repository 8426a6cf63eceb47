"""Choices: what a kernel finds while a program runs, and their plain form."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from dgraph.ops.tuning import (
    AttentionShape,
    Choice,
    Choices,
    LinearShape,
    LogitsShape,
    attention_shape,
    chosen,
    text_of,
)

SHAPE = LinearShape(64, 16, 32, "bfloat16")


@dataclass(frozen=True)
class Tile:
    rows: int
    first: bool = False


@dataclass(frozen=True)
class Tiling:
    tiles: tuple[Tile, ...]
    inner: Tile
    warps: int = 4


TILING = Tiling((Tile(16), Tile(32, True)), Tile(8))
CHOICE = Choice(SHAPE, TILING, 2e-6, 3e-6, 5, (("warps=9", "out of resources"),))


def test_tilings_are_found_only_while_they_are_in_use() -> None:
    mine, theirs = Choices(), Choices()
    mine.add("rows_linear", CHOICE)
    theirs.add("rows_linear", replace(CHOICE, tiling=replace(TILING, warps=8)))
    assert chosen("rows_linear", SHAPE) is None
    with mine.in_use():
        assert chosen("rows_linear", SHAPE) == TILING
        assert chosen("rows_linear", replace(SHAPE, rows=65)) is None
        assert chosen("lm_head", SHAPE) is None
        with theirs.in_use():
            assert chosen("rows_linear", SHAPE).warps == 8
        assert chosen("rows_linear", SHAPE) == TILING
        with ThreadPoolExecutor(1) as pool:  # another thread runs another program
            assert pool.submit(chosen, "rows_linear", SHAPE).result() is None
    with pytest.raises(KeyError), mine.in_use():
        raise KeyError
    assert chosen("rows_linear", SHAPE) is None
    assert len(mine) == 1


def test_a_choice_comes_back_from_json() -> None:
    for choice in (CHOICE, replace(CHOICE, seconds=None, default_seconds=None, failed=())):
        data = json.loads(json.dumps(choice.to_json()))
        assert Choice.from_json(data, LinearShape, Tiling) == choice


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("tiling", "warps"), "4", "expected int, got '4'"),
        (("tiling", "warps"), True, "expected int, got True"),
        (("tiling", "tiles"), 3, "expected a list, got 3"),
        (("tiling", "inner"), {"rows": 8}, "expected the fields rows, first"),
        (("tiling", "more"), 1, "expected the fields tiles, inner, warps"),
        (("shape", "rows"), None, "expected int, got None"),
        (("seconds",), "soon", "expected float, got 'soon'"),
        (("failed",), [["warps=9"]], "shorter|argument"),
        (("unknown",), 1, "expected the fields shape, tiling"),
    ],
)
def test_data_of_another_form_is_refused(where: tuple[str, ...], value: object, message: str) -> None:
    data = json.loads(json.dumps(CHOICE.to_json()))
    inner = data
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    with pytest.raises(ValueError, match=message):
        Choice.from_json(data, LinearShape, Tiling)


def test_keys_are_rounded_up_to_a_power_of_two() -> None:
    for columns, keys in ((1, 16), (3, 64), (4, 64), (5, 128)):
        q, table = torch.empty((7, 8, 32), dtype=torch.float16), torch.empty((3, columns))
        for stored in ("float16", "float8_e4m3fn"):
            cache = torch.empty((100, 16, 2, 32), dtype=getattr(torch, stored))
            shape = attention_shape(q, cache, table)
            assert shape == AttentionShape(7, 3, 8, 2, 32, 16, keys, "float16", stored)


def test_text() -> None:
    assert text_of(LogitsShape(3, 5, "float32")) == "rows=3 vocab=5 dtype=float32"
    assert text_of(TILING) == text_of(json.loads(json.dumps(CHOICE.to_json()))["tiling"])
    assert text_of(TILING) == "tiles=[(rows=16 first=False), (rows=32 first=True)] inner=(rows=8 first=False) warps=4"


def test_choices_need_no_triton() -> None:
    code = "import sys, dgraph.lowering.tuning; sys.exit(any(m.partition('.')[0] == 'triton' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
