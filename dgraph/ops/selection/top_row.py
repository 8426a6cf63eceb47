"""dgraph::top_row: the row of each sequence with the highest score."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.padded import sequence_of
from dgraph.ops.registry import Sample, define

CONTRACT = """\
Flags the row of each sequence that has the highest score among the rows `among`; ties: the lowest of them. A sequence
without such rows has no flag.
score f32[N] (or another float dtype), no NaN; among bool[N]; cu_rows i32[b+1] -> bool[N]; padding rows: False, and
they may hold anything. Deterministic, without a host read."""


def reference(score: Tensor, among: Tensor, cu_rows: Tensor) -> Tensor:
    n, b = len(score), len(cu_rows) - 1
    sequence, index = sequence_of(cu_rows, n), torch.arange(n, device=score.device)
    among = among & (sequence < b)
    value = score.masked_fill(~among, -torch.inf)
    best = value.new_full((b + 1,), -torch.inf).scatter_reduce(0, sequence, value, "amax")
    tied = among & (value == best[sequence])
    first = index.new_full((b + 1,), n).scatter_reduce(0, sequence, index.masked_fill(~tied, n), "amin")
    return tied & (index == first[sequence])


def fake(score: Tensor, among: Tensor, cu_rows: Tensor) -> Tensor:
    return among.new_empty(among.shape)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, share in (
        ("some rows", (9, 7), 0.6),
        ("ragged, an empty sequence, ties", (5, 0, 12, 1), 0.8),
        ("no row of a sequence is among them", (3, 4), -1.0),
        ("no rows", (0, 0), 0.5),
    ):
        cu_rows, n = cu_rows_of(counts), sum(counts)
        score = torch.randn(n, generator=generator).round(decimals=0 if "ties" in name else 3)
        among = torch.rand(n, generator=generator) < share
        yield Sample(name, (score, among, cu_rows), (pad_rows(score, 3), pad_rows(among, 3), cu_rows))


OP = define(
    "top_row",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    padding=(0,),
)
