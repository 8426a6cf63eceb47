"""dgraph::least_drifted: the share of each sequence's rows that have changed most, by the sums of their cosines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.registry import Sample, define
from dgraph.ops.selection import drifted
from dgraph.ops.selection.compare_rows import cosine_of

CONTRACT = """\
full, or among the int(share * n) of the n rows of its sequence that adapt whose cosine is the lowest; ties: the lower
row first: what dgraph::least_similar decides, from the sums that dgraph::compare_rows gives, added over ranks. Rows
that adapt: those that are not full, and of which `adapt` bool[N], if it is given, is True.
sums [N, 3], in fp32 at least, read of the rows that adapt; full bool[N]; cu_rows i32[b+1]; share a float in [0, 1],
share * n taken in double precision -> bool[N]; padding rows: False.
The cosine is that of dgraph::drifted; one that is no number is below all others. Padding rows may hold anything.
Deterministic."""


def reference(sums: Tensor, full: Tensor, cu_rows: Tensor, share: float, adapt: Tensor | None = None) -> Tensor:
    chosen = full.clone()
    chosen[min(int(cu_rows[-1]), len(chosen)) :] = False
    adapts = ~full if adapt is None else ~full & adapt
    similar = cosine_of(sums)
    similar = torch.where(similar.isnan(), -2.0, similar)
    for start, end in itertools.pairwise(cu_rows.tolist()):
        among = start + adapts[start:end].nonzero()[:, 0]
        count = math.floor(share * len(among))
        chosen[among[similar[among].argsort(stable=True)[:count]]] = True
    return chosen


def fake(sums: Tensor, *rest: Any) -> Tensor:
    return sums.new_empty(sums.shape[0], dtype=torch.bool)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, share, ready, idle in (
        ("some rows", (9, 7), 0.25, 0.0, None),
        ("ragged, an empty sequence, some full", (5, 0, 12, 1), 0.5, 0.3, None),
        ("everything", (3, 4), 1.0, 0.0, None),
        ("a share that rounds down to nothing", (3, 4), 0.2, 0.0, None),
        ("no rows", (0, 0), 0.25, 0.0, None),
        ("some rows are idle", (9, 0, 7), 0.5, 0.2, 0.4),
        ("all rows are idle", (3, 4), 1.0, 0.0, 1.1),
    ):
        sums, cu_rows = drifted.draw(counts, generator), cu_rows_of(counts)
        if len(sums) > 6:  # three ties, of which the share takes some
            sums[4:7] = sums[4]
        full = torch.rand(len(sums), generator=generator) < ready
        adapt = None if idle is None else torch.rand(len(sums), generator=generator) >= idle
        padded = None if adapt is None else pad_rows(adapt, 3)
        yield Sample(
            name,
            (sums, full, cu_rows, share, adapt),
            (pad_rows(sums, 3), pad_rows(full, 3), cu_rows, share, padded),
        )


OP = define(
    "least_drifted",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    padding=(0,),
    kernel="dgraph.ops.selection.triton.least_drifted:kernel",
)
