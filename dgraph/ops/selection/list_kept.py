"""dgraph::list_kept: list the kept rows, from one flag per row; the length of the list stays on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.registry import Sample, define
from dgraph.ops.selection import keep_index

CONTRACT = """\
As keep_index, with room for every row: indices of the kept rows in ascending order, then -1.
keep bool[N]; cu_rows i32[b+1] -> index i64[N], cu_rows i32[b+1] of the kept rows. Padding rows are never
kept, whatever `keep` says of them.
Nobody reads the number of kept rows on the host: it is the last of the new offsets, and rows beyond it are
padding of what runs on the kept rows. Deterministic."""


def reference(keep: Tensor, cu_rows: Tensor) -> tuple[Tensor, Tensor]:
    return keep_index.reference(keep, cu_rows, keep.shape[0])


def fake(keep: Tensor, cu_rows: Tensor) -> tuple[Tensor, Tensor]:
    return keep.new_empty(keep.shape, dtype=torch.int64), torch.empty_like(cu_rows)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, share in (
        ("some rows", (8, 0, 5), 0.6),
        ("everything kept", (3, 4), 1.1),
        ("nothing kept", (3, 4), -1.0),
        ("no rows", (0, 0), 0.5),
    ):
        keep = torch.rand(sum(counts), generator=generator) < share
        cu_rows = cu_rows_of(counts)
        yield Sample(name, (keep, cu_rows), (pad_rows(keep, 3), cu_rows))


OP = define(
    "list_kept",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    gathers=True,
    padding=(-1,),
    kernel="dgraph.ops.selection.triton.list_kept:kernel",
)
