"""Random packed batches for the samples of the ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def cu_rows_of(counts: Sequence[int]) -> Tensor:
    """Row offsets i32[b+1] from the number of rows of each sequence."""
    return torch.tensor([0, *counts]).cumsum(0).int()


def positions_of(counts: Sequence[int], starts: Sequence[int]) -> Tensor:
    """Positions i64[N] of rows that lie at consecutive positions from the start of their sequence."""
    parts = [torch.arange(start, start + count) for count, start in zip(counts, starts, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def limits_of(counts: Sequence[int], starts: Sequence[int], block: int) -> Tensor:
    """Limits i32[N]: the end of each row's block."""
    return ((positions_of(counts, starts) // block + 1) * block).int()


def pad_rows(value: Tensor, rows: int) -> Tensor:
    """Append padding rows to `value`: NaN, True or a large number, on which no result may depend."""
    filler = float("nan") if value.is_floating_point() else True if value.dtype == torch.bool else 1_000_003
    return torch.cat([value, value.new_full((rows, *value.shape[1:]), filler)])


def without_pages(args: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """Take the page of each sequence's first positions out of the page table, argument number `at` of a call."""
    table = args[at].clone()
    table[:, 0] = -1
    return *args[:at], table, *args[at + 1 :]


def page_table_of(lengths: Sequence[int], page: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Page table i32[b, P] with pages in random order (-1: no page), and the number of pages in the pool.

    Two pages of the pool belong to no sequence.
    """
    needed = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=generator).int()
    table = torch.full((len(lengths), max([1, *needed])), -1, dtype=torch.int32)
    used = 0
    for s, count in enumerate(needed):
        table[s, :count] = order[used : used + count]
        used += count
    return table, len(order)
