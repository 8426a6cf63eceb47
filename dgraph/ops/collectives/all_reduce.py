"""dgraph::all_reduce: sum a value over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define
from dgraph.ranks.groups import Alone, group_of

CONTRACT = """\
The sum of x over the ranks of a group, in the dtype of x; every rank gets the same bits. x [...] -> the shape of x.
All ranks call it with the same shape, and in the same order as every other collective. group "" is a group of this rank
alone. Row by row: a padding row influences no other row. The order of the sum over ranks is fixed for a shape."""


def reference(x: Tensor, group: str) -> Tensor:
    return (group_of(group) if group else Alone()).all_reduce(x)


def fake(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, shape in (("rows", (5, 8)), ("one value per row", (7,)), ("no rows", (0, 8))):
        x = torch.randn(shape, generator=generator)
        yield Sample(name, (x, ""), (pad_rows(x, 3), ""))


OP = define(
    "all_reduce",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    by_row=("x",),
    padding=(None,),
)
