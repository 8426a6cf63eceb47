"""dgraph::drifted: flag the rows that have changed since an earlier step, by the sums of their cosines (DyLLM)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.registry import Sample, define
from dgraph.ops.selection.compare_rows import cosine_of

CONTRACT = """\
full, or the cosine of the row is below tau: what dgraph::drift decides, from the sums that dgraph::compare_rows gives,
added over ranks.
sums [N, 3], in fp32 at least; full bool[N]; cu_rows i32[b+1]; tau a float -> bool[N]; padding rows: False.
The cosine is sums[:, 0] / (sqrt(sums[:, 1]) * sqrt(sums[:, 2])), clamped to [-1, 1]: tau above 1 finds every row, tau
below -1 none that is not full. Both squares zero: cosine 1. One of them zero: 0. A cosine that is no number is below
any tau. Padding rows may hold anything. Deterministic.
Row by row. Inline: the compiler fuses it with what reads it."""


def reference(sums: Tensor, full: Tensor, cu_rows: Tensor, tau: float) -> Tensor:
    live = torch.arange(full.shape[0], device=full.device) < cu_rows[-1]
    return live & (full | ~(cosine_of(sums) >= tau))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, tau, share in (
        ("some rows", (9, 7), 0.4, 0.0),
        ("ragged, an empty sequence, some full", (5, 0, 12, 1), 0.4, 0.4),
        ("everything", (3, 4), 1.01, 0.0),
        ("nothing", (3, 4), -1.01, 0.0),
        ("no rows", (0, 0), 0.99, 0.0),
    ):
        sums, cu_rows = draw(counts, generator), cu_rows_of(counts)
        full = torch.rand(len(sums), generator=generator) < share
        yield Sample(name, (sums, full, cu_rows, tau), (pad_rows(sums, 3), pad_rows(full, 3), cu_rows, tau))


def draw(counts: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw sums of cosines that lie 0.1 apart, in random order.

    If there are more than three rows, the first three are special. Both sides of the first are zeros, the old side of
    the second is zeros, and the sums of the third are NaN.
    """
    count = sum(counts)
    cosines = 0.1 * torch.randperm(count, generator=generator) - 0.85
    new, old = torch.rand(2, count, generator=generator) + 0.5
    sums = torch.stack([cosines * new * old, new.square(), old.square()], 1)
    if len(sums) > 3:
        sums[0] = 0
        sums[1, [0, 2]] = 0
        sums[2] = torch.nan
    return sums


OP = define(
    "drifted",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("sums", "full"),
    count="cu_rows",
    padding=(0,),
    inline=True,
)
