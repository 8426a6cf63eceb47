"""dgraph::all_gather: concatenate the values of all ranks of a group along the last dimension."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define
from dgraph.ranks.groups import Alone, group_of

CONTRACT = """\
What each rank of a group of `world` ranks has, one after the other along the last dimension, by rank.
x [..., n] -> [..., world * n] of the same dtype; every rank gets the same bits. All ranks call it with the same shape,
and in the same order as every other collective. group "" is a group of this rank alone. Row by row: a padding row
influences no other row."""


def reference(x: Tensor, group: str, world: int) -> Tensor:
    ranks = group_of(group) if group else Alone()
    if ranks.world != world:
        raise InputError(
            f"dgraph::all_gather: the program was made for {world} ranks, and group {group!r} has {ranks.world}."
        )
    return ranks.all_gather(x).movedim(0, -2).flatten(-2)


def fake(x: Tensor, group: str, world: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], world * x.shape[-1]))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, shape in (("rows", (5, 8)), ("one value per row", (7, 1)), ("no rows", (0, 8))):
        x = torch.randn(shape, generator=generator)
        yield Sample(name, (x, "", 1), (pad_rows(x, 3), "", 1))


OP = define(
    "all_gather",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    by_row=("x",),
    padding=(None,),
)
