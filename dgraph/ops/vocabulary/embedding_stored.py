"""dgraph::embedding_stored: the vectors of ids, from a quantised table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.families.quantised import WHOLE, dequantised
from dgraph.ops.products import dequantise
from dgraph.ops.registry import Sample, define
from dgraph.ops.vocabulary.embedding_part import place_of

CONTRACT = """\
values, scales, zeros and block as dgraph::dequantise takes them, of a weight [V, d]; ids i64[...]; first i64[1] or None
-> [..., d] of dtype: what aten::embedding gives of the dequantised weight, or dgraph::embedding_part if it is of the
ids from `first` on: zeros for an id outside of the part.
Rows that are read are dequantised, and no others; computed in fp32 and rounded once. The pass QuantisedOperands makes
it of a lookup in a quantised weight.
Row by row: a padding row influences no other row, but without `first` it must hold an id of the table. Deterministic.
Inline: the compiler fuses it."""


def reference(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    ids: Tensor,
    first: Tensor | None,
    block: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    place, outside = ids, None
    if first is not None:
        place, outside = place_of(ids, first, values.shape[0])
    high, wide = block
    place = place.flatten()
    of = torch.zeros_like(place) if high == WHOLE else place // high
    zero = None if zeros is None else F.embedding(of, zeros)
    found = dequantised(F.embedding(place, values), F.embedding(of, scales), zero, (1, wide), dtype)
    found = found.view(*ids.shape, found.shape[1])
    return found if outside is None else found.masked_fill(outside.unsqueeze(-1), 0.0)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for table in dequantise.samples(generator):
        values, scales, zeros, block, dtype = table.args
        if values.dim() != 2:
            continue
        stored = values, scales, zeros
        ids, rest = torch.randint(0, len(values), (9,), generator=generator), (block, dtype)
        padded = torch.cat([ids, ids.new_zeros(2)])
        yield Sample(table.name, (*stored, ids, None, *rest), (*stored, padded, None, *rest))
        ids, first = torch.randint(0, 11, (2, 3), generator=generator), torch.tensor([3])
        yield Sample(f"{table.name}, a part", (*stored, ids, first, *rest))
    empty = torch.empty(0, dtype=torch.int64)
    yield Sample("no rows", (*stored, empty, None, *rest))


OP = define(
    "embedding_stored",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("ids",),
    padding=(None,),
    inline=True,
)
