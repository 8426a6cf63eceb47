"""dgraph::embedding_part: the vectors of ids, from the part of the table that a rank has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
weight [V, d], the vectors of the ids first, ..., first + V - 1; ids i64[...]; first i64[1] -> [..., d] in the dtype of
weight: the vector of each id, and zeros for an id outside of the part. Summed over ranks that have one part each, that
is the vector of each id, exactly.
Row by row: a padding row influences no other row. Inline: the compiler fuses it."""


def reference(weight: Tensor, ids: Tensor, first: Tensor) -> Tensor:
    place, outside = place_of(ids, first, weight.shape[0])
    return F.embedding(place, weight).masked_fill(outside.unsqueeze(-1), 0.0)


def place_of(ids: Tensor, first: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Rows of ids in a part of the table that holds `count` ids from `first` on, and flags of the ids outside of it.

    An id outside of the part has row 0.
    """
    local = ids - first
    outside = (local < 0) | (local >= count)
    return local.masked_fill(outside, 0), outside


def samples(generator: torch.Generator) -> Iterator[Sample]:
    weight = torch.randn((5, 4), generator=generator)
    for name, shape, first in (
        ("rows", (9,), 3),
        ("a padded batch", (2, 3), 0),
        ("nothing of the part", (4,), 20),
        ("no rows", (0,), 5),
    ):
        ids = torch.randint(0, 11, shape, generator=generator)
        offset = torch.tensor([first])
        yield Sample(name, (weight, ids, offset), (weight, pad_rows(ids, 2), offset) if len(shape) == 1 else None)


OP = define(
    "embedding_part",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("ids",),
    padding=(None,),
    inline=True,
    in_bounds=True,
)
