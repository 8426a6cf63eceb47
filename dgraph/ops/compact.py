"""dgraph::compact: gather rows of several tensors at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Op, Sample, define, register

CONTRACT = """\
Row index[i] of every tensor, along dimension 0, in the order of `index`; index -1 gives a row of zeros
(False). values: tensors [N, ...] of any dtype; index i64[K] -> tensors [K, ...], contiguous, of the same
dtypes. An exact copy. Rows that the index does not name may hold anything."""


def reference(values: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    dead = index < 0
    if not bool(dead.any()):
        return [value.index_select(0, index) for value in values]
    live = ~dead
    found = []
    for value in values:
        out = value.new_zeros((index.shape[0], *value.shape[1:]))
        out[live] = value[index[live]]
        found.append(out)
    return found


def fake(values: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    return [value.new_empty((index.shape[0], *value.shape[1:])) for value in values]


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, n, index in (
        ("some rows", 9, (0, 3, 4, 8)),
        ("padding at the end", 9, (1, 2, 7, -1, -1, -1)),
        ("all rows", 4, (0, 1, 2, 3)),
        ("nothing but padding", 5, (-1, -1)),
        ("no index", 5, ()),
        ("no rows", 0, (-1, -1, -1)),
    ):
        values = [
            torch.randn(n, 3, 5, generator=generator),
            torch.randn(n, 7, generator=generator).bfloat16(),
            torch.randint(0, 99, (n,), generator=generator),
            torch.rand(n, generator=generator) < 0.5,
        ]
        rows = torch.tensor(index, dtype=torch.int64)
        padded = ([pad_rows(value, 3) for value in values], torch.cat([rows, rows.new_full((2,), -1)]))
        yield Sample(name, (values, rows), padded)


OP = register(
    Op(
        name="compact",
        overload=define("compact", "(Tensor[] values, Tensor index) -> Tensor[]", reference, fake),
        reference=reference,
        samples=samples,
        contract=CONTRACT,
    )
)
