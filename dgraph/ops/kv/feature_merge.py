"""dgraph::feature_merge: one vector per row, the new one if the row is listed, else that of a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of, positions_of
from dgraph.ops.padded import placed_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
new [R, ...] are the values of the rows index i64[R], ascending, -1 after the last, among N rows.
cache [pages, page, ...], of the same dtype, takes them where their position has a page: position p of sequence s lives
at cache[page_table[s, p // page], p % page], and a negative entry stands for no page.
positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1], the offsets of the N rows -> [N, ...], contiguous: a row's new
value where it is listed, else what the cache holds of its position; zeros without a page, and for padding rows.
An exact copy. Padding rows, and values of new whose index is -1, may hold anything. The rows of a step address distinct
slots. A listed padding row, or a page that the cache does not have, is an error in the reference and undefined in a
kernel. Deterministic."""


def reference(
    new: Tensor, index: Tensor, cache: Tensor, positions: Tensor, page_table: Tensor, cu_rows: Tensor
) -> Tensor:
    rows, slots = placed_rows("feature_merge", positions, page_table, cu_rows, *cache.shape[:2])
    listed = index >= 0
    live = min(int(cu_rows[-1]), positions.shape[0])
    if bool((index >= live).any()):
        raise InputError(
            f"dgraph::feature_merge: index lists row {int(index.max())}, but only {live} rows are no padding. List "
            f"rows of the step (list_kept does), and -1 after the last."
        )
    out = new.new_zeros((positions.shape[0], *new.shape[1:]))
    out[rows] = cache[slots]
    out[index[listed]] = new[listed]
    cache[slots] = out[rows]
    return out


def fake(new: Tensor, index: Tensor, cache: Tensor, positions: Tensor, *rest: Any) -> Tensor:
    return new.new_empty((positions.shape[0], *new.shape[1:]))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, starts, page, shape, share, missing in (
        ("some rows", (9, 7), (0, 5), 4, (16,), 0.4, 0),
        ("ragged, an empty sequence, across pages", (5, 0, 7, 1), (3, 9, 14, 31), 8, (20,), 0.5, 0),
        ("pages missing", (11, 0, 9), (0, 2, 2), 4, (13,), 0.5, 1),
        ("no pages, several dimensions", (3, 2), (2, 0), 4, (2, 6), 0.5, 2),
        ("all rows, page of one position", (3, 4), (2, 0), 1, (7,), 1.1, 1),
        ("none listed", (3, 4), (0, 0), 4, (8,), -1.0, 0),
        ("no rows", (0, 0), (0, 0), 4, (8,), 0.5, 0),
    ):
        cu_rows, positions = cu_rows_of(counts), positions_of(counts, starts)
        table, pages = page_table_of([c + s for c, s in zip(counts, starts, strict=True)], page, generator)
        table[:, :missing] = -1
        chosen = (torch.rand(sum(counts), generator=generator) < share).nonzero()[:, 0]
        index = torch.cat([chosen, chosen.new_full((sum(counts) - len(chosen),), -1)])
        new = torch.randn(sum(counts), *shape, generator=generator)
        new[len(chosen) :] = torch.nan
        cache = torch.randn(pages, page, *shape, generator=generator)
        padded = torch.cat([index, index.new_full((3,), -1)])
        yield Sample(
            name,
            (new, index, cache.clone(), positions, table, cu_rows),
            (pad_rows(new, 3), padded, cache, pad_rows(positions, 3), table, cu_rows),
        )


OP = define(
    "feature_merge",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    mutates=("cache",),
    own_rows=("new", "index"),
    padding=(0,),
    kernel="dgraph.ops.kv.triton.feature_merge:kernel",
)
