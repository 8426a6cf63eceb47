"""dgraph::compact: gather rows of several tensors at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
Row index[i] of every tensor, along dimension 0, in the order of `index`. values: tensors [N, ...] of any
dtype; index i64[K] -> tensors [K, ...], contiguous, of the same dtypes. An exact copy. Rows that the index
does not name may hold anything, and there may be any number of them: N may differ from tensor to tensor.
Index -1 is padding: a row of zeros (False) of an integer or boolean tensor, which may say what to look up or
whether to look at a row; that of a floating tensor is not written, and holds anything. Who reads it must not
let it reach a live row; every op of dgraph keeps to that. The reference fills it with NaN, so that who does
not is found."""


def reference(values: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    dead = index < 0
    if not bool(dead.any()):
        return [value.index_select(0, index) for value in values]
    live = ~dead
    found = []
    for value in values:
        filler = torch.nan if value.is_floating_point() else 0
        out = value.new_full((index.shape[0], *value.shape[1:]), filler)
        out[live] = value[index[live]]
        found.append(out)
    return found


def fake(values: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    return [value.new_empty((index.shape[0], *value.shape[1:])) for value in values]


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, n, index in (
        ("some rows", 9, (0, 3, 4, 8)),
        ("a row twice, out of order", 9, (7, 1, 7)),
        ("all rows", 4, (0, 1, 2, 3)),
        ("no index", 5, ()),
        ("no rows", 0, ()),
    ):
        values = [
            torch.randn(n, 3, 5, generator=generator),
            torch.randn(n, 7, generator=generator).bfloat16(),
            torch.randint(0, 99, (n,), generator=generator),
            torch.rand(n, generator=generator) < 0.5,
        ]
        rows = torch.tensor(index, dtype=torch.int64)
        padded = torch.cat([rows, rows.new_full((3,), -1)])
        yield Sample(name, (values, rows), ([pad_rows(value, 3) for value in values], padded))
        # Buffers of several sizes, of which a step has filled the first n rows.
        unequal = [pad_rows(value, more) for more, value in enumerate(values)]
        yield Sample(f"{name}, others after them", (unequal, rows.clone()), (unequal, padded.clone()))


OP = define(
    "compact",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    gathers=True,
    padding=(None, None, 0, 0),
    kernel="dgraph.ops.selection.triton.compact:kernel",
)
