"""A block step on a CPU beside the matrix products in it, and what its ops take.

    python -m benchmarks.cpu_step
    python -m benchmarks.cpu_step --recipe focus --rounds 400 --json out.json

One thread, CPU time of the process, arms in turn: on a machine with other work read the ratios, which are medians over
rounds, and not the milliseconds. The step is a block's first one, all rows masked, over caches of random values.

`step` runs as a program runs. `dispatched` calls every op through torch's dispatcher, as programs on a CPU once did.
`products` are the products of a step's linear layers and of the LM head alone, at the same row counts, on
random values, each with a weight of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgraph
from benchmarks.tables import Cell, Report
from dgraph.bench.floor import work_of
from dgraph.bench.products import Mixture
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError
from dgraph.lowering.executor import LoweredProgram
from dgraph.ops import Op, launcher
from dgraph.ops.per_stage import one_stage

CPU = torch.device("cpu")
Call = tuple[Op, tuple[Any, ...]]


def inputs_of(program: LoweredProgram, prompt: int, sequences: int) -> dict[str, Tensor]:
    """Random inputs of a step: all rows of a block after prompts of `prompt` tokens, of which nothing is decoded.

    Raises:
        InputError: the step has an input that is not known here.
    """
    spec, generator = program.graph.spec, torch.Generator().manual_seed(0)
    page, rows = spec.block_length, sequences * spec.block_length
    each = -(-(prompt + spec.block_length) // page)
    values = {
        "input_ids": torch.full((rows,), spec.mask_id),
        "positions": torch.arange(prompt, prompt + spec.block_length).repeat(sequences),
        "limit": torch.full((rows,), prompt + spec.block_length).int(),
        "candidate": torch.ones(rows, dtype=torch.bool),
        "temperature": torch.zeros(rows),
        "seed": torch.zeros(rows, dtype=torch.int64),
        "cu_rows": torch.arange(0, rows + 1, spec.block_length).int(),
        "page_table": torch.arange(sequences * each).view(sequences, each).int(),
        **{name: torch.ones(sequences) for name in ("average", "sequence_average")},
        "reached": torch.full((sequences,), prompt - 1).int(),
    }
    for name, declared in program.inputs.items():
        if declared.per == "position":
            shape = (sequences * each, page, *map(int, declared.shape[2:]))
            values[name] = torch.randn(shape, generator=generator)
        elif name not in values:
            raise InputError(f"input {name!r} of the step is not known here; known are {', '.join(values)}.")
    return {name: values[name] for name in program.inputs}


@contextmanager
def dispatched(program: LoweredProgram) -> Iterator[None]:
    """While it is entered, the program calls its ops through torch's dispatcher."""
    steps = {step: step.function for step in program.calls()}
    for step in steps:
        assert step.op is not None
        step.function = step.op.overload
    try:
        yield
    finally:
        for step, function in steps.items():
            step.function = function


def products(program: LoweredProgram, rows: Sequence[int]) -> Callable[[], None]:
    """The products of a step alone.

    Args:
        program: a step.
        rows: of each of its row sets.

    Raises:
        InputError: the model has experts, whose products depend on the routing.
    """
    work = work_of(program.graph)
    pairs: list[tuple[Tensor, Tensor]] = []
    for shapes, count in zip(work.products, rows, strict=True):
        for shape, times in shapes.items():
            if isinstance(shape, Mixture):
                raise InputError("the products of experts depend on the routing; take a model without experts.")
            pairs += [(torch.randn(count, shape[1]), torch.randn(shape).t()) for _ in range(times)]
    if work.head is not None:
        assert not isinstance(work.head, Mixture)
        pairs.append((torch.randn(rows[-1], work.head[1]), torch.randn(work.head).t()))

    def run() -> None:
        for x, weight in pairs:
            torch.mm(x, weight)

    return run


@torch.no_grad()
def in_turn(arms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time of each arm, round by round; ten rounds before them are not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds + 10):
        # To and fro, since an arm may find in the caches what the one before it read.
        for name, arm in list(arms.items())[:: 1 if i % 2 else -1]:
            start = time.process_time()
            arm()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: found[10:] for name, found in times.items()}


def arms_of(program: LoweredProgram, inputs: Mapping[str, Tensor]) -> dict[str, Callable[[], Any]]:
    """Step, step through the dispatcher, products."""
    result = program(inputs, len(inputs["input_ids"]))
    # Without eviction every row is masked, and of the last row set; with it, what was kept is.
    sets = len(work_of(program.graph).products)
    rows = [*result.rows, result.rows[-1]][:sets]

    def slow() -> None:
        with dispatched(program):
            program(inputs, len(inputs["input_ids"]))

    return {
        "step": lambda: program(inputs, len(inputs["input_ids"])),
        "dispatched": slow,
        "products": products(program, rows),
    }


def calls_in(program: LoweredProgram, inputs: Mapping[str, Tensor]) -> dict[str, list[Call]]:
    """The calls of ops in one step, by name."""
    found: dict[str, list[Call]] = {}
    with program.observed(lambda op, args, _: found.setdefault(op.name, []).append((op, args))):
        program(inputs, len(inputs["input_ids"]))
    return found


def repeat(calls: Sequence[Call], function: Callable[[Op], Callable[..., Any]]) -> None:
    """Make the calls again, as within one stage."""
    with one_stage():
        for op, args in calls:
            function(op)(*args)


def measure(report: Report, program: CompiledModel, prompt: int, sequences: int, rounds: int) -> None:
    """Both tables of a recipe."""
    step = program.programs["step"]
    inputs = inputs_of(step, prompt, sequences)
    times = in_turn(arms_of(step, inputs), rounds)
    floor = times["products"]
    rows: list[list[Cell]] = []
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, floor, strict=True))
        rows.append([name, statistics.median(found), ratio])
    name, what = program.recipe.name, f"{len(inputs['input_ids'])} rows, {prompt} tokens before them"
    report.table(f"A step of {name}: {what}, median of {rounds} rounds", ["arm", "ms", "of products"], rows)
    calls = calls_in(step, inputs)
    arms: dict[str, Callable[[], Any]] = {}
    for op, made in calls.items():
        arms[op] = partial(repeat, made, lambda op: launcher(op, CPU))
        arms[f"{op}, dispatched"] = partial(repeat, made, lambda op: op.overload)
    each = in_turn(arms, rounds)
    medians = {arm: statistics.median(found) for arm, found in each.items()}
    table: list[list[Cell]] = [
        [op, len(made), medians[op], medians[f"{op}, dispatched"], medians[op] / statistics.median(times["step"])]
        for op, made in sorted(calls.items(), key=lambda item: -medians[item[0]])
    ]
    columns = ["op", "calls", "ms", "dispatched", "share of the step"]
    report.table(
        f"Ops in a step of {name}, all calls together", columns, table, "Products within an op are in its time."
    )
    report.data[name] = {"arms": times, "ops": each}


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_llada", help="an embedded model or a checkpoint folder")
    parser.add_argument("--recipe", action="append", help="may be repeated; default: fast_dllm")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = dgraph.load(args.model, torch.float32)
    report = Report(f"A block step of {args.model} on a CPU")
    for recipe in args.recipe or ["fast_dllm"]:
        measure(report, dgraph.optimize(model, recipe), args.prompt, args.sequences, args.rounds)
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
