"""Each recipe alone and in combinations at a published shape: one batch, random weights, a fixed number of commits.

    python -m benchmarks.combinations --shape llada-8b --json combinations.json --markdown combinations.md
    python -m benchmarks.combinations --shape sdar-8b --batch 64 --weights w8a8-fp8 --arms dense focus dyllm+focus

An arm is RECIPE[:KEY=VALUE,...]. Prompts are random tokens of equal length, and a step commits the same number of
tokens in each sequence. After the first block, whose first step computes everything, blocks are alike: the figures are
of the blocks after it. The median of their times is taken, and tokens per second are those of a block. The dense model
of a bidirectional shape forwards the whole canvas in every step, so `--dense-steps` of its steps are timed.

Random weights do not say how many rows are salient. With a gate (dyllm) each layer therefore computes a given share of
the rows, drawn anew in each step: `--share` gives it for all rows of steps after the first; several give a row of the
table each. Rows that FOCUS keeps follow from the weights and the number of commits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

import dgraph
from benchmarks.dyllm_speed import ScriptSalience
from benchmarks.runs import Run, add_run
from benchmarks.tables import Cell
from dgraph.bench.profile import Enough
from dgraph.cli.options import recipe_options
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.memory.profile import kv_cost_of
from dgraph.families import Model
from dgraph.models.shapes import SHAPES, random_model
from dgraph.runtime.results import Progress
from dgraph.settings import named

ALONE = ("dense", "focus", "dyllm", "dllm_serve", "maskkv")
PAIRS = ("dyllm+focus", "dllm_serve+focus", "dllm_serve+dyllm", "maskkv+dyllm")
ARMS = (*ALONE, *PAIRS, "maskkv+dyllm+focus", "dllm_serve+dyllm+focus")
CANVAS = ("fast_dllm", "dllm_serve:delay=1", "dllm_serve+dyllm:delay=1")
"""Arms of a bidirectional model besides."""
COLUMNS = (
    "arm",
    "salient",
    "ms/step",
    "ms of a refresh",
    "tok/s",
    "x dense",
    "rows/token",
    "KV GB",
    "peak GB",
    "built s",
)


@dataclass(frozen=True)
class Timed:
    """Figures of an arm.

    Attributes:
        step, refresh: seconds of the median step, and of the slowest of a block, which refreshes on a canvas.
        rate: tokens per second.
        rows: forwarded rows per token.
    """

    step: float
    refresh: float
    rate: float
    rows: float


def recipe_of(model: Model, arm: str) -> tuple[dgraph.Recipe, bool]:
    """The recipe of an arm, and whether a gate in it follows a script."""
    name, options = named(arm)
    recipe = dgraph.recipe(name, model.spec, **recipe_options(name, options))
    gate = [step.name for step in recipe.phase("step").passes if step.name in ("GateFFN", "PartialAttention")]
    if "GateFFN" not in gate:
        return recipe, False
    return recipe.inserting(ScriptSalience((1.0,) * model.spec.layers), after=gate[-1]), True


def set_share(program: CompiledModel, share: float) -> None:
    """Let each layer compute another share of the rows; programs and their CUDA graphs read it from memory."""
    for phase in program.phases:
        for name, held in program.graph(phase).tensors.items():
            if name.startswith("share."):
                held.fill_(share)


def timed(program: CompiledModel, prompts: list[list[int]], args: argparse.Namespace, most: int | None) -> Timed:
    """Generate once. most: steps after which it ends, which then count from the first on; None for all."""
    ends, decoded = [time.perf_counter()], [0]

    def note(progress: Progress) -> None:
        if progress.decoded > decoded[-1]:
            ends.append(time.perf_counter())
            decoded.append(progress.decoded)
        if most is not None and len(ends) > most:
            raise Enough

    rows = 0.0
    with suppress(Enough):
        found = program.generate(input_ids=prompts, max_new_tokens=args.tokens, steps=args.steps, progress=note)
        rows = sum(found.stats.sequence_rows) / found.stats.decoded
    seconds = [b - a for a, b in pairwise(ends)]
    if most is not None:
        step = statistics.median(seconds[1:])
        return Timed(step, step, len(prompts) * args.block / args.steps / step, rows)
    blocks = [seconds[at : at + args.steps] for at in range(args.steps, len(seconds), args.steps)]
    whole = statistics.median(sum(block) for block in blocks)
    step = statistics.median(second for block in blocks for second in block)
    refresh = statistics.median(max(block) for block in blocks)
    return Timed(step, refresh, len(prompts) * args.block / whole, rows)


def measured(run: Run, model: Model, prompts: list[list[int]], weights: str | None, dense: float) -> float:
    """Measure each arm under a format of weights; return the dense model's tokens per second, or `dense`."""
    args, rows = run.given, list[list[Cell]]()
    causal = model.spec.attention == "block_causal"
    title = f"{args.shape or args.model}, {weights or 'weights as loaded'}"
    for arm in args.arms or (ARMS if causal else (*ARMS, *CANVAS)):
        if run.late(f"{title}, {arm}"):
            continue
        with run.told(f"{title}, {arm}"):
            recipe, gated = recipe_of(model, arm)
            begin = time.perf_counter()
            program = dgraph.optimize(model, recipe, backend=args.backend, weights=weights, device=args.device)
            most = args.dense_steps if arm == "dense" and not causal else None
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            timed(program, prompts, args, None if most is None else 2)  # records graphs, compiles what is left
            built = time.perf_counter() - begin
            for share in args.share if gated else [1.0]:
                set_share(program, share)
                runs = [timed(program, prompts, args, most) for _ in range(args.repeat)]
                best = sorted(runs, key=lambda each: each.rate)[len(runs) // 2]
                dense = best.rate if arm == "dense" else dense
                peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
                kept = kv_cost_of(program).sequence(args.prompt + args.tokens, args.tokens) * len(prompts) / 1e9
                figures = (1e3 * best.step, 1e3 * best.refresh, best.rate, best.rate / dense if dense else "")
                rows.append([arm, share if gated else "", *figures, best.rows, kept, peak, built])
                run.arm(title, COLUMNS, rows)
            del program
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return dense


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model", help="an embedded model or a folder, instead of random weights of a shape")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16, help="per block")
    parser.add_argument("--dense-steps", type=int, default=4)
    parser.add_argument("--share", type=float, nargs="+", default=[0.35], help="of the rows that a gate computes")
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--weights", nargs="+", default=["as-loaded"], help="as `dgraph.optimize` takes them")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_run(parser)
    args = parser.parse_args()
    with Run(args, "Recipes and combinations", alone=True) as run:
        with run.stage("weights"):
            changes: dict[str, Any] = {"block_length": args.block, "eos_ids": ()}
            if args.model:
                model = dgraph.load(args.model, device=args.device)
                model = replace(model, spec=replace(model.spec, **changes))
            else:
                changes |= {"num_hidden_layers": args.layers} if args.layers else {}
                dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
                model = random_model(args.shape or "llada-8b", args.device, dtype, **changes)
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(10, model.spec.vocab // 2, (args.batch, args.prompt), generator=draw).tolist()
        for weights in args.weights:
            measured(run, model, prompts, None if weights == "as-loaded" else weights, 0.0)


if __name__ == "__main__":
    main()
