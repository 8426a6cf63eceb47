"""A step over several GPUs: measured over the ranks that torchrun starts, and as a model of 2, 4 and 8 from one GPU.

    torchrun --nproc-per-node=2 -m benchmarks.tensor_parallel sdar-8b/focus/64 llada-8b/fast_dllm/1 --json FILE
    python -m benchmarks.tensor_parallel llada-8b/dense/16 --collectives collectives.json
    torchrun --nproc-per-node=2 -m benchmarks.tensor_parallel sdar-8b/focus/2 --tiny --device cpu --repeat 1

A case is shape/recipe/sequences.

Measured: milliseconds per step of `generate`, from two lengths of response in turn, so that prefill and start cancel
out; of one rank (each by itself, with the whole model) and of all together, beside what the model predicts of these.
The model's step of W ranks is

    products(W) + sums(W) + the rest of one rank's step, a share of which (attention) is divided as well

where products are timed here at the sizes of a rank and the rows that steps ran on, sums are those that
`benchmarks.collectives` has measured (for its number of ranks) or follow from LATENCY and LINK, and the rest is one
rank's step without its products: launches, norms, attention, and what lies between steps. What is modelled is labelled
so; it has not been measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dgraph
import dgraph.parallel
from benchmarks.engine_steps import per_step
from benchmarks.tables import Cell, Report
from dgraph.bench.floor import Device, StepCount, floor_of, row_sets_of, work_of
from dgraph.bench.measure import Counter
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.compiler.phases import rewrite
from dgraph.families import Model
from dgraph.ir.graph import Graph
from dgraph.models.shapes import random_model
from dgraph.passes import ShardTensorParallel
from dgraph.passes.manager import run_passes

LINK = 450e9
"""Bytes per second that a GPU sends over NVLink 4, as published: 900e9 in both directions together."""
LATENCY = 10e-6
"""Seconds of a sum of few bytes over the ranks of one host, an assumption where none was measured."""
TINY: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 256, "head_dim": 16}
"""Sizes with which the script itself is tried; heads stay as many."""


@dataclass(frozen=True)
class Case:
    """One comparison: a published shape under a recipe, with so many sequences."""

    shape: str
    recipe: str
    sequences: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that a command line gives as shape/recipe/sequences; ValueError for anything else."""
        shape, recipe, sequences = text.split("/")
        return cls(shape, recipe, int(sequences))

    def __str__(self) -> str:
        return f"{self.shape}, {self.recipe}, {self.sequences}"

    def prompts(self, length: int) -> list[list[int]]:
        """Token ids of a prompt for each sequence, equally long."""
        return [[100 + (7 * at + row) % 1000 for at in range(length)] for row in range(self.sequences)]


def measured(model: Model, case: Case, given: argparse.Namespace, mesh: Any) -> tuple[float, CompiledModel]:
    """Milliseconds per step over a mesh, or of this process alone."""
    optimized = dgraph.optimize(model, case.recipe, backend=given.backend, mesh=mesh, artifacts=not given.tiny)
    tokens, steps = given.blocks * model.spec.block_length, steps_of(model, given)
    times = per_step(optimized, case.prompts(given.prompt), tokens, steps, given.repeat)
    return statistics.median(times), optimized


def steps_of(model: Model, given: argparse.Namespace) -> int:
    """Steps per block."""
    return given.steps or max(1, model.spec.block_length // 4)


def rows_of_steps(optimized: CompiledModel, case: Case, given: argparse.Namespace) -> list[StepCount]:
    """What the steps of one response ran on, those after an eviction included."""
    counter = Counter.of(optimized, work_of(optimized.graph("step")))
    tokens, steps = given.blocks * optimized.spec.block_length, steps_of(optimized.model, given)
    optimized.generate(input_ids=case.prompts(given.prompt), max_new_tokens=tokens, steps=steps, observer=counter)
    return counter.counts


def sums(graph: Graph, counts: Sequence[StepCount], world: int, known: Mapping[int, float] | None) -> tuple[float, int]:
    """Seconds that the sums of a step over ranks take in a row, in the mean of steps, and how many there are."""
    row_sets, calls = row_sets_of(graph), graph.find("all_reduce")
    total = 0.0
    for call in calls:
        value, row_set = call.meta["val"], graph.row_set(call)
        rows = 1.0 if row_set is None else statistics.mean(c.rows[row_sets.index(row_set)] for c in counts)
        sizes = value.shape if row_set is None else value.shape[1:]
        width = math.prod(int(size) for size in sizes)
        total += sum_seconds(round(rows * width * value.dtype.itemsize), world, known)
    gathers = graph.find("all_gather")
    return total + len(gathers) * LATENCY, len(calls) + len(gathers)


def sum_seconds(size: int, world: int, known: Mapping[int, float] | None) -> float:
    """Seconds of a sum of so many bytes: measured, between the two sizes next to it, or by latency and link."""
    if known:
        at = sorted(known)
        low = max([s for s in at if s <= size], default=at[0])
        high = min([s for s in at if s >= size], default=at[-1])
        if low == high:
            return known[low] * max(1.0, size / low)
        return known[low] + (known[high] - known[low]) * (size - low) / (high - low)
    return LATENCY + 2 * (world - 1) / world * size / LINK


def measured_sums(path: Path | None) -> dict[int, dict[int, float]]:
    """By number of ranks and bytes, seconds of the kind that is chosen: the fastest of those in graphs."""
    if path is None:
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))["data"]
    kinds = {name: times for name, times in data["microseconds"].items() if "graph" in name} or data["microseconds"]
    sizes = {int(size) for times in kinds.values() for size in times}
    best = {size: min(t[str(size)] for t in kinds.values() if str(size) in t) / 1e6 for size in sizes}
    return {int(data["world"]): best}


def modelled(
    model: Model,
    case: Case,
    given: argparse.Namespace,
    step: float,
    counts: Sequence[StepCount],
    device: torch.device,
    worlds: Sequence[int] = (2, 4, 8),
) -> list[list[Cell]]:
    """Rows of the model's table for one case.

    Args:
        step: seconds of one rank's, in the mean.
        counts: what steps ran on.
        worlds: numbers of ranks after the one.
    """
    captured, times, known = dgraph.capture(model), Device(device), measured_sums(given.collectives)
    chosen = dgraph.recipe(case.recipe, model.spec)
    found: list[list[Cell]] = []
    rest = 0.0
    for world in (1, *worlds):
        divided = captured.copy()
        if world > 1:
            run_passes(divided, [ShardTensorParallel(world)])
        graph = rewrite(divided, chosen)["step"].graph
        work = work_of(graph)
        floor = floor_of(work, counts, times)
        attention = floor.attention or 0.0  # not known of every recipe
        head = times_of_head(model, world, counts, times) if work.head is None else floor.head
        products = floor.linear + floor.experts + head
        if world == 1:
            rest = max(0.0, step - products - attention)
        took, count = (0.0, 0) if world == 1 else sums(graph, counts, world, known.get(world))
        total = products + attention + took + rest
        source = "measured" if world in known else "link"
        found.append(
            [
                str(case),
                world,
                1e3 * products,
                "" if floor.attention is None else 1e3 * attention,
                f"{1e3 * took:.3g} ({count}, {source})" if world > 1 else "",
                1e3 * rest,
                1e3 * total,
                (step or total) / total,
            ]
        )
        del divided, graph, work
        gc.collect()
    return found


def times_of_head(model: Model, world: int, counts: Sequence[StepCount], times: Device) -> float:
    """Seconds of a rank's part of the LM head, where the program does not say."""
    spec, rows = model.spec, [count.head for count in counts]
    shape = (-(-spec.vocab // world), width_of(model))
    times.measure(shape, spec.dtype, rows)
    return statistics.mean(times.product(shape, spec.dtype, r) for r in rows)


def width_of(model: Model) -> int:
    """Columns of the embedding."""
    return max(int(p.shape[-1]) for name, p in model.module.named_parameters() if "embed" in name or "wte" in name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure where there are ranks, and model where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=Case.parse, metavar="SHAPE/RECIPE/SEQUENCES")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=2, help="of the shorter response")
    parser.add_argument("--steps", type=int, help="per block; default a quarter of its tokens")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="sizes with which the script itself is tried")
    parser.add_argument("--collectives", type=Path, help="what benchmarks.collectives --json wrote")
    parser.add_argument("--alone", action="store_true", help="no run of one rank next to that of all of them")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    kind = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if given.alone and ranks == 1:
        parser.error("--alone leaves one rank out, and there is only one: start it by torchrun, or leave it out")
    mesh = dgraph.parallel.init(kind) if ranks > 1 else None
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    leads, dtype = os.environ.get("RANK", "0") == "0", torch.float32 if kind == "cpu" else torch.bfloat16
    report, rows, model_rows = Report("A step over several GPUs"), list[list[Cell]](), list[list[Cell]]()
    changes: dict[str, Any] = {} if given.layers is None else {"num_hidden_layers": given.layers}
    if given.tiny:
        changes |= TINY
    for case in given.cases:
        model = random_model(case.shape, device, dtype, **changes)
        try:
            alone, predicted = math.nan, math.nan
            if not given.alone:
                alone, optimized = measured(model, case, given, None)
                if leads:  # the other ranks wait for it where they first meet
                    counts = rows_of_steps(optimized, case, given)
                    worlds = (2, 4, 8) if mesh is None else (ranks,)
                    model_rows += modelled(model, case, given, alone / 1e3, counts, device, worlds)
                    predicted = alone / model_rows[-1][-1]  # type: ignore[operator]
                del optimized  # weights that its passes stacked
            if mesh is not None:
                together = measured(model, case, given, mesh)[0]
                rows.append([str(case), alone, together, alone / together, alone / together / ranks, predicted])
            if leads:
                print(case, f"one rank {alone:.3f} ms", rows[-1:] or model_rows[-4:], flush=True)
        except Exception:
            print(f"FAILED on rank {os.environ.get('RANK', '0')}: {case}", flush=True)
            traceback.print_exc()
        del model
        gc.collect()
        if kind == "cuda":
            torch.cuda.empty_cache()
    if not leads:
        return
    setting = f"prompts of {given.prompt}"
    if rows:
        columns = ["shape, recipe, sequences", "one rank", f"{ranks} ranks", "speed-up", "efficiency", "modelled"]
        report.table(f"Measured: milliseconds per step, {setting}", columns, rows)
    if model_rows:
        columns = ["shape, recipe, sequences", "ranks", "products", "attention", "sums", "rest", "step", "speed-up"]
        note = "a model, not a measurement, but for products of a rank's sizes and the step of one rank"
        report.table(f"Modelled: milliseconds per step, {setting}", columns, model_rows, note)
    report.write(given.markdown, given.json)


if __name__ == "__main__":
    main()
