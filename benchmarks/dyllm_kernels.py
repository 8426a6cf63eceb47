"""Times of the kernels of DyLLM at the shape of LLaDA-8B: 16 sequences of 1024 + 256 positions.

    python -m benchmarks.dyllm_kernels [--page 128] [--tilings] [--json FILE] [--markdown FILE]

First every kernel is checked against its reference, in fp32 and in bf16. Then, each as a call inside a CUDA graph on
data that no L2 cache holds: partial_attention with a share of the rows changed, next to paged_attention of all rows
and to what its bytes and its products take at the rates of a copy and of a large product measured in the same run;
and the kernels that only move rows. `--tilings` times other sizes of partial_attention as well.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import copy_bandwidth, milliseconds, offsets, random
from benchmarks.tables import Cell, Report
from dgraph.ops import OPS

HEADS, D, HIDDEN, SEQUENCES, PROMPT, RESPONSE = 32, 128, 4096, 16, 1024, 256
KEYS = PROMPT + RESPONSE
SHARES = (0.005, 0.02, 0.1, 0.5, 1.0)
TAU, SETS = 0.99, 2


class Step:
    """One set of inputs: b sequences whose last `rows` positions are rows, the same number of them changed in each.

    changed: rows of each sequence that have changed; full: every row is in a full step.
    """

    def __init__(
        self, b: int, rows: int, changed: int, page: int, full: bool = False, kv_heads: int = HEADS, dtype: Any = None
    ):
        pages, n = b * KEYS // page, b * rows
        self.b, self.rows, self.changed, self.n = b, rows, changed, n
        dtype = dtype or torch.bfloat16
        self.q, self.dv = random(n, HEADS, D).to(dtype), random(n, kv_heads, D).to(dtype) * 0.1
        self.k, self.v, self.c = (random(pages, page, h, D).to(dtype) for h in (kv_heads, kv_heads, HEADS))
        self.table = torch.randperm(pages, device="cuda").int().view(b, -1)
        self.cu_rows, self.cu_changed = offsets(b, rows), offsets(b, changed)
        self.positions = torch.arange(KEYS - rows, KEYS, device="cuda").repeat(b)
        self.limit = torch.full((n,), KEYS, dtype=torch.int32, device="cuda")
        self.full = torch.full((n,), full, device="cuda")
        chosen = torch.rand(b, rows, device="cuda").argsort(1)[:, :changed].sort(1).values
        chosen = (chosen + torch.arange(b, device="cuda")[:, None] * rows).flatten()
        self.index = torch.cat([chosen, chosen.new_full((n - len(chosen),), -1)])

    def args(self, tau: float = TAU) -> tuple[Any, ...]:
        """Of partial_attention."""
        where = (self.full, self.positions, self.table, self.cu_rows, self.limit)
        return self.q, self.k, self.v, self.dv, self.index, self.cu_changed, self.c, *where, D**-0.5, tau

    def partial(self, tiling: Any = None) -> tuple[Tensor, Tensor]:
        if tiling is None:
            return OPS["partial_attention"].overload(*self.args())
        from dgraph.ops.attention.triton.partial_attention import kernel

        return kernel(*self.args(), tiling=tiling)

    def dense(self) -> Tensor:
        return OPS["paged_attention"].overload(
            self.q, self.k, self.v, self.table, self.cu_rows, self.limit, D**-0.5
        )  # fmt: skip

    def costs(self) -> tuple[float, float]:
        """Bytes and operations: keys once, values once where a row is exact, four times the rows, the changes."""
        exact = self.rows if bool(self.full[0]) else self.changed
        rest, size = self.rows - exact, 2 * HEADS * D
        read = KEYS * (2 if exact else 1) + (2 * self.changed if rest else 0) + 4 * self.rows
        products = exact * 2 * KEYS + rest * (KEYS + 2 * self.changed)
        return self.b * size * read, self.b * size * products


def product_rate() -> float:
    """Operations per millisecond of a large product."""
    a, b = random(8192, 8192), random(8192, 8192)
    return 2 * 8192**3 / milliseconds([partial(torch.mm, a, b)] * 2)


def cloned(args: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    wide = (torch.bfloat16, torch.float32)
    return [
        x.to(dtype if x.dtype in wide and dtype else x.dtype, copy=True) if isinstance(x, Tensor) else x for x in args
    ]


def check(report: Report, page: int) -> None:
    """partial_attention against its reference in float64, and the others, whose results are exact but for sums."""
    lines: list[list[Cell]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for kv_heads, changed, full in ((32, 5, False), (8, 40, False), (4, 150, False), (32, 5, True)):
            step = Step(3, 200, changed, page, full, kv_heads, dtype)
            step.limit.view(3, -1)[1] = KEYS - 77
            step.dv *= 100  # so that changes weigh as much as what they are added to
            step.c *= 0.1
            args = cloned(step.args())
            got, salient = OPS["partial_attention"].overload(*args)
            wide = cloned(step.args(), torch.float64)
            want, flags = OPS["partial_attention"].reference(*wide)
            errors = [float((x.double() - y).norm() / y.norm()) for x, y in ((got, want), (args[6], wide[6]))]
            most = 2e-5 if dtype == torch.float32 else 2e-2
            fine = max(errors) < most and int((salient != flags).sum()) <= (0 if dtype == torch.float32 else 6)
            name = f"{kv_heads} KV heads, {changed} of 200 changed{', full' if full else ''}"
            lines.append([name, str(dtype)[6:], *errors, int((salient != flags).sum()), "ok" if fine else "WRONG"])
    report.table(
        "partial_attention against float64", ["case", "dtype", "context", "cache", "other flags", ""], lines
    )  # fmt: skip
    lines = []
    for dtype in (torch.float32, torch.bfloat16):
        step = Step(3, 200, 40, page, dtype=dtype)
        for name, args in row_calls(step).items():
            there, wide = cloned(args), cloned(args)
            results = OPS[name].overload(*there), OPS[name].reference(*wide)
            pairs = [*zip(there, wide, strict=True), results]
            same = all(torch.equal(x, y) for x, y in pairs if isinstance(x, Tensor))
            lines.append([name, str(dtype)[6:], "ok" if same else "WRONG"])
    report.table("kernels that move rows, bit for bit", ["op", "dtype", ""], lines)


def row_calls(step: Step) -> dict[str, tuple[Any, ...]]:
    """Arguments of the ops that move rows; what concerns changed rows has room for all."""
    index = step.index.clamp(min=0)
    where = (step.positions[index], step.table, step.cu_changed)
    features = step.c.flatten(2)
    page = step.c.shape[1]
    s = torch.arange(step.n, device="cuda") // step.rows
    before = step.c[step.table[s, step.positions // page].long(), step.positions % page]
    near = (torch.arange(step.n, device="cuda") % 2 == 0)[:, None, None]
    context = before + step.q * torch.where(near, 0.02, 1.0).to(step.q.dtype)
    rest = (step.positions, step.table, step.cu_rows)
    return {
        "kv_update": (step.q[index], step.dv[index], step.k, step.v, *where),
        "drift": (context, step.c, step.full, *rest, TAU),
        "feature_write": (step.q.flatten(1)[index], features, *where),
        "feature_read": (features, *rest),
    }


def attention(report: Report, page: int, bandwidth: float, rate: float) -> None:
    """partial_attention by changed share, against paged_attention of all rows."""
    for rows in (RESPONSE, KEYS):
        lines: list[list[Cell]] = []
        dense = 0.0
        for share, full in (*((share, False) for share in SHARES), (1.0, True)):
            changed = max(1, round(share * rows))
            sets = [Step(SEQUENCES, rows, changed, page, full) for _ in range(SETS)]
            dense = dense or milliseconds([s.dense for s in sets])
            ours = milliseconds([s.partial for s in sets])
            size, work = sets[0].costs()
            floors = [size / bandwidth, work / rate]
            name = "a full step" if full else f"{100 * share:g} %"
            lines.append([name, changed, ours, dense, ours / dense, *floors, ours / max(floors)])
            del sets
        columns = ["changed", "rows/sequence", "partial ms", "paged ms", "partial / paged", "bytes ms", "products ms"]
        note = "partial: with the cosine and the update of the context cache, which paged_attention does not have."
        title = f"{SEQUENCES} x {rows} rows, {KEYS} keys each, page {page}"
        report.table(title, [*columns, "/ larger floor"], lines, note)


def moving(report: Report, page: int, bandwidth: float) -> None:
    """The ops that move rows: a tenth of the rows changed."""
    lines: list[list[Cell]] = []
    for rows in (RESPONSE, KEYS):
        changed = rows // 10
        sets = [row_calls(Step(SEQUENCES, rows, changed, page)) for _ in range(SETS)]
        n, k, row = SEQUENCES * rows, SEQUENCES * changed, 2 * HIDDEN
        sizes = {"kv_update": 6 * k + n - k, "drift": 3 * n, "feature_write": 2 * k, "feature_read": 2 * n}
        for name, count in sizes.items():
            took = milliseconds([partial(OPS[name].overload, *calls[name]) for calls in sets])
            floor = count * row / bandwidth
            lines.append([name, f"{SEQUENCES} x {rows}", 1e3 * took, 1e3 * floor, took / floor])
    note = "kv_update and feature_write: a tenth of the rows. kv_update zeroes the rest of its result."
    report.table("kernels that move rows", ["op", "rows", "us", "floor us", "/ floor"], lines, note)


def tilings(report: Report, page: int) -> None:
    """Other sizes of partial_attention, with a twelfth of the rows changed."""
    from dgraph.ops.attention.triton.attention_tiling import multiprocessors
    from dgraph.ops.attention.triton.partial_attention import tiling_for

    device = torch.device("cuda", torch.cuda.current_device())
    base = tiling_for(SEQUENCES * RESPONSE, SEQUENCES, (HEADS, HEADS), D, page, KEYS, 2, multiprocessors(device))
    cases = [[Step(SEQUENCES, rows, rows // 12, page) for _ in range(SETS)] for rows in (RESPONSE, KEYS)]
    small = dataclasses.replace(base.exact, block_m=64, warps=4)
    changes: list[dict[str, Any]] = [
        {},
        *({"registers": registers} for registers in (0, 160, 168)),
        *({"registers": registers, "block_n": 128} for registers in (0, 128)),
        *({"exact": small, "registers": registers, "block_n": n} for registers in (0, 128, 168) for n in (64, 128)),
        {"block_n": 32},
        *({"stages": stages} for stages in (2, 3, 5)),
        *({"few": few, "least": min(few, 16)} for few in (0, 16, 32)),
        *({"changes": changes} for changes in (16, 64)),
    ]
    lines: list[list[Cell]] = []
    for change in changes:
        line: list[Cell] = [", ".join(f"{k} {v}" for k, v in change.items()) or "the tiling in use"]
        for sets in cases:
            try:
                line.append(milliseconds([partial(s.partial, dataclasses.replace(base, **change)) for s in sets], 7))
            except Exception as error:  # too much shared memory, say: not a tiling for this device
                line.append(str(error).partition("\n")[0][:40])
        lines.append(line)
    report.table(
        f"tilings, ms; {base}", ["change", *(f"{SEQUENCES} x {rows} rows" for rows in (RESPONSE, KEYS))], lines
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=int, default=128, help="positions of a page; it must divide 1280")
    parser.add_argument("--tilings", action="store_true", help="time other sizes of partial_attention as well")
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device.")
    if KEYS % options.page:
        parser.error(f"--page must divide {KEYS}, got {options.page}.")
    torch.manual_seed(0)
    report = Report("Kernels of DyLLM at the shape of LLaDA-8B")
    bandwidth, rate = copy_bandwidth(), product_rate()
    measures: list[list[Cell]] = [["copy, read + written, TB/s", bandwidth / 1e9], ["product, TFLOP/s", rate / 1e9]]
    report.table("device", ["measure", "value"], measures)
    check(report, options.page)
    attention(report, options.page, bandwidth, rate)
    moving(report, options.page, bandwidth)
    if options.tilings:
        tilings(report, options.page)
    report.write(options.markdown, options.json)


if __name__ == "__main__":
    main()
