"""dgraph::least_similar: how many rows it takes, ties, and what it writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of

ops = torch.ops.dgraph


def chosen(angles: list[list[float]], share: float, full: list[int] | None = None) -> list[list[int]]:
    """Rows that are taken of each sequence, whose values have turned by these angles; NaN: nothing is cached."""
    flat = torch.tensor([a for each in angles for a in each])
    cache = torch.stack([flat.cos(), flat.sin()], 1).view(-1, 1, 1, 2)  # one page per row
    v = torch.tensor([[[3.0, 0.0]]]).repeat(len(flat), 1, 1)
    most = max(map(len, angles))
    table, first = torch.full((len(angles), most), -1, dtype=torch.int32), 0
    for row, each in zip(table, angles, strict=True):
        row[: len(each)] = torch.arange(first, first + len(each))
        first += len(each)
    positions = torch.tensor([p for each in angles for p in range(len(each))])
    flags = torch.zeros(len(flat), dtype=torch.bool)
    flags[full or []] = True
    cu_rows = cu_rows_of([len(each) for each in angles])
    found = ops.least_similar(v, cache, flags, positions, table, cu_rows, share)
    assert torch.equal(cache.view(-1, 2), v.view(-1, 2)), "all values are written"
    return [part.nonzero()[:, 0].tolist() for part in found.split([len(each) for each in angles])]


def test_the_rows_that_have_turned_most() -> None:
    assert chosen([[0.1, 0.9, 0.2, 0.8], [0.5, 0.4]], 0.5) == [[1, 3], [0]]


@pytest.mark.parametrize(("share", "count"), [(0, 0), (0.19, 0), (0.2, 1), (0.5, 2), (0.99, 4), (1, 5)])
def test_the_count_is_rounded_down(share: float, count: int) -> None:
    assert chosen([[0.5, 0.4, 0.3, 0.2, 0.1]], share) == [list(range(count))]


def test_ties_go_to_the_lower_row() -> None:
    assert chosen([[0.1, 0.7, 0.7, 0.7], [0.3, 0.3]], 0.5) == [[1, 2], [0]]


def test_full_rows_are_taken_beside_the_share_of_the_others() -> None:
    assert chosen([[0.1, 0.2, 0.3, 0.4, 0.5]], 0.5, [0, 4]) == [[0, 3, 4]]
    assert chosen([[0.1, 0.2]], 0, [1]) == [[1]]


def test_what_was_never_cached_comes_first() -> None:
    assert chosen([[3.1, float("nan"), 0.1]], 0.34) == [[1]]


def test_a_row_without_a_page_is_an_error() -> None:
    def call(table: Tensor) -> Tensor:
        rows = torch.zeros(1, 1, 2), torch.zeros(1, 4, 1, 2), torch.zeros(1).bool(), torch.tensor([5])
        return ops.least_similar(*rows, table, cu_rows_of([1]), 0.5)

    with pytest.raises(InputError, match="dgraph::least_similar: a row's position lies in a page"):
        call(torch.tensor([[0, -1]]).int())
