"""Tilings of paged_attention under the clocks of a long run, at equal and at ragged rows.

    python -m benchmarks.attention_tilings [--shapes SUBSTRING ...] [--json FILE]

A kernel on its own runs at the highest clocks that a card has; between the matrix products of a model, which take all
the power there is, it is slower, and not every tiling equally. So here each call stands between two products, inside of
a CUDA graph that is replayed for a while, and its time is what the profiler says of the kernel. Rows are equal in all
sequences, or those that FOCUS keeps under the trace `paper-sharegpt` in steps drawn at random. Where rows are equal and
no heads share keys, torch's attention stands beside them, as cuDNN does it, on keys and values that lie dense. Beside
all stands attention over keys and values in float8, whose floor is that of fewer bytes.
"""

from __future__ import annotations

import argparse
import random as draws
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernels import copy_bandwidth, random
from benchmarks.tables import Cell, Report

TRACE = Path(__file__).parent / "traces" / "paper-sharegpt.json"
D, PAGE, SETS, SETTLE, MEASURED = 128, 128, 3, 60, 3
"""Values of a head, positions of a page, sets of inputs in turn, replays before the measured ones, and these."""


def kept(sequences: int) -> list[int]:
    """Rows that sequences keep, each in a step of its own."""
    from dgraph.bench.traces import read_trace

    draw, trace = draws.Random(0), read_trace(TRACE)
    steps = [step for history in trace.script().histories for step in history]
    return [max(1, len(draw.choice(steps).kept or ())) for _ in range(sequences)]


SHAPES: dict[str, tuple[list[int], int, int, int]] = {
    "64 x ragged, 1056 keys, 32/8": (kept(64), 1056, 32, 8),
    "256 x ragged, 1056 keys, 32/8": (kept(256), 1056, 32, 8),
    "64 x 4, 1056 keys, 32/8": ([4] * 64, 1056, 32, 8),
    "64 x 8, 1056 keys, 32/8": ([8] * 64, 1056, 32, 8),
    "64 x 32, 1056 keys, 32/8": ([32] * 64, 1056, 32, 8),
    "16 x 256, 1280 keys, 32/32": ([256] * 16, 1280, 32, 32),
    "16 x 1280, 1280 keys, 32/32": ([1280] * 16, 1280, 32, 32),
    "16 x 1280, 1280 keys, 28/4": ([1280] * 16, 1280, 28, 4),
    "1 x 32, 1056 keys, 32/32": ([32], 1056, 32, 32),
}
"""Rows per sequence, keys, query heads and KV heads: SDAR-8B, LLaDA-8B, Dream-7B."""

TILES = ((16, 32, 4, 5), (16, 64, 4, 5), (32, 64, 4, 4), (64, 64, 4, 4), (64, 64, 4, 5), (128, 128, 8, 5))
"""Stacked rows, keys per iteration, warps, stages."""


class Inputs:
    """Queries, a paged cache in random order, in float8 or as they are, and the rest of a call."""

    def __init__(self, rows: list[int], keys: int, heads: int, kv_heads: int, float8: bool = False):
        from dgraph.ops.kv.scales import scaled

        pages = -(-keys // PAGE)
        caches: tuple[Tensor, ...] = tuple(random(len(rows) * pages, PAGE, kv_heads, D) for _ in range(2))
        scales: tuple[Tensor, ...] = ()
        if float8:
            caches, scales = zip(*map(scaled, caches), strict=True)
        table = torch.randperm(len(rows) * pages, device="cuda").int().view(len(rows), pages)
        cu_rows = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
        limit = torch.full((sum(rows),), keys, dtype=torch.int32, device="cuda")
        self.call = partial(self._run, (random(sum(rows), heads, D), *caches, table, cu_rows, limit, D**-0.5, *scales))

    @staticmethod
    def _run(args: tuple[Any, ...], tiling: Any) -> Tensor:
        from dgraph.ops.attention.triton.paged_attention import kernel

        return kernel(*args, tiling=tiling)


def dense(sequences: int, rows: int, keys: int, heads: int) -> Callable[[], Tensor]:
    """A call of torch's attention, which cuDNN computes."""
    q, k, v = random(sequences, heads, rows, D), *(random(sequences, heads, keys, D) for _ in range(2))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)

    return call


def microseconds(calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Medians of the attention kernel and of what adds up its shares, between matrix products."""
    x, w = random(4096, 4096), random(12288, 4096)
    for call in calls:
        call()
    torch.mm(x, w.t())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            torch.mm(x, w.t())
            call()
    for _ in range(SETTLE):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(MEASURED):
            graph.replay()
        torch.cuda.synchronize()
    spent = [(event.name, event.time_range.end - event.time_range.start) for event in found.events()]
    attending = [time for name, time in spent if name.startswith("_attend") or "sdpa" in name]
    added = [time for name, time in spent if name == "_add_up"]
    return statistics.median(attending), statistics.median(added or [0.0])


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[""], help="only shapes whose name has one of these in it")
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    report, bandwidth = Report("Tilings of paged_attention in a long run"), copy_bandwidth()
    lines: list[list[Cell]] = []
    for name, (rows, keys, heads, kv_heads) in SHAPES.items():
        if not any(part in name for part in args.shapes):
            continue
        sets = [Inputs(rows, keys, heads, kv_heads) for _ in range(SETS)]
        floor = 1e3 * 2 * 2 * D * (len(rows) * keys * kv_heads + sum(rows) * heads) / bandwidth
        work = 4e-6 * sum(rows) * keys * heads * D
        want = sets[0].call(None).float()
        tilings = {"its own": None}
        tilings |= {f"{m} x {n}, {w} warps, {s} stages": Tiling(m, n, 1, w, s) for m, n, w, s in TILES}
        for label, tiling in tilings.items():
            error = float((sets[0].call(tiling).float() - want).norm() / want.norm())
            kernel, added = microseconds([partial(inputs.call, tiling) for inputs in sets])
            lines.append([name, label, kernel, added, floor, work / kernel, f"{error:.0e}"])
            print(*lines[-1], sep="\t", flush=True)
        stored = [Inputs(rows, keys, heads, kv_heads, float8=True) for _ in range(SETS)]
        kernel, added = microseconds([partial(inputs.call, None) for inputs in stored])
        read = 2 * (D + 4) * len(rows) * keys * kv_heads + 2 * 2 * D * sum(rows) * heads
        lines.append([name, "keys in float8", kernel, added, 1e3 * read / bandwidth, work / kernel, ""])
        print(*lines[-1], sep="\t", flush=True)
        if heads == kv_heads and len(set(rows)) == 1:
            kernel, _ = microseconds([dense(len(rows), rows[0], keys, heads) for _ in range(SETS)])
            lines.append([name, "torch, dense keys", kernel, 0.0, floor, work / kernel, ""])
            print(*lines[-1], sep="\t", flush=True)
    columns = ["sequences x rows, keys, heads", "tiling", "kernel us", "adding up us", "floor us", "TFLOP/s", "apart"]
    report.table("paged_attention between products", columns, lines, "Apart: relative, from its own tiling.")
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
