"""Times of sparse attention and of its selection, next to attention over all keys.

    python -m benchmarks.sparse_attention [--only kept few dense select] [--tilings] [--seconds 140] [--json FILE]

Every time is a call inside a CUDA graph on data that no L2 cache holds. A floor is the bytes that the call must move
over the copy bandwidth measured in the same run. `--tilings` times other sizes for few rows and for dense sequences.
What has not begun after `--seconds` is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import copy_bandwidth, milliseconds, offsets, random
from benchmarks.tables import Cell, Report
from dgraph.bench.floor import COLD
from dgraph.ops import OPS
from dgraph.ops.attention.sparse import DENSE, REUSE, SELECT

HEADS, D, PAGE, LONG = 32, 128, 128, 32_768
FORWARD_MS = 62
"""About what a layer of LLaDA-8B takes for LONG rows; selection is compared with it."""


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Step:
    """Inputs of b sequences of `rows` rows at the end of `context` positions; the rows are the window.

    counts: entries that each KV head keeps, the same in each sequence; None: every row sees the rows of the step.
    """

    def __init__(self, b: int, rows: int, context: int, kv_heads: int, counts: Sequence[int] | None):
        self.b, self.rows, self.context, self.kv_heads, self.counts = b, rows, context, kv_heads, counts
        dense, n, counts = counts is None, b * rows, counts or [0] * kv_heads
        self.q = random(n, HEADS, D)
        self.k, self.v = (random(n if dense else 0, kv_heads, D) for _ in range(2))
        low = context - rows
        width, first = -(-context // PAGE), low // PAGE
        table = torch.full((b, width), -1, dtype=torch.int32, device="cuda")
        owned = torch.randperm(b * (width - first), device="cuda").int()
        table[:, first:] = owned.view(b, -1)
        caches = [random(len(owned), PAGE, kv_heads, D) for _ in range(2)]
        packs = [random(max(1, b * sum(counts)), D) for _ in range(2)]
        start = torch.arange(b, device="cuda").int()[None] * sum(counts)
        self.limit = torch.full((n,), context, dtype=torch.int32, device="cuda")
        self.cu_rows = offsets(b, rows)
        where = (
            torch.arange(low, context, device="cuda").repeat(b)[: len(self.k)],
            self.cu_rows,
            self.cu_rows if dense else torch.zeros_like(self.cu_rows),
            self.limit,
            ints([[low, context]] * b),
            ints([DENSE if dense else REUSE] * b),
        )
        count = ints([list(counts)] * b)
        self.args = self.q, self.k, self.v, *caches, table, *packs, count, start, *where, D**-0.5, 0, dense

    def sparse(self, tiling: Any = None) -> Tensor:
        if tiling is None:
            return OPS["sparse_attention"].overload(*self.args)
        from dgraph.ops.attention.triton.sparse_attention import kernel

        return kernel(*self.args, tiling=tiling)

    def tiling(self) -> Any:
        from dgraph.ops.attention.triton.attention_tiling import multiprocessors
        from dgraph.ops.attention.triton.sparse_attention import tiling_for

        cores = multiprocessors(torch.device("cuda", torch.cuda.current_device()))
        heads, entries = (HEADS, self.kv_heads), self.args[6].shape[0]
        return tiling_for(len(self.q), self.b, heads, D, entries, 2, cores, self.counts is None)

    def sdpa(self) -> Tensor:
        q, k, v = (x.unflatten(0, (self.b, -1)).transpose(1, 2) for x in (self.q, self.k, self.v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, scale=D**-0.5)

    def bytes(self) -> int:
        keys = sum(self.counts or []) + self.rows * self.kv_heads
        return 2 * 2 * D * self.b * (keys + HEADS * self.rows)

    def error(self) -> float:
        """Relative, to the reference in fp32, or for rows among each other to the library."""
        if self.counts is None:
            want = self.sdpa().transpose(1, 2).flatten(0, 1).float()
        else:
            wide = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in self.args]
            want = OPS["sparse_attention"].reference(*wide)
        return float((self.sparse().float() - want).norm() / want.norm())


class Whole:
    """The same rows, over all positions in a paged cache."""

    def __init__(self, b: int, rows: int, context: int, kv_heads: int):
        table = torch.randperm(b * context // PAGE, device="cuda").int().view(b, -1)
        caches = [random(table.numel(), PAGE, kv_heads, D) for _ in range(2)]
        limit = torch.full((b * rows,), context, dtype=torch.int32, device="cuda")
        self.args = random(b * rows, HEADS, D), *caches, table, offsets(b, rows), limit, D**-0.5

    def __call__(self) -> Tensor:
        return OPS["paged_attention"].overload(*self.args)


def cold(make: Callable[[], Any], size: int) -> list[Any]:
    """Inputs of as many calls as it takes to read several L2 caches, and two at least."""
    made = [make() for _ in range(min(64, int(COLD / size) + 1))]
    return made * (2 if len(made) == 1 else 1)


def kept(report: Report, bandwidth: float, late: Callable[[], bool]) -> None:
    """A batch of blocks against long contexts."""
    lines: list[list[Cell]] = []
    b, rows = 16, 32
    for kv_heads in (32, 8):
        for context in (4096, 16_384):
            if late():
                break
            whole = milliseconds([Whole(b, rows, context, kv_heads)] * 2, 7)
            for ratio in (0.5, 0.25):
                count = int(ratio * (context - rows))
                make = partial(Step, b, rows, context, kv_heads, [count] * kv_heads)
                sets = cold(make, make().bytes())
                error, took = sets[0].error(), milliseconds([s.sparse for s in sets], 9)
                floor = sets[0].bytes() / bandwidth
                case: list[Cell] = [f"{context}, {HEADS}/{kv_heads}", ratio, sets[0].tiling().kept.splits]
                lines.append([*case, whole, took, took / whole, floor, took / floor, f"{error:.1e}"])
    columns = ["context, heads", "kept", "shares", "all keys ms", "sparse ms", "ratio", "floor ms", "/ floor", "error"]
    report.table("16 sequences of 32 rows", columns, lines, "All keys: paged_attention. Floor: of the keys kept.")


def ragged(kv_heads: int, pairs: int = 256) -> list[int]:
    """A quarter of the heads keep nothing, an eighth 4 times the mean, the others the rest."""
    none, many = kv_heads // 4, kv_heads // 8
    others, rest = kv_heads - none - many, kv_heads * pairs - 4 * pairs * many
    counts = [4 * pairs] * many + [rest // others + (i < rest % others) for i in range(others)] + [0] * none
    order = torch.randperm(kv_heads, generator=torch.Generator().manual_seed(0)).tolist()
    return [counts[i] for i in order]


def few(report: Report, bandwidth: float, late: Callable[[], bool], tilings: bool) -> None:
    """One sequence whose heads keep few entries."""
    lines: list[list[Cell]] = []
    for kv_heads in (32, 8):
        for rows in (8, 64, 288):
            if late():
                break
            make = partial(Step, 1, rows, LONG, kv_heads, ragged(kv_heads))
            sets = cold(make, make().bytes())
            whole = milliseconds([Whole(1, rows, LONG, kv_heads)] * 2, 7)
            took, floor, tiling = (
                milliseconds([s.sparse for s in sets], 9),
                sets[0].bytes() / bandwidth,
                sets[0].tiling(),
            )
            ratios: list[Cell] = [1e3 * whole, 1e3 * took, took / whole, 1e3 * floor, took / floor]
            lines.append([f"{rows}, {HEADS}/{kv_heads}", tiling.kept.splits, *ratios, f"{sets[0].error():.1e}"])
            if tilings:
                m, (n, splits) = tiling.kept.block_m, (tiling.kept.block_n, tiling.kept.splits)
                least = HEADS // kv_heads
                changes = [{"splits": x} for x in (1, 2, 4, 8) if x != splits]
                changes += [
                    {"block_m": x, "warps": 8 if x == 128 else 4} for x in (m // 2, 2 * m) if max(16, least) <= x <= 128
                ]
                changes += [{"block_n": x, "splits": y} for x in (n // 2, 2 * n) if 16 <= x <= 128 for y in {1, splits}]
                changes += [{"bulk": False}, {"warps": 12 - tiling.kept.warps}]
                sizes = [
                    dataclasses.replace(tiling, kept=dataclasses.replace(tiling.kept, **c)) for c in [{}, *changes]
                ]
                sizes += [dataclasses.replace(tiling, kept_stages=x) for x in (2, 3, 5)]
                try_tilings(report, f"{rows} rows, {HEADS}/{kv_heads} heads", sets, sizes, late)
    columns = ["rows, heads", "shares", "all keys us", "sparse us", "ratio", "floor us", "/ floor", "error"]
    note = f"256 entries a head on average: a quarter of the heads 0, an eighth 1024. All keys: {LONG} positions."
    report.table("one sequence", columns, lines, note)


def dense(report: Report, late: Callable[[], bool], tilings: bool) -> None:
    """Rows among each other."""
    lines: list[list[Cell]] = []
    for b, rows in ((16, 1280), (1, LONG)):
        if late():
            break
        step, work = Step(b, rows, rows, HEADS, None), 4e-9 * b * rows**2 * D * HEADS
        library = milliseconds([step.sdpa] * 2, 7)
        took = milliseconds([step.sparse] * 2, 7)
        speeds: list[Cell] = [library, took, took / library, work / library, work / took]
        lines.append([f"{b} x {rows}", *speeds, f"{step.error():.1e}"])
        if tilings:
            tiling = step.tiling()
            names = ("block_m", "block_n", "warps", "stages", "bulk")
            shapes = [
                (128, 128, 8, 3),
                (128, 128, 8, 2),
                (128, 64, 8, 3),
                (128, 64, 8, 4),
                (64, 64, 4, 3),
                (64, 128, 4, 2),
            ]
            options = [dict(zip(names, (*x, bulk), strict=True)) for bulk in (True, False) for x in shapes]
            sizes = [dataclasses.replace(tiling, dense=dataclasses.replace(tiling.dense, **o)) for o in options]
            try_tilings(report, f"{b} x {rows} rows among each other", [step] * 2, sizes, late)
    columns = ["sequences x rows", "SDPA ms", "sparse ms", "ratio", "SDPA TFLOP/s", "sparse TFLOP/s", "difference"]
    report.table("dense sequences, 32 heads", columns, lines, "SDPA: the flash backend of torch, in bf16.")


def try_tilings(
    report: Report, title: str, sets: Sequence[Step], sizes: Sequence[Any], late: Callable[[], bool]
) -> None:
    """The ten best of the given tilings."""
    lines: list[list[Cell]] = []
    for i, tiling in enumerate(sizes):
        if late():
            print(f"{title}: {len(sizes) - i} tilings were left out.")
            break
        try:
            took = milliseconds([partial(s.sparse, tiling) for s in sets], 5)
            sizes_of = [str(tiling.dense)] if sets[0].counts is None else [str(tiling.kept), tiling.kept_stages]
            lines.append([", ".join(map(str, sizes_of)), 1e3 * took])
        except Exception as error:  # too much shared memory, say: not a tiling for this device
            print(tiling, str(error).partition("\n")[0])
    lines.sort(key=lambda line: line[1])
    report.table(f"tilings for {title}", ["tiling", "us"], lines[:10])


def select(report: Report, late: Callable[[], bool]) -> None:
    """What choosing and packing costs in a prefill."""
    if late():
        print("selection is not timed: out of time")
        return
    lines: list[list[Cell]] = []
    voters = 256
    positions, cu_rows = torch.arange(LONG, device="cuda"), offsets(1, LONG)
    window, action = ints([[LONG - voters, LONG]]), ints([SELECT])
    for kv_heads in (32, 8):
        q, (k, v) = random(LONG, HEADS, D), (random(LONG, kv_heads, D) for _ in range(2))
        limit = torch.full((LONG,), LONG, dtype=torch.int32, device="cuda")
        where = (positions, positions, cu_rows, cu_rows, limit, window, action, D**-0.5, 0, voters)
        votes = partial(OPS["kv_votes"].overload, q, k, *where)
        score, voting = votes(), milliseconds([votes] * 3, 7)
        for ratio, pairs in ((0.0, 256), (0.5, 1)):
            budget = int(ratio * (LONG - voters)) or pairs
            packs = [random(kv_heads * budget, D) for _ in range(2)]
            results = (torch.zeros(1, kv_heads).int().cuda(), torch.zeros(kv_heads * budget).int().cuda())
            sizes = (ints([[0]]), 0, ratio, pairs, "mass", 0.1, 1, "max", 0)
            pack = partial(
                OPS["kv_pack"].overload, score, k, v, positions, cu_rows, window, action, *packs, *results, *sizes
            )
            packing = milliseconds([pack] * 3, 7)
            parts: list[Cell] = [voting, packing, voting + packing, 100 * (voting + packing) / FORWARD_MS]
            lines.append([f"{ratio or pairs}, {HEADS}/{kv_heads}", *parts, int(results[0].sum()) / kv_heads])
    columns = ["pairs or share, heads", "votes ms", "pack ms", "sum ms", f"% of {FORWARD_MS} ms", "kept a head"]
    report.table(f"selection of {LONG} rows by {voters} voters", columns, lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("kept", "few", "dense", "select")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument(
        "--tilings", action="store_true", help="time other sizes for few rows and dense sequences as well"
    )
    parser.add_argument("--seconds", type=float, default=140.0, help="begin nothing after so many seconds")
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device.")
    end = time.monotonic() + options.seconds

    def late() -> bool:
        return time.monotonic() > end

    torch.manual_seed(0)
    report = Report("Sparse attention")
    bandwidth = copy_bandwidth()
    report.data["copy_bytes_per_ms"] = bandwidth
    report.table("device", ["measure", "value"], [["copy, read + written, TB/s", bandwidth / 1e9]])
    run: dict[str, Callable[[], None]] = {
        "kept": partial(kept, report, bandwidth, late),
        "few": partial(few, report, bandwidth, late, options.tilings),
        "dense": partial(dense, report, late, options.tilings),
        "select": partial(select, report, late),
    }
    for name in options.only:
        run[name]()
        torch.cuda.empty_cache()
        report.write(options.markdown, options.json)


if __name__ == "__main__":
    main()
