"""dgraph::vocabulary_attention next to logits, softmax and product as library calls, at the sizes of DiffusionGemma.

    python -m benchmarks.vocabulary_attention [--rows 256 2048] [--width 2816] [--vocab 262144] [--chunks]

Both give what a denoising step takes from its tied head: best token, confidence, a Gumbel draw, entropy and the soft
embedding, with a softcap of 30 at temperature 0.8. `library` is eager torch in bf16 with statistics in fp32, its noise
included. `head` is dgraph::lm_head on the same rows without a softcap, which draws and measures and gives no soft
embedding: the rest is what that costs. The floor is the larger of reading the weight once and of the two products at
the rate of one library product of these sizes. Peak memory is beside arguments and results. On a GPU each time is that
of a CUDA graph of the call.

On a CPU the op's reference runs, in fp32, and the ratio says nothing of a GPU; give small sizes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import copy_bandwidth, milliseconds
from benchmarks.tables import Cell, Report
from dgraph.ops import OPS, launcher
from dgraph.private.torch import StorageWatch

SOFTCAP, HEAT = 30.0, 0.8


def library(h: Tensor, weight: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    """Best token, confidence, draw, entropy and soft embedding, with logits and probabilities in memory."""
    x = SOFTCAP * torch.tanh((h @ weight.t()).float() / SOFTCAP) / temperature[:, None]
    confidence, best = x.softmax(-1).max(-1)
    noise = torch.empty_like(x).exponential_().log_().neg_()
    token = (x + noise).argmax(-1)
    logprobs = x.log_softmax(-1)
    p = logprobs.exp()
    return best, confidence, token, -(p * logprobs).sum(-1), p.to(h.dtype) @ weight


class Rows:
    """Inputs of so many rows."""

    def __init__(self, rows: int, weight: Tensor):
        device = weight.device
        generator = torch.Generator(device).manual_seed(rows)
        self.weight = weight
        self.h = torch.randn(rows, weight.shape[1], generator=generator, device=device).to(weight.dtype)
        self.temperature = torch.full((rows,), HEAT, device=device)
        self.seed = torch.arange(rows, device=device) * 7919
        self.count = torch.tensor([rows], dtype=torch.int32, device=device)

    def library(self) -> Any:
        return library(self.h, self.weight, self.temperature)

    def arguments(self) -> tuple[Any, ...]:
        return self.h, self.weight, self.temperature, self.seed, self.count, SOFTCAP, -1

    def ours(self) -> Any:
        return launcher(OPS["vocabulary_attention"], self.h.device)(*self.arguments())

    def head(self) -> Any:
        candidate = torch.ones(len(self.h), dtype=torch.bool, device=self.h.device)
        rows = candidate, self.temperature, self.seed, 2048, -1
        return launcher(OPS["lm_head"], self.h.device)(self.h, self.weight, None, *rows)

    def product(self) -> Tensor:
        return self.h @ self.weight.t()

    def error(self) -> float:
        """Relative error of the soft embedding of some rows to float64."""
        h, weight = self.h[:16].double(), self.weight.double()
        want = (SOFTCAP * torch.tanh(h @ weight.t() / SOFTCAP) / HEAT).softmax(-1) @ weight
        return float((self.ours()[4][:16].double() - want).norm() / want.norm())


def took(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a call: in a CUDA graph of it, or of the CPU, the median of five."""
    if device.type == "cuda":
        return milliseconds([call], 9)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def peak(call: Callable[[], Any], device: torch.device) -> float:
    """Megabytes that a call allocates at most, beside its results."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = call()
        torch.cuda.synchronize()
        most, left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    else:
        with StorageWatch() as watch:
            found = call()
        most, left = watch.peak, watch.live
    del found
    return (most - left) / 1e6


def chunks(report: Report, rows: Rows) -> None:
    """Ids at a time, the fastest first."""
    from dgraph.ops.vocabulary.triton.vocabulary_attention import kernel

    lines: list[list[Cell]] = []
    for chunk in (4096, 8192, 16384, 32768):
        lines.append([chunk, took(partial(kernel, *rows.arguments(), chunk=chunk), rows.h.device)])
    lines.sort(key=lambda line: float(line[1]))
    report.table(f"ids at a time, for {len(rows.h)} rows", ["ids", "ms"], lines)


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--width", type=int, default=2816)
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--chunks", action="store_true", help="time other numbers of ids at a time, on a GPU")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    shape = options.vocab, options.width
    weight = (torch.randn(shape, generator=generator, device=device) * options.width**-0.5 * 3).to(dtype)
    bandwidth = copy_bandwidth() if device.type == "cuda" else float("inf")
    report = Report("Vocabulary attention")
    lines: list[list[Cell]] = []
    for count in options.rows:
        rows = Rows(count, weight)
        theirs, ours, head = (took(call, device) for call in (rows.library, rows.ours, rows.head))
        floor = max(weight.nbytes / bandwidth, 2 * took(rows.product, device))
        memory = [peak(call, device) for call in (rows.library, rows.ours)]
        times: list[Cell] = [theirs, ours, theirs / ours, head, floor, ours / floor]
        lines.append([count, *times, *memory, memory[1] / memory[0], f"{rows.error():.0e}"])
        if options.chunks and device.type == "cuda":
            chunks(report, rows)
    columns = ["rows", "library ms", "ours ms", "library / ours", "head ms", "floor ms", "ours / floor"]
    columns += ["library MB", "ours MB", "ours / library", "error"]
    sizes = f"V {options.vocab}, d {options.width}, {str(dtype).removeprefix('torch.')}"
    note = f"{sizes}. Error: of the soft embedding, relative, to float64."
    report.table("vocabulary attention", columns, lines, note)
    report.write(options.markdown, options.json)
    return report


if __name__ == "__main__":
    main()
