"""DyLLM against the original loop and against Fast-dLLM's dual cache, at a published shape with random weights.

    python -m benchmarks.dyllm_speed --shape llada-8b --batch 16 --prompt 1024 --tokens 256

Every arm commits a fixed number of tokens per step. Random weights say nothing about how many rows are salient, so
DyLLM is measured twice: with what the weights give (tau), and with shares of salient rows as the paper's Table 4 lists
them for four layers, interpolated over the others (`--shares`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import dgraph
from benchmarks.full_forward import seconds_per_step
from benchmarks.tables import Report
from dgraph.api import Optimized
from dgraph.models.shapes import random_model
from dgraph.runtime.stats import GenerationStats

# Salient rows of 256 at a quarter, half, three quarters and the end of the layers: GSM8K, mean over the steps listed.
TABLE_4 = {"llada-8b": (24.6, 44.5, 62.2, 37.4), "dream-7b": (33.5, 43.2, 67.0, 44.4)}
ROWS = 256


def shares(shape: str, layers: int) -> tuple[float, ...]:
    """Share of salient rows of each layer, between the four of the paper linearly, as in the first in front of it."""
    known = TABLE_4[shape]
    found = []
    for layer in range(layers):
        at = (layer + 1) / layers * len(known) - 1
        low = max(0, min(int(at), len(known) - 2)) if at > 0 else 0
        part = min(max(at - low, 0.0), 1.0)
        found.append((known[low] * (1 - part) + known[low + 1] * part) / ROWS)
    return tuple(found)


def decode(program: Optimized, prompts: list[list[int]], tokens: int, steps: int) -> tuple[float, GenerationStats]:
    """Seconds of a generation, which has no prefill here, and its statistics; nobody watches its progress."""
    begin = time.perf_counter()
    stats = program.generate(input_ids=prompts, max_new_tokens=tokens, steps=steps).stats
    return time.perf_counter() - begin, stats


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
    parser.add_argument("--full-steps", type=int, default=6, help="timed steps of the original loop")
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
    original = seconds_per_step(model, canvas, args.tokens, args.full_steps)
    print(f"original loop: {1e3 * original:.1f} ms per step", flush=True)

    scripted = shares(args.shape, model.spec.layers)
    arms: list[tuple[str, str, dict[str, Any]]] = [
        ("fast_dllm dual", "fast_dllm", {}),
        (f"dyllm, tau {args.tau}", "dyllm", {"tau": args.tau}),
        ("dyllm, shares of Table 4", "dyllm", {"share": scripted}),
    ]
    report = Report(f"DyLLM at the {args.shape} shape")
    rows: dict[int, list[list[str | int | float]]] = {n: [] for n in args.per_step}
    for label, recipe, options in arms:
        program = dgraph.optimize(model, recipe, backend=args.backend, buckets="fine", **options)
        for per_step in args.per_step:
            steps = args.block // per_step
            decode(program, prompts.tolist(), args.tokens, steps)  # captures
            runs = [decode(program, prompts.tolist(), args.tokens, steps) for _ in range(args.repeat)]
            seconds = statistics.median(s for s, _ in runs)
            stats = runs[-1][1]
            step = seconds / stats.steps
            peak = torch.cuda.max_memory_allocated() / 1e9 if args.device != "cpu" else 0.0
            row = [label, stats.steps, 1e3 * step, original / step, stats.decoded / seconds, peak]
            rows[per_step].append(row)
            print(per_step, *row, sep="\t", flush=True)
        del program
    columns = ["arm", "steps", "ms/step", "original / this", "tokens/s", "peak GB"]
    for per_step, found in rows.items():
        first: list[str | int | float] = [
            "original loop",
            "",
            1e3 * original,
            1.0,
            args.batch * per_step / original,
            "",
        ]
        title = f"{args.batch} sequences, prompt {args.prompt}, {args.tokens} new tokens, {per_step} per step"
        report.table(title, columns, [first, *found])
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
