"""FOCUS against dense decoding at a real shape: milliseconds of a step and tokens per second, at the same commits.

    python -m benchmarks.focus_speed --shape sdar-8b --batch 64 --prompt 1024

Weights are random, so confidences mean nothing: every arm commits on a fixed schedule (`--steps` per block; 15 steps
for a block of 32 are the redundancy of the paper's Table 5, 15 rows per token). All arms run on the same prompts; what
differs is the rows after the eviction. Time starts after the prefill. Figures are printed as they come, and
`--seconds` begins nothing after that time.

Fast-dLLM v2 decodes a block part by part, and forwards one part where it can (its dual cache). Its schedule commits as
many tokens of a part in each step as the others of a block, rounded up. Its shape is that of its 7B checkpoint.

The paper's figures, one command each, on one GPU. The first command of a shape compiles for about half a minute:

    # Figure 6, LLaDA2.0-mini at 32 to 256 sequences
    python -m benchmarks.focus_speed --shape llada2-mini --batch 32 64 128 256 --arms dense --repeat 1 --seconds 55
    python -m benchmarks.focus_speed --shape llada2-mini --batch 32 64 128 256 --arms "focus, alpha 1.5" --repeat 1 \
        --seconds 55
    # Figure 7, blocks of 16 (the same share of a block in each step)
    python -m benchmarks.focus_speed --block 16 --steps 8 --batch 64 128 --arms dense --repeat 1 --seconds 55
    python -m benchmarks.focus_speed --block 16 --steps 8 --batch 64 128 --arms "focus, alpha 1.5" --repeat 1 \
        --seconds 55
    # Figure 8, the delayed cache alone
    python -m benchmarks.focus_speed --batch 32 64 128 --arms "dense, DC+" --repeat 1 --seconds 55
    python -m benchmarks.focus_speed --batch 32 64 128 --arms dense --repeat 1 --seconds 55
    python -m benchmarks.focus_speed --batch 32 64 128 --arms "focus, alpha 1.5" --repeat 1 --seconds 55
    # Figure 15, Fast-dLLM v2 and FOCUS, two tokens in each step
    python -m benchmarks.focus_speed --shape fast-dllm-v2-7b --steps 16 --batch 32 64 128 --arms "Fast-dLLM v2" \
        --repeat 1 --seconds 55
    python -m benchmarks.focus_speed --steps 16 --batch 32 64 128 --arms "focus, alpha 1.5" --repeat 1 --seconds 55
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import dgraph
from benchmarks.runs import Run, add_run
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.models.shapes import SHAPES, random_model
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import Candidates, SubBlocks
from dgraph.runtime.results import Progress


@dataclass(frozen=True)
class Arm:
    """A recipe with options, under the fixed schedule. parts: a block is decoded part by part (Fast-dLLM v2)."""

    recipe: str
    options: dict[str, Any] = field(default_factory=dict)
    parts: bool = False


ARMS = {
    "dense": Arm("dense"),
    "dense, DC+": Arm("dense", {"block_cache": "dc+"}),
    "focus, alpha 1.5": Arm("focus", {"alpha": 1.5, "full_steps": 0}),
    "focus, alpha 1.2": Arm("focus", {"alpha": 1.2, "full_steps": 0}),
    "Fast-dLLM v2": Arm("dense", parts=True),
}
SHAPE_OF_PARTS = "fast-dllm-v2-7b"
CANVASES = ("llada-8b", "llada-moe-7b-a1b", "dream-7b")
"""Shapes of bidirectional models; they are decoded as block-causal ones are, and the shape alone is theirs."""
COLUMNS = ("arm", "sequences", "steps", "ms/step", "rows/token", "tokens/s", "speed-up", "graphs")


@dataclass(frozen=True)
class PartsOnSchedule(SubBlocks):
    """Fast-dLLM v2's order of positions, with a fixed number of tokens in each step."""

    tokens: int = 1

    def choose(self, candidates: Candidates) -> Tensor:
        """bool[b, B]; see `DecodeRule`."""
        chosen = torch.zeros_like(candidates.masked)
        for _ in range(self.tokens):
            left = torch.where(chosen, -torch.inf, candidates.confidence)
            chosen = chosen | super().choose(replace(candidates, confidence=left))
        return chosen


class Clock:
    """A progress callback that starts when the prefill has been waited for."""

    def __init__(self) -> None:
        self.start = 0.0

    def __call__(self, progress: Progress) -> None:
        if not self.start:
            self.start = time.perf_counter()


def decode_seconds(program: CompiledModel, prompts: list[list[int]], decoding: Decoding) -> tuple[float, Any]:
    """Seconds of the decode loop alone, and the statistics."""
    clock = Clock()
    result = program.generate(None, decoding, input_ids=prompts, progress=clock)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - clock.start, result.stats


def profile(program: CompiledModel, prompts: list[list[int]], decoding: Decoding) -> None:
    """Print the kernels of a run by time, and how much of the run's time the device was busy."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    with trace(activities=[ProfilerActivity.CUDA]) as recorded:
        decode_seconds(program, prompts, decoding)
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    begin, end = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
    busy = sum(e.time_range.elapsed_us() for e in events)
    print(f"device busy {100 * busy / (end - begin):.1f} % of {1e-6 * (end - begin):.3f} s (prefill included)")
    print(recorded.key_averages().table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=70))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="sdar-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--steps", type=int, default=15, help="steps per block")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all that the shape has")
    parser.add_argument("--profile", action="store_true", help="print where the device's time goes")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--buckets", default="fine", help="exact, hybrid or fine")
    parser.add_argument("--no-graphs", action="store_true")
    add_run(parser)
    args = parser.parse_args(arguments)
    changes: dict[str, Any] = {"block_length": args.block}
    if args.shape in CANVASES:
        changes |= {"attention": "block_causal", "logit_shift": 0}
    if args.layers:
        changes["num_hidden_layers"] = args.layers
    arms = args.arms or [label for label, arm in ARMS.items() if arm.parts <= (args.shape == SHAPE_OF_PARTS)]
    with Run(args, f"FOCUS at the {args.shape} shape", arguments is None) as run:
        with run.stage("weights"):
            dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
            model = random_model(args.shape, args.device, dtype, **changes)
        title = f"Prompt {args.prompt}, block {args.block}, {args.steps} steps"
        rows: list[list[str | int | float]] = []
        for label in arms:
            if run.late(label):
                continue
            arm = ARMS[label]
            program = dgraph.optimize(
                model, arm.recipe, backend=args.backend, buckets=args.buckets, graphs=not args.no_graphs, **arm.options
            )
            for batch in args.batch:
                if not run.late(f"{label}, {batch} sequences"):
                    rows.append([label, batch, *measured(program, arm, batch, args)])
                    first = next(row for row in rows if row[1] == batch)
                    rows[-1].insert(6, rows[-1][5] / first[5])  # type: ignore[operator]
                    run.arm(title, COLUMNS, rows)
            del program


def measured(program: CompiledModel, arm: Arm, batch: int, args: argparse.Namespace) -> list[str | int | float]:
    """Steps, milliseconds of a step, rows per token, tokens per second, captured graphs."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, program.spec.vocab // 2, (batch, args.prompt), generator=draw).tolist()
    schedule: dict[str, Any] = {"steps": args.steps}
    if arm.parts:
        schedule = {"policy": PartsOnSchedule(threshold=1.0, cached=True, tokens=-(-args.block // args.steps))}
    decoding = Decoding(max_new_tokens=args.tokens, ignore_eos=True, **schedule)
    decode_seconds(program, prompts, decoding)  # captures every bucket that it meets
    runs = [decode_seconds(program, prompts, decoding) for _ in range(args.repeat)]
    seconds, stats = statistics.median(s for s, _ in runs), runs[-1][1]
    if args.profile:
        profile(program, prompts, decoding)
    captured = len(program.graph_pool.recorded) if program.graph_pool is not None else 0
    rate = stats.decoded / seconds
    return [stats.steps, 1e3 * seconds / stats.steps, stats.rows_per_token, rate, captured]


if __name__ == "__main__":
    main()
