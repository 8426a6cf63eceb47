"""Products and steps by quantised weights, beside those by weights as they are.

    python -m benchmarks.quantised --device cuda --markdown quantised.md
    python -m benchmarks.quantised --scale 4 --rows 1 32 --rounds 20

First the four products of an 8B layer (qkv, out, gate and up, down), their sizes divided by --scale, in every format
and for some row counts: all four of an arm in a row; of weights in 8 bits also with rows in 8 bits. Then a block step
of a model on a CPU, in every format. Above 1 is faster than weights as they are.

On a GPU the calls of an arm are one CUDA graph, whose weights are read from memory, and a time is the median over its
replays; rows in 8 bits were rounded before it, or within it, by a compiled kernel a product, and torch's own product
of float8 rows and weights is beside them. On a CPU times are CPU time of the process on one thread, arms in turn, and
ratios medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dgraph
from benchmarks.cpu_step import inputs_of
from benchmarks.tables import Cell, Report
from dgraph.families.quantised import ROW_KINDS, Format, QuantisedRows, QuantisedWeight, quantise, quantised_rows
from dgraph.lowering.timing import graph_seconds
from dgraph.ops import OPS, launcher
from dgraph.settings import torch_dtype

LAYER = {"qkv": (6144, 4096), "out": (4096, 4096), "gate and up": (24576, 4096), "down": (4096, 12288)}
"""Outputs and inputs, as of SDAR-8B."""
FORMATS = ("fp8", "int8", "int4")
PLAIN = "as they are"
COLD = 2
"""Sets of weights at least, so that no call finds its own in a cache of the last level."""


def cpu_milliseconds(call: Callable[[], Any]) -> float:
    """CPU time of a call."""
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


@torch.no_grad()
def in_turn(arms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time of each arm, round by round; two rounds before them are not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds + 2):
        for name, arm in list(arms.items())[:: 1 if i % 2 else -1]:
            times[name].append(cpu_milliseconds(arm))
    return {name: found[2:] for name, found in times.items()}


@torch.no_grad()
def in_graphs(arms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm on a GPU: one number, the median over replays of a graph."""
    return {name: [1e3 * graph_seconds([arm], rounds)] for name, arm in arms.items()}


def compared(times: Mapping[str, list[float]]) -> list[list[Cell]]:
    """By arm: median milliseconds, and how many times as fast as weights as they are."""
    plain = times[PLAIN]
    return [
        [name, statistics.median(found), statistics.median(a / b for a, b in zip(plain, found, strict=True))]
        for name, found in times.items()
    ]


Weights = Sequence[Tensor | QuantisedWeight]


def in_a_row(linear: Callable[..., Tensor], xs: Mapping[int, Any], weights: Weights) -> None:
    """Products of all weights and the rows that each takes, by their width."""
    for weight in weights:
        linear(xs[weight.shape[1]], weight, None)


def rounded(linear: Callable[..., Tensor], kind: str, compile: bool) -> Callable[..., Tensor]:
    """A product that rounds its rows first."""
    round_rows = torch.compile(quantised_rows, dynamic=True) if compile else quantised_rows
    return lambda x, weight, bias: linear(QuantisedRows(*round_rows(x, kind), x.dtype), weight, bias)


def by_torch(x: QuantisedRows, weight: QuantisedWeight, bias: None) -> Tensor:
    """torch's product of float8 rows and weights, with a scale for each row of either."""
    scales = x.scales, weight.scales.t()
    found: Tensor = torch._scaled_mm(x.values, weight.values.t(), *scales, out_dtype=x.dtype)
    return found


def arms_of(xs: Mapping[int, Tensor], weights: Mapping[str, Weights], device: torch.device) -> dict[str, Any]:
    """What is timed, by name, and the weights that each reads."""
    linear, on_gpu = launcher(OPS["linear"], device), device.type == "cuda"
    found = {name: (partial(in_a_row, linear, xs, mine), mine) for name, mine in weights.items()}
    for kind in ROW_KINDS:
        mine = weights[kind]
        numbers = {width: QuantisedRows(*quantised_rows(x, kind), x.dtype) for width, x in xs.items()}
        found[f"w8a8-{kind}"] = partial(in_a_row, linear, numbers, mine), mine
        found[f"w8a8-{kind} and rounding"] = partial(in_a_row, rounded(linear, kind, on_gpu), xs, mine), mine
        if kind == "fp8" and on_gpu:
            found[f"w8a8-{kind} by torch"] = partial(in_a_row, by_torch, numbers, mine), mine
    return found


def products(
    report: Report, device: torch.device, dtype: torch.dtype, scale: int, rows: Sequence[int], rounds: int
) -> None:
    """The table of the four products."""
    sizes = [(outputs // scale, inputs // scale) for outputs, inputs in LAYER.values()]
    draw = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=dtype)

    weights: dict[str, Weights] = {PLAIN: [random(*size) for _ in range(COLD) for size in sizes]}
    for kind in FORMATS:
        weights[kind] = [quantise(weight, Format(kind)) for weight in weights[PLAIN] if isinstance(weight, Tensor)]
    table: list[list[Cell]] = []
    for count in rows:
        arms = arms_of({inputs: random(count, inputs) for _, inputs in sizes}, weights, device)
        timed = in_graphs if device.type == "cuda" else in_turn
        found = compared(timed({name: arm for name, (arm, _) in arms.items()}, rounds))
        for name, median, ratio in found:
            gigabytes = 1e-6 * sum(weight.nbytes for weight in arms[str(name)][1]) / float(median)
            table.append([f"{count} rows, {name}", float(median) / COLD, ratio, gigabytes])
        report.data[f"products of {count} rows, {str(dtype).removeprefix('torch.')}"] = found
    title = (
        f"The four products of a layer, sizes of 8B / {scale}, {str(dtype).removeprefix('torch.')}, median of {rounds}"
    )
    report.table(title, ["rows, weights", "ms a layer", "times as fast", "GB/s of weights"], table)


def step(report: Report, model: str, recipe: str, dtype: torch.dtype, prompt: int, rounds: int, backend: str) -> None:
    """The table of a block step on a CPU."""
    arms: dict[str, Callable[[], Any]] = {}
    bytes_of: dict[str, int] = {}
    for weights in (None, *FORMATS):
        made = dgraph.optimize(model, recipe, weights=weights, dtype=dtype, backend=backend, artifacts=False)
        program = made.programs["step"]
        inputs = {name: value.to(program.inputs[name].dtype) for name, value in inputs_of(program, prompt, 1).items()}
        arms[weights or PLAIN] = lambda program=program, inputs=inputs: program(inputs, len(inputs["input_ids"]))  # type: ignore[misc]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in program.graph.tensors.values()
        }
        bytes_of[weights or PLAIN] = sum(storages.values())
    found = compared(in_turn(arms, rounds))
    table = [[*row, bytes_of[str(row[0])] / 2**20] for row in found]
    kind = str(dtype).removeprefix("torch.")
    title = f"A block step of {model} under {recipe}, {kind}, {prompt} tokens before it, median of {rounds}"
    report.table(title, ["weights", "ms", "times as fast", "MiB of weights"], table)
    report.data[f"step, {kind}"] = found


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", action="append", help="float32 or bfloat16; may be repeated; default: bfloat16")
    parser.add_argument("--scale", type=int, default=1, help="sizes of the products are divided by it")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--model", default="tiny_sdar", help="of the step, an embedded model or a checkpoint folder")
    parser.add_argument("--recipe", default="dense")
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the block of the step")
    parser.add_argument("--backend", default="inductor", help="of the step")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    report = Report("Quantised weights")
    for name in args.dtype or ["bfloat16"]:
        dtype = torch_dtype(name)
        assert dtype is not None
        products(report, device, dtype, args.scale, args.rows, args.rounds)
        if device.type == "cpu":
            step(report, args.model, args.recipe, dtype, args.prompt, args.rounds, args.backend)
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
