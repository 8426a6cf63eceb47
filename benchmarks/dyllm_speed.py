"""DyLLM against the original loop and against Fast-dLLM's dual cache, at a published shape with random weights.

    python -m benchmarks.dyllm_speed --shape llada-8b --batch 16 --prompt 1024 --schedules 4/4 4/8 --update off

Every arm commits a fixed number of tokens per step. Random weights say nothing about how many rows are salient, so
DyLLM is measured with what the weights give (tau) and with salient rows drawn as the paper's Table 4 lists them for
four layers, interpolated over the others. The table gives the mean number of salient rows over steps, of which every
fourth runs on the prompt as well (the published schedule); so a row is salient with the probability that makes this
mean (arm "table"), prompt and response alike, under any schedule. Arm "shares" reads the same numbers as shares of the
256 response rows and gives prompt rows those shares too, which is twice as many salient rows. Each of DyLLM's arms is
run with contexts updated and with rows that all attend (`update=False`), as `--update` says. A schedule is the number
of full steps at the beginning of a response, and every how many steps after them the prompt is forwarded, too (0:
never).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dgraph
from benchmarks.full_forward import seconds_per_step
from benchmarks.tables import Report
from dgraph.bench.profile import Enough
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.families import Model
from dgraph.ir.graph import Graph
from dgraph.models.shapes import random_model
from dgraph.passes import Effect, Pass, base
from dgraph.passes.salience import finder, flags_of
from dgraph.runtime.results import Progress
from dgraph.runtime.stats import GenerationStats
from dgraph.types.shapes import InputSpec

# Salient rows at a quarter, half, three quarters and the end of the layers: GSM8K, mean over the steps listed.
TABLE_4 = {"llada-8b": (24.6, 44.5, 62.2, 37.4), "dream-7b": (33.5, 43.2, 67.0, 44.4)}
ARMS = ("table", "fast_dllm", "tau", "shares")
PUBLISHED = 4
"""Every so many steps of those that the table was measured on forward the prompt, too."""


def shares(shape: str, layers: int, rows: float) -> tuple[float, ...]:
    """Share of salient rows of each layer, linear between the paper's four layers; before its first, as there.

    rows: of a sequence, of which the paper's numbers are taken to be a part.
    """
    known = TABLE_4[shape]
    found = []
    for layer in range(layers):
        at = (layer + 1) / layers * len(known) - 1
        low = max(0, min(int(at), len(known) - 2)) if at > 0 else 0
        part = min(max(at - low, 0.0), 1.0)
        found.append((known[low] * (1 - part) + known[low + 1] * part) / rows)
    return tuple(found)


@dataclass(frozen=True)
class ScriptSalience(Pass):
    """Let a fixed share of the rows of each layer be salient, drawn anew in each step; what finds them still runs.

    Attributes:
        share: of each layer.
    """

    share: tuple[float, ...] = ()

    effect = Effect.APPROXIMATE
    summary = "salient rows by share instead of by cosine, to measure speed"
    signature = frozenset({"noise"})
    changes_weights = True

    def run(self, graph: Graph, report: base.Report) -> None:
        graph.add_input(InputSpec("noise", torch.float32, ("N",)))
        for layer, share in enumerate(self.share):
            found = finder(graph, layer)
            if found is None:
                continue
            flags = flags_of(found)
            noise, full = (graph.on_rows_of(name, flags, report.name) for name in ("noise", "full"))
            # A weight: as a number it would make the compiled regions of no two layers alike.
            held = graph.add_weight(f"share.{layer}", torch.tensor([share], device=graph.device))
            drawn = graph.call(torch.ops.aten.lt.Tensor, (noise, held), before=flags.next, by=report.name, like=flags)
            chosen = graph.call(
                torch.ops.aten.logical_or.default, (drawn, full), before=drawn.next, by=report.name, like=flags
            )
            graph.redirect(flags, chosen, after=chosen)
            report.did(f"{share:.3f} of the rows", layer)


def schedule(text: str) -> tuple[int, int]:
    """Full steps and period, from "4/8"."""
    full, period = text.split("/")
    return int(full), int(period)


def scripted(model: Model, share: tuple[float, ...], **options: Any) -> dgraph.Recipe:
    """The recipe dyllm with salient rows by share."""
    recipe = dgraph.recipe("dyllm", model.spec, **options)
    phases = tuple(replace(phase, passes=(*phase.passes, ScriptSalience(share))) for phase in recipe.phases)
    return replace(recipe, phases=phases)


def capture(program: CompiledModel, prompts: list[list[int]], tokens: int, steps: int, enough_steps: int) -> None:
    """Meet every kind of step once: the full ones, those with the prompt and those without."""
    seen = iter(range(enough_steps))

    def enough(progress: Progress) -> None:
        if next(seen, None) is None:
            raise Enough

    with contextlib.suppress(Enough):
        program.generate(input_ids=prompts, max_new_tokens=tokens, steps=steps, progress=enough)


def decode(program: CompiledModel, prompts: list[list[int]], tokens: int, steps: int) -> tuple[float, GenerationStats]:
    """Seconds of a generation, which has no prefill here, and its statistics; nobody watches its progress."""
    begin = time.perf_counter()
    stats = program.generate(input_ids=prompts, max_new_tokens=tokens, steps=steps).stats
    return time.perf_counter() - begin, stats


def salient_rows(stats: GenerationStats, full: int) -> float:
    """Salient rows of a batch: mean over layers with a gate and over steps after the full ones; 0 without a gate."""
    counts = [count for step in stats.salient[full:] for count in step]
    return statistics.fmean(counts) if counts else 0.0


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=TABLE_4, default="llada-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--per-step", type=int, nargs="+", default=[1, 4], help="tokens per step")
    parser.add_argument("--tau", type=float, default=0.99)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS[:3])
    parser.add_argument("--original-steps", type=int, default=12, help="timed steps of the original loop")
    parser.add_argument("--schedules", nargs="+", type=schedule, default=[(4, 4)], metavar="FULL/PERIOD")
    parser.add_argument("--update", nargs="+", choices=("on", "off"), default=["on"], help="update contexts, or attend")
    parser.add_argument("--weights", help="as `dgraph.optimize` takes them; the original loop has them as they are")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    changes: dict[str, Any] = {"block_length": args.block, "eos_ids": ()}
    if args.layers:
        changes["num_hidden_layers"] = args.layers
    model = random_model(args.shape, args.device, torch.bfloat16 if args.device != "cpu" else torch.float32, **changes)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, model.spec.vocab // 2, (args.batch, args.prompt), generator=draw)
    masks = torch.full((args.batch, args.tokens), model.spec.mask_id)
    canvas = torch.cat([prompts, masks], dim=1).to(args.device)
    original = seconds_per_step(model, canvas, args.tokens, args.original_steps)
    print(f"original loop: {1e3 * original:.1f} ms per step", flush=True)

    layers = model.spec.layers
    drawn = shares(args.shape, layers, args.tokens + args.prompt / PUBLISHED)
    doubled = shares(args.shape, layers, args.tokens)

    def recipe_of(arm: str, **options: Any) -> tuple[str, dgraph.Recipe]:
        match arm:
            case "table":
                return "dyllm, rows of Table 4", scripted(model, drawn, **options)
            case "shares":
                return "dyllm, Table 4 as shares", scripted(model, doubled, **options)
            case "tau":
                return f"dyllm, tau {args.tau}", dgraph.recipe("dyllm", model.spec, tau=args.tau, **options)
            case _:
                return "fast_dllm dual", dgraph.recipe("fast_dllm", model.spec)

    runs_of = [(arm, 4, 4, "on") for arm in args.arms if arm == "fast_dllm"]
    runs_of += [
        (arm, *found, update)
        for found in args.schedules for arm in args.arms for update in args.update if arm != "fast_dllm"
    ]  # fmt: skip
    weights = "" if args.weights is None else f", weights {args.weights}"
    report = Report(f"DyLLM at the {args.shape} shape{weights}")
    rows: dict[int, list[list[str | int | float]]] = {n: [] for n in args.per_step}
    for arm, full, period, update in runs_of:
        options = {"full_steps": full, "response_only_period": period, "update": update == "on"}
        label, recipe = recipe_of(arm, **options)
        label += "" if update == "on" else ", all attend"
        plan = "" if arm == "fast_dllm" else f"{full}/{period}"
        program = dgraph.optimize(model, recipe, backend=args.backend, buckets="fine", weights=args.weights)
        if program.transitions is not None:
            program.transitions.often = 0  # a long run is what is measured
        for per_step in args.per_step:
            steps = args.block // per_step
            capture(program, prompts.tolist(), args.tokens, steps, full + period + 2)
            runs = [decode(program, prompts.tolist(), args.tokens, steps) for _ in range(args.repeat)]
            seconds = statistics.median(s for s, _ in runs)
            stats = runs[-1][1]
            step = seconds / stats.steps
            peak = torch.cuda.max_memory_allocated() / 1e9 if args.device != "cpu" else 0.0
            salient = salient_rows(stats, full) / args.batch
            row = [label, plan, stats.steps, 1e3 * step, original / step, stats.decoded / seconds, salient, peak]
            rows[per_step].append(row)
            print(per_step, *row, sep="\t", flush=True)
        del program
    columns = ["arm", "schedule", "steps", "ms/step", "original / this", "tokens/s", "salient rows", "peak GB"]
    for per_step, found in rows.items():
        first: list[str | int | float] = [
            "original loop",
            "",
            "",
            1e3 * original,
            1.0,
            args.batch * per_step / original,
            "",
            "",
        ]
        title = f"{args.batch} sequences, prompt {args.prompt}, {args.tokens} new tokens, {per_step} per step"
        report.table(title, columns, [first, *found])
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
