"""Phases as files of torch.export: a process that never imports the compiler gets the numbers of the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.compiler.exporting import ABOUT, exported_program
from dgraph.errors import InputError, UnknownName
from dgraph.ops import OPS
from dgraph.passes import ShardTensorParallel
from dgraph.passes.manager import run_passes
from dgraph.testing import models
from dgraph.testing.models import prompts
from tests.tiny import Hand

CASES = {"dense": "sdar", "focus": "sdar", "dyllm": "llada", "maskkv": "llada"}
"""The family whose step is exported, by recipe."""
CHILD = """
import sys, torch, dgraph.ops
for case in sys.argv[1:]:
    given = torch.load(case + ".inputs")
    program = torch.export.load(case + ".pt2").module()
    with torch.no_grad():
        outputs = program(**given)
    torch.save((dict(outputs), given), case + ".outputs")
compiler = ("api", "compiler", "frontend", "ir", "lowering", "passes", "recipes", "runtime")
print([name for name in compiler if "dgraph." + name in sys.modules])
"""


def made(recipe: str) -> CompiledModel:
    (tiny,) = models(None, CASES[recipe])
    return tiny.optimized(recipe)


def a_call(optimized: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """The inputs of a step in the middle of a generation, its outputs, and what it left in its caches."""
    program, calls = optimized.programs["step"], list[tuple[Any, ...]]()
    bound = program.bound

    def watched(inputs: dict[str, Tensor]) -> Any:
        mine, run = {name: inputs[name] for name in program.inputs}, bound(inputs)
        before = {name: value.clone() for name, value in mine.items()}

        def on(rows: int) -> Any:
            result = run(rows)
            cut = {name: v[:rows] if program.inputs[name].per == "row" else v for name, v in before.items()}
            outputs = {name: value.clone() for name, value in result.outputs.items()}
            caches = {name: v.clone() for name, v in mine.items() if program.inputs[name].in_place}
            calls.append((cut, outputs, caches))
            return result

        return on

    (tiny,) = models(None, optimized.spec.family)
    with monkeypatch.context() as patch:
        patch.setattr(program, "bound", watched)
        optimized.generate(input_ids=prompts(tiny), max_new_tokens=12, threshold=0.9, ignore_eos=True)
    return calls[2]


@pytest.mark.parametrize("cases", [("dense", "focus"), pytest.param(("dyllm", "maskkv"), marks=pytest.mark.release)])
def test_a_process_without_the_compiler_gets_the_same_numbers(
    cases: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {}
    for case in cases:
        optimized = made(case)
        inputs, *wanted[case] = a_call(optimized, monkeypatch)
        torch.save(inputs, tmp_path / f"{case}.inputs")
        written = optimized.export(tmp_path / f"{case}.pt2")
        assert written.inputs == tuple(inputs)
        assert written.size == (tmp_path / f"{case}.pt2").stat().st_size
    # Sums of a product depend on the number of threads.
    threads = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    words = [sys.executable, "-c", CHILD, *(str(tmp_path / case) for case in cases)]
    done = subprocess.run(words, capture_output=True, text=True, env=threads)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    for case, (outputs, caches) in wanted.items():
        found, after = torch.load(tmp_path / f"{case}.outputs")
        assert found.keys() == outputs.keys()
        for name, value in outputs.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=f"{case} {name}")
        for name, value in caches.items():
            assert torch.equal(after[name], value), f"{case} {name}"


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    optimized, said = made("dense"), {ABOUT: ""}
    assert str(optimized.export(tmp_path / "prefill.pt2", "prefill")).endswith(
        "prefill.pt2: prefill, 13 inputs, 0 outputs"
    )
    program = torch.export.load(tmp_path / "prefill.pt2", extra_files=said)
    about, graph = json.loads(said[ABOUT]), optimized.graph("prefill")
    assert (about["phase"], about["recipe"]) == ("prefill", optimized.recipe.to_json())
    assert about["outputs"] == []
    assert list(about["inputs"]) == list(graph.inputs)
    assert about["inputs"]["cu_rows"] == {"dtype": "i32", "shape": ["b+1"], "per": "offsets", "in_place": False}
    assert program.state_dict.keys() == graph.tensors.keys()


def test_sizes_are_open_and_related() -> None:
    hand = Hand()
    x, cu_rows = hand.input("x", "N", 4), hand.input("cu_rows", "b+1", dtype=torch.int32)
    y = hand.call(torch.ops.aten.mul.Tensor, x, 2.0)
    index = hand.call(OPS["block_numbers"].overload, hand.input("positions", "N", dtype=torch.int64), cu_rows, 8)
    program = exported_program(hand.returns(y=y, index=index)).module()
    for rows in (1, 2, 40):
        given = {"x": torch.ones(rows, 4), "cu_rows": torch.tensor([0, rows], dtype=torch.int32)}
        found = program(**given, positions=torch.arange(rows))
        assert torch.equal(found["y"], given["x"] * 2)
    with pytest.raises((RuntimeError, AssertionError)):
        program(x=torch.ones(3, 4), cu_rows=torch.tensor([0, 3], dtype=torch.int32), positions=torch.arange(2))


def test_what_cannot_be_exported_is_refused_before_any_work(tmp_path: Path) -> None:
    optimized = made("dense")
    with pytest.raises(InputError, match=r"end it in \.pt2"):
        optimized.export(tmp_path / "step.zip")
    with pytest.raises(InputError, match="there is no folder"):
        optimized.export(tmp_path / "nowhere" / "step.pt2")
    with pytest.raises(UnknownName, match="phase 'steps'"):
        optimized.export(tmp_path / "step.pt2", "steps")
    part = models(None, "sdar")[0].graph.copy()
    run_passes(part, [ShardTensorParallel(2, rank=0)])
    with pytest.raises(InputError, match="export the whole model"):
        exported_program(part)
    assert not list(tmp_path.iterdir())
