"""DyLLM against the original loop and against other caches, at a published shape with random weights.

    python -m benchmarks.dyllm_speed --shape llada-8b --batch 16 --prompt 1024 --schedules 4/4 4/8 --update off
    python -m benchmarks.dyllm_speed --arms dllm_cache --per-step 1 --repeat 1 --original-steps 6 --json out.json

The second command takes at most about 100 s on an H200, and as long with the arm fast_dllm:cache=prefix instead.

Every arm commits a fixed number of tokens per step. Baselines are Fast-dLLM's dual and prefix caches, and dLLM-Cache
with the intervals of the paper's Table 6 for GSM8K. Random weights say nothing about how many rows are salient, so
DyLLM is measured with what the weights give (tau) and with salient rows drawn as the paper's Table 4 lists them for
four layers, interpolated over the others. The table gives the mean number of salient rows over steps, of which every
fourth runs on the prompt as well (the published schedule); so a row is salient with the probability that makes this
mean (arm "table"), prompt and response alike, under any schedule. Arm "shares" reads the same numbers as shares of the
256 response rows and gives prompt rows those shares too, which is twice as many salient rows. Each of DyLLM's arms is
run with contexts updated and with rows that all attend (`update=False`), as `--update` says. A schedule is the number
of full steps at the beginning of a response, and every how many steps after them the prompt is forwarded, too (0:
never). On a CPU the shape keeps its layers (see `--layers`) and has small ones.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import dgraph
from benchmarks.full_forward import peak_bytes, reset_peak, seconds_per_step
from benchmarks.maskkv_speed import TINY, TINY_VOCAB
from benchmarks.runs import Run, add_run
from benchmarks.tables import Cell
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
INTERVALS = {"llada-8b": (50, 7), "dream-7b": (25, 2)}
"""Steps from one refresh of the prompt, and of the response, to the next under dLLM-Cache: Table 6, GSM8K."""
BASELINES = ("fast_dllm", "fast_dllm:cache=prefix", "dllm_cache")
DYLLM = ("table", "tau", "shares")
COLUMNS = ("arm", "schedule", "steps", "ms/step", "original / this", "tokens/s", "salient rows", "peak GB")
PUBLISHED = 4
"""Interval of those steps of the table that forward the prompt, too."""
Row = tuple[int, list[Cell]]
"""Tokens per step, and cells of `COLUMNS`."""


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


@dataclass(frozen=True)
class Arm:
    """A recipe that is timed.

    Attributes:
        label: its name in the table.
        schedule: full steps, and interval of steps with the prompt, as text; "" if the recipe has no such schedule.
        recipe: the recipe.
        full: first steps that compute everything, which salient rows are not counted in.
        kinds: first steps among which each kind of step is met.
    """

    label: str
    schedule: str
    recipe: dgraph.Recipe
    full: int
    kinds: int


def model_of(args: argparse.Namespace) -> Model:
    """A model of the shape with random weights; its layers are small on a CPU."""
    changes: dict[str, Any] = {"block_length": args.block, "eos_ids": ()}
    changes |= {"num_hidden_layers": args.layers} if args.layers else {}
    if args.device == "cpu":
        return random_model(args.shape, "cpu", torch.float32, **changes, **TINY, **TINY_VOCAB)
    return random_model(args.shape, args.device, torch.bfloat16, **changes)


def baseline(model: Model, name: str, args: argparse.Namespace) -> Arm:
    """An arm of `BASELINES`."""
    if name == "dllm_cache":
        prompt, response = INTERVALS[args.shape]
        recipe = dgraph.recipe(name, model.spec, prompt_interval=prompt, response_interval=response)
        return Arm(name, f"{prompt}/{response}", recipe, 1, prompt + 2)
    cache = name.partition("cache=")[2] or "dual"
    # A step forwards the block, or all rows from it on, which are fewer in each later block.
    kinds = args.block + 2 if cache == "dual" else args.tokens
    return Arm(f"fast_dllm {cache}", "", dgraph.recipe("fast_dllm", model.spec, cache=cache), 1, kinds)


def arms_of(model: Model, args: argparse.Namespace) -> Iterator[Arm]:
    """The arms that were asked for: baselines, then DyLLM's under each schedule."""
    yield from (baseline(model, name, args) for name in args.arms if name in BASELINES)
    rows = {"table": args.tokens + args.prompt / PUBLISHED, "shares": args.tokens}
    labels = {"table": "dyllm, rows of Table 4", "shares": "dyllm, Table 4 as shares"}
    labels["tau"] = "dyllm, tau of the family" if args.tau is None else f"dyllm, tau {args.tau:g}"
    for full, period in args.schedules:
        for name in [arm for arm in args.arms if arm in DYLLM]:
            for update in args.update:
                options = {"full_steps": full, "response_only_period": period, "update": update == "on"}
                if name == "tau":
                    recipe = dgraph.recipe("dyllm", model.spec, tau=args.tau, **options)
                else:
                    recipe = scripted(model, shares(args.shape, model.spec.layers, rows[name]), **options)
                label = labels[name] + ("" if update == "on" else ", all attend")
                yield Arm(label, f"{full}/{period}", recipe, full, full + period + 2)


def timed(model: Model, arm: Arm, prompts: list[list[int]], original: float, args: argparse.Namespace) -> Iterator[Row]:
    """Tokens per step, and the row of `COLUMNS` for each of them."""
    reset_peak()
    program = dgraph.optimize(model, arm.recipe, backend=args.backend, buckets="fine", weights=args.weights)
    if program.transitions is not None:
        program.transitions.often = 0  # a long run is what is measured
    for per_step in args.per_step:
        steps = args.block // per_step
        capture(program, prompts, args.tokens, steps, arm.kinds)
        runs = [decode(program, prompts, args.tokens, steps) for _ in range(args.repeat)]
        seconds = statistics.median(s for s, _ in runs)
        stats = runs[-1][1]
        step = seconds / stats.steps
        speed: list[Cell] = [stats.steps, 1e3 * step, original / step, stats.decoded / seconds]
        salient = salient_rows(stats, arm.full) / args.batch
        yield per_step, [arm.label, arm.schedule, *speed, salient, peak_bytes() / 1e9]


def parser_of() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=TABLE_4, default="llada-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--per-step", type=int, nargs="+", default=[1, 4], help="tokens per step")
    parser.add_argument("--tau", type=float, help="of the arm tau (default: that of the family)")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--arms", nargs="+", choices=(*BASELINES, *DYLLM), default=["table", "fast_dllm", "tau"])
    parser.add_argument("--original-steps", type=int, default=12, help="timed steps of the original loop")
    parser.add_argument("--schedules", nargs="+", type=schedule, default=[(4, 4)], metavar="FULL/PERIOD")
    parser.add_argument("--update", nargs="+", choices=("on", "off"), default=["on"], help="update contexts, or attend")
    parser.add_argument("--weights", help="as `dgraph.optimize` takes them; the original loop has them as they are")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_run(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    args = parser_of().parse_args(arguments)
    weights = "" if args.weights is None else f", weights {args.weights}"
    with Run(args, f"DyLLM at the {args.shape} shape{weights}", arguments is None) as run:
        measure(args, run)
    return run.failed


def measure(args: argparse.Namespace, run: Run) -> None:
    """The original loop, then every arm: a table for each number of tokens per step."""
    with run.stage("weights"):
        model = model_of(args)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, model.spec.vocab // 2, (args.batch, args.prompt), generator=draw)
    masks = torch.full((args.batch, args.tokens), model.spec.mask_id)
    canvas = torch.cat([prompts, masks], dim=1).to(args.device)
    original = seconds_per_step(model, canvas, args.tokens, args.original_steps)
    first = ["original loop", "", "", 1e3 * original, 1.0]
    rows: dict[int, list[list[Cell]]] = {n: [[*first, args.batch * n / original, "", ""]] for n in args.per_step}
    for arm in arms_of(model, args):
        if run.late(arm.label):
            continue
        with run.told(arm.label):
            for per_step, row in timed(model, arm, prompts.tolist(), original, args):
                rows[per_step].append(row)
                sizes = f"{args.batch} sequences, prompt {args.prompt}, {args.tokens} new tokens"
                run.arm(f"{sizes}, {per_step} per step", COLUMNS, rows[per_step])


if __name__ == "__main__":
    raise SystemExit(main())
