"""Times of rows_glu next to what it replaces, at the sizes of 8B models.

    python -m benchmarks.rows_glu [--json FILE] [--markdown FILE]

Two ways stand beside it: a linear layer of exactly as many rows and a compiled silu(gate) * up, which a host that knows
the number would run; and rows_linear with the same activation over all rows that there is room for. "Known": rows_glu
where there is room for no more rows than are live, as in a step whose rows the host has counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import copy_bandwidth, milliseconds, random
from benchmarks.rows_linear import CAPACITY, COLD, attempt, run
from benchmarks.tables import Cell, Report

COUNTS = (64, 96, 128, 192, 256, 320, 384, 512, 576, 640, 768, 1024, 1536, 2048, 4096)
SHAPES = ((4096, 12288), (3584, 18944))
"""d_in, columns of gate and of up: LLaDA-8B, Dream-7B."""


def activation(both: Tensor) -> Tensor:
    """silu(gate) * up of gate's columns, then up's."""
    gate, up = both.chunk(2, 1)
    return F.silu(gate) * up


class Unit:
    """Inputs of one shape: rows, and several weights of gate and up."""

    def __init__(self, d_in: int, width: int):
        self.d_in, self.width = d_in, width
        self.x = random(CAPACITY, d_in)
        copies = max(2, min(8, int(COLD / d_in / width / 4)))
        self.weights = [random(2 * width, d_in) * d_in**-0.5 for _ in range(copies)]
        self._activation = torch.compile(activation, dynamic=True)

    def exact(self, rows: int) -> float:
        """Milliseconds of a linear layer over exactly so many rows and the activation of its result."""
        return milliseconds([partial(self._exact, rows, w) for w in self.weights], 9)

    def apart(self, rows: int) -> float:
        """Milliseconds of rows_linear, and of the activation of all rows."""
        count = self._count(rows)
        return milliseconds([partial(self._apart, count, w) for w in self.weights], 9)

    def ours(self, rows: int) -> float:
        """Milliseconds of rows_glu."""
        count = self._count(rows)
        return milliseconds([partial(_ours, self.x, count, w) for w in self.weights], 9)

    def known(self, rows: int) -> float:
        """Milliseconds of rows_glu with room for no other rows."""
        count = self._count(rows)
        return milliseconds([partial(_ours, self.x[:rows], count, w) for w in self.weights], 9)

    def _exact(self, rows: int, weight: Tensor) -> Tensor:
        return self._activation(F.linear(self.x[:rows], weight))

    def _apart(self, count: Tensor, weight: Tensor) -> Tensor:
        return self._activation(run(None, self.x, weight, count))

    def _count(self, rows: int) -> Tensor:
        return torch.tensor([rows], dtype=torch.int32, device=self.x.device)

    def floor(self, rows: int, bandwidth: float) -> float:
        """Milliseconds that the bytes take."""
        return 2 * (2 * self.d_in * self.width + rows * (self.d_in + self.width)) / bandwidth

    def error(self, rows: int) -> float:
        """Relative error of `rows` live rows to float64; the other rows of x are NaN."""
        given = self.x.clone()
        given[rows:] = torch.nan
        got = _ours(given, self._count(rows), self.weights[0])[:rows]
        want = activation(given[:rows].double() @ self.weights[0].double().t())
        return float((got.double() - want).norm() / want.norm())


def _ours(x: Tensor, count: Tensor, weight: Tensor) -> Tensor:
    from dgraph.ops.products.triton.rows_glu import kernel

    return kernel(x, weight, None, count)


def compare(report: Report, bandwidth: float) -> None:
    """rows_glu against both ways."""
    lines: list[list[Cell]] = []
    for shape in SHAPES:
        unit = Unit(*shape)
        for rows in COUNTS:
            exact, apart = attempt(partial(unit.exact, rows)), attempt(partial(unit.apart, rows))
            ours, wrong = attempt(partial(unit.ours, rows)), attempt(partial(unit.error, rows)) if rows <= 256 else 0.0
            known = attempt(partial(unit.known, rows))
            times: list[Cell] = [exact, apart, ours, known, unit.floor(rows, bandwidth), ours / exact, known / exact]
            lines.append([f"{shape[0]} -> 2 x {shape[1]}", rows, *times, f"{wrong:.0e}"])
    columns = ["shape", "rows", "linear + silu ms", "rows_linear + silu ms", "ours ms", "known ms", "floor ms"]
    note = f"linear + silu: of exactly so many rows; rows_linear + silu: silu of all {CAPACITY}. Error: up to 256 rows."
    report.table("rows_glu", [*columns, "ours / linear", "known / linear", "error"], lines, note)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device.")
    torch.manual_seed(0)
    report = Report("rows_glu at the shapes of 8B models")
    compare(report, copy_bandwidth())
    report.write(options.markdown, options.json)


if __name__ == "__main__":
    main()
