"""dgraph::feature_write: store one vector per row in a paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of, positions_of, without_pages
from dgraph.ops.padded import placed_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
Position p of sequence s lives at cache[page_table[s, p // page], p % page].
Writes values [K, F] of every live row to cache [pages, page, F], of the same dtype; returns nothing.
positions i64[K]; page_table i32[b, P]; cu_rows i32[b+1], the offsets of these K rows.
Padding rows write nothing and may hold anything; the rows of a step address distinct slots, so the order of the
writes does not matter. A row whose position has no page (a negative entry) writes nothing. A page that the cache does
not have is an error in the reference and undefined in a kernel."""


def reference(values: Tensor, cache: Tensor, positions: Tensor, page_table: Tensor, cu_rows: Tensor) -> None:
    rows, slots = placed_rows("feature_write", positions, page_table, cu_rows, *cache.shape[:2])
    cache[slots] = values[rows]


def samples(generator: torch.Generator) -> Iterator[Sample]:
    yield from placed_samples(generator)
    for sample in placed_samples(generator):
        if sample.name.startswith("ragged"):
            assert sample.padded is not None
            yield Sample("pages missing", *(without_pages(args, 3) for args in (sample.args, sample.padded)))


def placed_samples(generator: torch.Generator) -> Iterator[Sample]:
    """Samples in which every position has a page."""
    for name, counts, starts, page, width in (
        ("one sequence", (4,), (0,), 4, 16),
        ("ragged, an empty sequence, across pages", (5, 0, 7, 1), (3, 9, 14, 31), 8, 20),
        ("no rows", (0, 0), (0, 0), 4, 8),
        ("page of one position, odd width", (3, 2), (2, 0), 1, 13),
    ):
        table, pages = page_table_of([c + s for c, s in zip(counts, starts, strict=True)], page, generator)
        values = torch.randn(sum(counts), width, generator=generator)
        cache = torch.randn(pages, page, width, generator=generator)
        rest = (table, cu_rows_of(counts))
        positions = positions_of(counts, starts)
        yield Sample(
            name,
            (values, cache.clone(), positions, *rest),
            (pad_rows(values, 3), cache, pad_rows(positions, 3), *rest),
        )


OP = define(
    "feature_write",
    reference,
    samples=samples,
    contract=CONTRACT,
    mutates=("cache",),
    kernel="dgraph.ops.kv.triton.feature_write:kernel",
)
