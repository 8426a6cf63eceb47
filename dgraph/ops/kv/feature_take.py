"""dgraph::feature_take: read one vector per row from a paged cache, by the slots of the rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.registry import Sample, define

CONTRACT = """\
cache [pages, page, ...], with at least one page; slots i64[N], as row_slots gives them: slot i is
cache[i // page, i % page] -> [N, ...], in the dtype of cache: an exact copy, and zeros where slots is negative.
What other slots hold (NaN) has no influence. A slot that the cache does not have is undefined; it reads nothing outside
of the cache. Deterministic.
Row by row. Inline: the compiler fuses it with what reads it, so that it is no pass over memory of its own."""


def reference(cache: Tensor, slots: Tensor) -> Tensor:
    flat = cache.flatten(0, 1)
    # Bounded on both sides, so a compiled region need not check it (see dgraph/lowering/regions.py).
    found = flat[slots.clamp(0, flat.shape[0] - 1)]
    return found.masked_fill((slots < 0).view(-1, *(1,) * (flat.dim() - 1)), 0)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, shape, slots in (
        ("some slots, one twice", (3, 4, 16), (11, 0, 5, 5)),
        ("rows without a slot", (3, 4, 20), (-1, 7, -1, 8, -1)),
        ("heads", (2, 8, 3, 5), (15, -1, 0)),
        ("page of one position, odd width", (5, 1, 13), (4, 2, 0)),
        ("no row has a slot", (1, 4, 8), (-1, -1)),
        ("no rows", (2, 4, 8), ()),
    ):
        cache = torch.randn(shape, generator=generator)
        unread = [i for i in range(shape[0] * shape[1]) if i not in slots]
        cache.flatten(0, 1)[unread] = torch.nan
        rows = torch.tensor(slots, dtype=torch.int64)
        yield Sample(name, (cache, rows), (cache, torch.cat([rows, rows.new_full((3,), -1)])))


OP = define(
    "feature_take",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("slots",),
    padding=(0,),
    inline=True,
    in_bounds=True,
)
