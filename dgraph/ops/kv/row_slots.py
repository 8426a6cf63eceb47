"""dgraph::row_slots: slots of the positions of rows in paged caches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import without_pages
from dgraph.ops.kv import feature_write
from dgraph.ops.registry import Sample, define

CONTRACT = """\
positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1]; cache [pages, page, ...], of which only the size of a page is
read: it is the same for all caches of a program, and so are the slots.
-> i64[N]: page_table[s, p // page] * page + p % page for position p of sequence s, the number of its slot among the
pages * page of a cache; -1 for padding rows, and for rows whose position has no page (a negative entry, or a position
after the last entry).
Padding rows may hold anything. Deterministic. Nothing is read on the host. Inline: the compiler fuses it, once for all
that read it."""


def reference(positions: Tensor, page_table: Tensor, cu_rows: Tensor, cache: Tensor) -> Tensor:
    page, (b, entries) = cache.shape[1], page_table.shape
    rows = torch.arange(positions.shape[0], dtype=cu_rows.dtype, device=cu_rows.device)
    # Counted, not searched: a compiler fuses that everywhere.
    sequence = (cu_rows[1:] <= rows[:, None]).sum(1)
    at = positions // page
    there = (sequence < b) & (at >= 0) & (at < entries)
    # A row without an entry looks up some page of some sequence, and the result is dropped.
    found = page_table[sequence.clamp(max=b - 1), at.clamp(0, entries - 1)].long()
    return torch.where(there & (found >= 0), found * page + positions % page, -1)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for sample in feature_write.placed_samples(generator):
        assert sample.padded is not None
        plain, padded = ((*args[2:], args[1]) for args in (sample.args, sample.padded))
        yield Sample(sample.name, plain, padded)
        yield Sample(f"{sample.name}, pages missing", without_pages(plain, 1), without_pages(padded, 1))


OP = define(
    "row_slots",
    reference,
    samples=samples,
    contract=CONTRACT,
    reads=(),
    padding=(-1,),
    inline=True,
    ahead=True,
)
