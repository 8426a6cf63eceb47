"""FOCUS against dense decoding at a real shape: seconds per step and tokens per second, at the same commit schedule.

    python -m benchmarks.focus_speed --shape sdar-8b --batch 64 --prompt 1024

Weights are random, so confidences mean nothing: both arms commit on a fixed schedule (`--steps` per block; 15 steps for
a block of 32 are the redundancy of the paper's Table 5, 15 rows per token). Both arms run the same number of steps on
the same prompts; what differs is the rows after the eviction. Time starts after the prefill.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import dgraph
from benchmarks.tables import Report
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.models.shapes import SHAPES, random_model
from dgraph.runtime.results import Progress

ARMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("dense", "dense", {}),
    ("dense, DC+", "dense", {"block_cache": "dc+"}),
    ("focus, alpha 1.5", "focus", {"alpha": 1.5, "full_steps": 0}),
    ("focus, alpha 1.2", "focus", {"alpha": 1.2, "full_steps": 0}),
)


class Clock:
    """A progress callback that starts when the prefill has been waited for."""

    def __init__(self) -> None:
        self.start = 0.0

    def __call__(self, progress: Progress) -> None:
        if not self.start:
            self.start = time.perf_counter()


def decode_seconds(program: CompiledModel, prompts: list[list[int]], tokens: int, steps: int) -> tuple[float, Any]:
    """Seconds of the decode loop alone, and the statistics."""
    clock = Clock()
    result = program.generate(input_ids=prompts, max_new_tokens=tokens, steps=steps, progress=clock)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - clock.start, result.stats


def profile(program: CompiledModel, prompts: list[list[int]], tokens: int, steps: int) -> None:
    """Print the kernels of a run by time, and how much of the run's time the device was busy."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    with trace(activities=[ProfilerActivity.CUDA]) as recorded:
        decode_seconds(program, prompts, tokens, steps)
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    begin, end = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
    busy = sum(e.time_range.elapsed_us() for e in events)
    print(f"device busy {100 * busy / (end - begin):.1f} % of {1e-6 * (end - begin):.3f} s (prefill included)")
    print(recorded.key_averages().table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=70))


def main() -> None:
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
    parser.add_argument("--arms", nargs="+", choices=[arm[0] for arm in ARMS], help="default: all")
    parser.add_argument("--profile", action="store_true", help="print where the device's time goes")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--buckets", default="fine", help="exact, hybrid or fine")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    # Both arms keep the keys of earlier blocks, which a row of LLaDA or Dream would not: the shapes alone are theirs.
    changes: dict[str, Any] = {"block_length": args.block, "attention": "block_causal", "logit_shift": 0}
    if args.layers:
        changes["num_hidden_layers"] = args.layers
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    model = random_model(args.shape, args.device, dtype, **changes)
    report = Report(f"FOCUS at the {args.shape} shape")
    for batch in args.batch:
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(10, model.spec.vocab // 2, (batch, args.prompt), generator=draw).tolist()
        rows: list[list[str | int | float]] = []
        for label, recipe, options in [arm for arm in ARMS if args.arms is None or arm[0] in args.arms]:
            start = time.perf_counter()
            program = dgraph.optimize(
                model, recipe, backend=args.backend, buckets=args.buckets, graphs=not args.no_graphs, **options
            )
            built = time.perf_counter() - start
            decode_seconds(program, prompts, args.tokens, args.steps)  # captures every bucket that it meets
            runs = [decode_seconds(program, prompts, args.tokens, args.steps) for _ in range(args.repeat)]
            seconds = statistics.median(s for s, _ in runs)
            stats = runs[-1][1]
            if args.profile:
                profile(program, prompts, args.tokens, args.steps)
            captured = len(program.graph_pool.recorded) if program.graph_pool is not None else 0
            rows.append(
                [
                    label,
                    stats.steps,
                    1e3 * seconds / stats.steps,
                    stats.rows_per_token,
                    stats.decoded / seconds,
                    (rows[0][2] / (1e3 * seconds / stats.steps)) if rows else 1.0,  # type: ignore[operator]
                    built,
                    captured,
                ]
            )
            print(*rows[-1], sep="\t", flush=True)
            del program
        columns = ["arm", "steps", "ms/step", "rows/token", "tokens/s", "speed-up", "build s", "graphs"]
        title = f"{batch} sequences, prompt {args.prompt}, block {args.block}, {args.steps} steps"
        report.table(title, columns, rows)
        report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
