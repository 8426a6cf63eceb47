"""Times of rows_linear, whose number of rows is on the device, next to a linear layer of exactly so many rows.

    python -m benchmarks.rows_linear [--tilings] [--json FILE] [--markdown FILE]

The shapes are those of SDAR-8B and LLaDA-8B, with room for 4096 rows. Every time is a call inside a CUDA graph; calls
in a row take different weights, so that none is found in the L2 cache. `--tilings` compiles many tilings side by side
in processes of their own, checks each there against float64, times those that are right, and ranks them by number of
rows: few, some and many. A tiling that does not compile, is wrong or does not end is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import copy_bandwidth, milliseconds, random
from benchmarks.tables import Cell, Report

CAPACITY = 4096
COUNTS = (16, 32, 64, 65, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)
SHAPES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (4096, 12288))
"""d_in, d_out: q|k|v, out, gate|up and down of SDAR-8B; q|k|v of LLaDA-8B, whose others are the same."""
FEW, SOME, MANY = (16, 64, 128), (65, 128, 256, 512, 768), (768, 1024, 2048, 4096)
"""Counts at which tilings for few rows, for some and for many are timed."""
COLD = 250e6
PROCESSES, PATIENCE = 10, 100
"""Processes that compile tilings, and seconds that one may take for all of its tilings."""


def tilings() -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Tilings by name, and the counts at which each is timed: the default, and one where warps have no roles."""
    from dgraph.ops.products.triton.rows_linear import Tiles, Tiling, tiling_for

    found: dict[str, tuple[Any, tuple[int, ...]]] = {"default": (tiling_for(2), COUNTS), "tiles": (Tiling(), COUNTS)}
    for sizes, options in (
        ((64, 128, 128, 4), {}),
        ((64, 128, 128, 4), {"splits": 4}),
        ((64, 128, 64, 8), {}),
        ((64, 64, 128, 6), {}),
        ((64, 64, 128, 6), {"splits": 1}),
        ((64, 64, 64, 6), {"warps": 4, "programs": 2}),
        ((64, 64, 128, 3), {"warps": 4, "programs": 2}),
    ):
        found[_name("few", sizes, options)] = (Tiling((Tiles(*sizes, weight_first=True),), **options), FEW)
    for sizes, options in (
        ((128, 128, 64, 6), {}),
        ((128, 128, 64, 6), {"splits": 1}),
        ((128, 128, 64, 6), {"splits": 2}),
        ((128, 128, 128, 3), {"splits": 4}),
        ((128, 64, 64, 8), {"splits": 1}),
        ((128, 64, 64, 8), {"splits": 2}),
        ((128, 64, 128, 4), {"splits": 4}),
        ((64, 128, 128, 4), {"splits": 1}),
        ((64, 128, 128, 4), {"splits": 4}),
        ((64, 64, 128, 6), {"splits": 2}),
        ((64, 64, 64, 6), {"warps": 4, "programs": 2, "splits": 1}),
        ((128, 256, 64, 4), {"splits": 4}),
        ((256, 128, 64, 4), {}),
    ):
        found[_name("some", sizes, options)] = (Tiling((Tiles(*sizes),), **options), SOME)
    for sizes, options in (
        ((128, 256, 64, 4), {}),
        ((128, 256, 64, 4), {"splits": 1}),
        ((128, 256, 64, 4), {"group": 16}),
        ((256, 128, 64, 4), {}),
        ((128, 128, 64, 6), {}),
        ((128, 256, 64, 3), {"bulk": False}),
    ):
        found[_name("many", sizes, options)] = (Tiling((Tiles(*sizes),), **options), MANY)
    return found


def _name(kind: str, sizes: Sequence[int], options: dict[str, Any]) -> str:
    return " ".join([kind, "x".join(map(str, sizes)), *(f"{k}={v}" for k, v in options.items())])


def run(tiling: Any, x: Tensor, weight: Tensor, count: Tensor) -> Tensor:
    """The kernel under a tiling."""
    from dgraph.ops.products.triton.rows_linear import kernel

    return kernel(x, weight, None, count, tiling)


def error(tiling: Any, x: Tensor, weight: Tensor, rows: int) -> float:
    """Relative error of `rows` live rows to float64; the other rows of x are NaN."""
    given = x.clone()
    given[rows:] = torch.nan
    got = run(tiling, given, weight, _count(rows))[:rows]
    want = x[:rows].double() @ weight.double().t()
    return float((got.double() - want).norm() / want.norm()) if rows else 0.0


def _count(rows: int) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device="cuda")


def check_in_this_process(names: Sequence[str]) -> None:
    """Compile tilings and check them; one line of JSON each."""
    known = tilings()
    torch.manual_seed(0)
    x, weight = random(CAPACITY, 1024), random(1536, 1024) / 32
    for name in names:
        try:
            worst = max(error(known[name][0], x, weight, rows) for rows in (0, 1, 16, 33, 100, 129, 700, CAPACITY))
            fault = "" if worst < 5e-3 else f"wrong: relative error {worst:.1e}"
        except Exception as failure:  # too much shared memory, say: not a tiling for this device
            fault = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
        print(json.dumps([name, fault]), flush=True)


def check_apart(names: Sequence[str]) -> dict[str, str]:
    """Faults of tilings by name ("" for none); compiled and checked in several processes at a time."""

    def start(mine: Sequence[str]) -> Iterator[tuple[str, str]]:
        command = [sys.executable, "-m", "benchmarks.rows_linear", "--check", *mine]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            output, reason = done.stdout, done.stderr.strip().rpartition("\n")[2] or "no result"
        except subprocess.TimeoutExpired as stopped:
            output, reason = stopped.stdout or "", "did not end"
            output = output.decode() if isinstance(output, bytes) else output
        found = dict(json.loads(line) for line in output.splitlines() if line.startswith("["))
        yield from ((name, found.get(name, reason)) for name in mine)

    parts = [part for i in range(PROCESSES) if (part := names[i::PROCESSES])]
    with ThreadPoolExecutor(PROCESSES) as pool:
        return {name: fault for found in pool.map(lambda part: list(start(part)), parts) for name, fault in found}


class Product:
    """Inputs of one shape: rows, and several weights."""

    def __init__(self, d_in: int, d_out: int):
        self.d_in, self.d_out = d_in, d_out
        self.x = random(CAPACITY, d_in)
        self.weights = [random(d_out, d_in) * d_in**-0.5 for _ in range(max(2, min(8, int(COLD / d_in / d_out / 2))))]

    def exact(self, rows: int) -> float:
        """Milliseconds of a linear layer over exactly so many rows."""
        return milliseconds([partial(F.linear, self.x[:rows], w) for w in self.weights], 9)

    def grouped(self, rows: int) -> float:
        """Milliseconds of the library's product of one group whose end is on the device."""
        product = getattr(F, "grouped_mm", None) or torch._grouped_mm
        calls = [partial(product, self.x, w.t()[None], offs=_count(rows)) for w in self.weights]
        return milliseconds(calls, 9)

    def ours(self, rows: int, tiling: Any = None) -> float:
        """Milliseconds of rows_linear."""
        count = _count(rows)
        return milliseconds([partial(run, tiling, self.x, w, count) for w in self.weights], 9)

    def floor(self, rows: int, bandwidth: float) -> float:
        """Milliseconds that the bytes take."""
        return 2 * (self.d_in * self.d_out + rows * (self.d_in + self.d_out)) / bandwidth


def attempt(measure: Callable[[], float]) -> float:
    """A time, or NaN and a line that says why there is none."""
    try:
        return measure()
    except Exception as failure:
        print(f"not measured: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}", flush=True)
        return math.nan


def compare(report: Report, bandwidth: float) -> None:
    """rows_linear as it is, against the library."""
    lines: list[list[Cell]] = []
    for shape in SHAPES:
        product = Product(*shape)
        for rows in COUNTS:
            exact, grouped = attempt(partial(product.exact, rows)), attempt(partial(product.grouped, rows))
            ours, floor = attempt(partial(product.ours, rows)), product.floor(rows, bandwidth)
            wrong = error(None, product.x, product.weights[0], rows) if rows <= 256 else 0.0
            lines.append([f"{shape[0]} -> {shape[1]}", rows, exact, grouped, ours, floor, ours / exact, f"{wrong:.0e}"])
    columns = ["shape", "rows", "linear ms", "grouped_mm ms", "ours ms", "floor ms", "ours / linear", "error"]
    note = f"linear: of exactly so many rows; the others of {CAPACITY}. Error: relative, to float64, up to 256 rows."
    report.table("rows_linear", columns, lines, note)


def search(report: Report, bandwidth: float, until: float) -> None:
    """Every tiling at its counts; the best of each."""
    faults = check_apart(list(tilings()))
    report.data["faults"] = {name: fault for name, fault in faults.items() if fault}
    for name, fault in report.data["faults"].items():
        print(f"left out: {name}: {fault}", flush=True)
    print(f"{sum(not f for f in faults.values())} tilings of {len(faults)} are right", flush=True)
    known = {name: entry for name, entry in tilings().items() if not faults[name]}
    times: dict[tuple[str, int, str], float] = {}
    base: dict[tuple[str, int], float] = {}
    lines: list[list[Cell]] = []
    for shape in SHAPES:
        product, at = Product(*shape), f"{shape[0]} -> {shape[1]}"
        for rows in COUNTS:
            if time.perf_counter() > until:
                print("the time is up; what follows was not measured", flush=True)
                break
            base[at, rows] = attempt(partial(product.exact, rows))
            grouped, best = attempt(partial(product.grouped, rows)), (math.inf, "none")
            for name, (tiling, counts) in known.items():
                if rows in counts:
                    took = times[at, rows, name] = attempt(partial(product.ours, rows, tiling))
                    best = min(best, (took, name)) if took == took else best
            floor = product.floor(rows, bandwidth)
            line: list[Cell] = [at, rows, base[at, rows], grouped, times.get((at, rows, "default"), math.nan), best[0]]
            lines.append([*line, floor, best[0] / base[at, rows], best[1]])
    columns = ["shape", "rows", "linear ms", "grouped_mm ms", "default ms", "best ms", "floor ms", "best / linear"]
    report.table("the best tiling of each", [*columns, "tiling"], lines)
    report.data["times"] = [[*key, took] for key, took in times.items()]
    report.data["linear"] = [[*key, took] for key, took in base.items()]
    for title, counts in (("up to 64 rows", (16, 64)), ("65", (65,)), ("128", (128,)), ("256", (256,)), ("512", (512,)),
                          ("768", (768,)), ("1024 rows and more", (1024, 2048, 4096))):  # fmt: skip
        _rank(report, title, counts, times, base)


def _rank(
    report: Report,
    title: str,
    counts: Sequence[int],
    times: dict[tuple[str, int, str], float],
    base: dict[tuple[str, int], float],
) -> None:
    """Tilings by their time over that of a linear layer: the mean of all shapes, and each."""
    shapes = [f"{a} -> {b}" for a, b in SHAPES]
    lines: list[list[Cell]] = []
    for name in tilings():
        ratios = [
            _mean([times[s, c, name] / base[s, c] for c in counts if (s, c, name) in times]) for s in shapes
        ]  # fmt: skip
        if any(r == r for r in ratios):
            lines.append([name, _mean([r for r in ratios if r == r]), *ratios])
    lines.sort(key=lambda line: line[1])
    report.table(f"time over linear, {title}", ["tiling", "mean", *shapes], lines[:9])


def _mean(values: Sequence[float]) -> float:
    """The geometric mean; NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tilings", action="store_true", help="time many tilings instead of the one in use")
    parser.add_argument("--seconds", type=float, default=150, help="stop measuring tilings after so long")
    parser.add_argument("--check", nargs="+", metavar="TILING", help="only compile these tilings and check them")
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    until = time.perf_counter() + options.seconds
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device.")
    if options.check:
        check_in_this_process(options.check)
        return
    torch.manual_seed(0)
    report = Report("rows_linear at the shapes of 8B models")
    bandwidth = copy_bandwidth()
    report.table("device", ["measure", "value"], [["copy, read + written, TB/s", bandwidth / 1e9]])
    if options.tilings:
        search(report, bandwidth, until)
    else:
        compare(report, bandwidth)
    report.write(options.markdown, options.json)


if __name__ == "__main__":
    main()
