"""dgraph::least_similar: how many rows it takes, ties, and what it writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of

ops = torch.ops.dgraph


def chosen(angles: list[list[float]], share: float, full: list[int] | None = None) -> list[list[int]]:
    """Rows that are taken of each sequence, whose values have changed by these angles; NaN: nothing is cached."""
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


def test_the_share_is_of_the_rows_that_adapt() -> None:
    """Of rows 1, 3 and 4 of the first sequence; the second, whose values have changed more, is idle."""
    angles = torch.tensor([0.9, 0.1, 0.8, 0.3, 0.2, 1.0, 1.1])
    cache = torch.stack([angles.cos(), angles.sin()], 1).view(7, 1, 1, 2)  # one page per row
    before, v = cache.clone(), torch.tensor([[[3.0, 0.0]]]).repeat(7, 1, 1)
    full, adapt = torch.zeros(7).bool(), torch.tensor([0, 1, 0, 1, 1, 0, 0]).bool()
    full[0] = True
    table, positions = torch.tensor([[0, 1, 2, 3, 4], [5, 6, -1, -1, -1]]).int(), torch.tensor([0, 1, 2, 3, 4, 0, 1])
    found = ops.least_similar(v, cache, full, positions, table, cu_rows_of([5, 2]), 0.67, adapt)
    assert found.nonzero()[:, 0].tolist() == [0, 3, 4]
    for row in range(7):
        assert torch.equal(cache[row, 0], (before[row, 0] if row in (2, 5, 6) else v[row])), row


def test_a_row_without_a_page_is_full_or_an_error() -> None:
    def call(full: bool, table: Tensor) -> tuple[Tensor, Tensor]:
        v, cache = torch.ones(2, 1, 2), torch.zeros(1, 4, 1, 2)
        rows = torch.tensor([full, False]), torch.tensor([1, 5])
        return ops.least_similar(v, cache, *rows, table, cu_rows_of([2]), 1.0), cache

    found, cache = call(True, torch.tensor([[-1, 0]]).int())
    assert found.tolist() == [True, True]
    assert cache[0, :, 0, 0].tolist() == [0, 1, 0, 0]
    with pytest.raises(InputError, match=r"least_similar: a row that is not full has a position without a page"):
        call(False, torch.tensor([[-1, 0]]).int())
    with pytest.raises(InputError, match=r"least_similar: a row's position lies on page 3, but the cache has 1 pages"):
        call(True, torch.tensor([[-1, 3]]).int())
