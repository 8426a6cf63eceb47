"""dgraph::low_rank: add a low-rank adapter to the result of a linear layer, on some rows (LoRA, Hu et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
y [N, o]; x [N, i]; down [r, i]; up [o, r]; rows bool[N] -> [N, o] in the dtype of y: y + scale * (x @ down.T) @ up.T
where rows is set, and y elsewhere, bit for bit, whatever x holds there. Both products are of the dtype of x, which is
that of down and up. Row by row: a padding row influences no other row. Inline: the compiler fuses it."""


def reference(y: Tensor, x: Tensor, down: Tensor, up: Tensor, rows: Tensor, scale: float) -> Tensor:
    more = F.linear(F.linear(x, down), up) * scale
    return torch.where(rows[:, None], y + more.to(y.dtype), y)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for name, n, i, o, r, share in (
        ("some rows", 7, 33, 12, 4, 0.5),
        ("every row", 5, 16, 16, 2, 1.0),
        ("no row", 4, 8, 20, 3, 0.0),
        ("no rows at all", 0, 8, 8, 2, 0.5),
    ):
        rows = torch.rand(n, generator=generator) < share
        y, x, down, up = normal(n, o), normal(n, i), normal(r, i), normal(o, r)
        padded = (pad_rows(y, 3), pad_rows(x, 3), down, up, pad_rows(rows, 3), 0.5)
        yield Sample(name, (y, x, down, up, rows, 0.5), padded)


OP = define(
    "low_rank",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("y", "x", "rows"),
    padding=(None,),
    inline=True,
)
