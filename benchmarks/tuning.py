"""What tuning gains: kernels under their default tilings and under the tilings that timing chose.

    python -m benchmarks.tuning [--only paged_attention rows_linear lm_head] [--seconds 110] [--json FILE]

The shapes are those of FOCUS on SDAR-8B (32 heads, 8 KV heads, D = 128) with 64 and 128 sequences, by bucket of rows,
and the products of SDAR-8B and LLaDA-8B. Every time is that by which `optimize(..., warmup=...)` chooses: a call
inside a CUDA graph on random values, the median over replays (`dgraph.lowering.timing`). Tilings are compiled as they
are met, which is most of the run; ops take turns, and what `--seconds` does not suffice for is left out and counted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.rows_linear import SHAPES
from benchmarks.tables import Cell, Report
from dgraph.cache.store import Store
from dgraph.lowering.tuning import Tuning
from dgraph.ops.tuning import AttentionShape, Choice, LinearShape, LogitsShape, Shape, text_of

BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096)
HEADS, KV_HEADS, D, PAGE, KEYS, VOCAB = 32, 8, 128, 128, 32_768, 151_936


def shapes() -> dict[str, list[Shape]]:
    """By op, the shapes to tune: buckets of the middle first."""
    middle = sorted(BUCKETS, key=lambda rows: abs(rows.bit_length() - 10))
    return {
        "paged_attention": [
            AttentionShape(rows, b, HEADS, KV_HEADS, D, PAGE, KEYS, "bfloat16", "bfloat16")
            for rows in middle
            for b in (64, 128)
        ],
        "rows_linear": [
            LinearShape(rows, d_in, d_out, "bfloat16") for rows in (512, 2048, 64, 4096) for d_in, d_out in SHAPES
        ],
        "lm_head": [LogitsShape(rows, VOCAB, "bfloat16") for rows in middle if rows <= 1024],
    }


def line(choice: Choice) -> list[Cell]:
    """One shape: milliseconds of both tilings and their ratio, tilings that were timed and that failed, the tiling."""
    default, took = choice.default_seconds, choice.seconds
    times: list[Cell] = ["-" if s is None else 1e3 * s for s in (default, took)]
    ratio: Cell = default / took if default and took else "-"
    shown = "default" if ratio == 1.0 else text_of(choice.tiling)
    return [text_of(choice.shape), *times, ratio, choice.tried, len(choice.failed), shown]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, tune, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(shapes()), default=tuple(shapes()))
    parser.add_argument("--seconds", type=float, default=110, help="begin no shape after so long")
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device.")
    start, device = time.perf_counter(), torch.device("cuda", torch.cuda.current_device())
    report = Report("Tilings of kernels: chosen by timing, and by default")
    wanted = {op: found for op, found in shapes().items() if op in options.only}
    turns = itertools.zip_longest(*([(op, shape) for shape in found] for op, found in wanted.items()))
    spent, left = dict.fromkeys(wanted, 0.0), 0
    with tempfile.TemporaryDirectory() as folder:
        tuning = Tuning(device, Store(folder))
        for turn in itertools.chain.from_iterable(turns):
            began = time.perf_counter()
            if turn is not None and began - start < options.seconds:
                tuning.tune(turn[0], [turn[1]])
                spent[turn[0]] += time.perf_counter() - began
            elif turn is not None:
                left += 1
        later = Tuning(device, Store(folder))
        began = time.perf_counter()
        for op, found in tuning.found.items():
            later.tune(op, found)
        seconds = time.perf_counter() - began
    for op, found in tuning.found.items():
        lines = [line(choice) for _, choice in sorted(found.items(), key=lambda item: text_of(item[0]))]
        ratios = [ratio for *_, ratio, _, _, _ in lines if isinstance(ratio, float)]
        mean = statistics.geometric_mean(ratios) if ratios else 1.0
        columns = ["shape", "default ms", "tuned ms", "default / tuned", "timed", "failed", "tiling"]
        report.table(op, columns, lines, f"geometric mean {mean:.3f}; {spent[op]:.0f} s for {len(lines)} shapes")
        report.data[op] = [choice.to_json() for choice in found.values()]
    known = sum(map(len, tuning.found.values()))
    columns = ["shapes", "timed anew", "seconds", "left out above"]
    report.table("a second process", columns, [[known, len(later.timed), seconds, left]])
    report.write(options.markdown, options.json)


if __name__ == "__main__":
    main()
