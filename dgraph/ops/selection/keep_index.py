"""dgraph::keep_index: list the kept rows, from one flag per row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.padded import offsets_of
from dgraph.ops.registry import Sample, define

CONTRACT = """\
Indices of the kept rows in ascending order, and the row offsets of the kept rows.
keep bool[N]; cu_rows i32[b+1] -> index i64[K], cu_rows i32[b+1]. Padding rows are never kept, whatever
`keep` says of them.
capacity < 0: K is the number of kept rows. Else K = capacity, the rest of `index` is -1, and more kept
rows than that are an error in the reference.
The host must read the number of kept rows to go on: a program is cut here. Deterministic."""


def reference(keep: Tensor, cu_rows: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    index = keep[: int(cu_rows[-1])].nonzero().squeeze(1)
    offsets = offsets_of(keep, cu_rows).to(cu_rows.dtype)
    if capacity < 0:
        return index, offsets
    if len(index) > capacity:
        raise InputError(
            f"dgraph::keep_index: {len(index)} rows are kept, capacity is {capacity}. Use a larger bucket."
        )
    return F.pad(index, (0, capacity - len(index)), value=-1), offsets


def fake(keep: Tensor, cu_rows: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size() if capacity < 0 else capacity
    return keep.new_empty(size, dtype=torch.int64), torch.empty_like(cu_rows)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, share, capacity in (
        ("exact", (8, 5), 0.6, -1),
        ("capacity with room", (8, 0, 5), 0.6, 16),
        ("everything kept, capacity just enough", (3, 4), 1.1, 7),
        ("nothing kept", (3, 4), -1.0, -1),
        ("nothing kept, capacity", (3, 4), -1.0, 2),
        ("no rows", (0, 0), 0.5, -1),
    ):
        keep = torch.rand(sum(counts), generator=generator) < share
        cu_rows = cu_rows_of(counts)
        yield Sample(name, (keep, cu_rows, capacity), (pad_rows(keep, 3), cu_rows, capacity))


OP = define(
    "keep_index",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    gathers=True,
    cut=True,
    kernel="dgraph.ops.selection.triton.keep_index:kernel",
)
