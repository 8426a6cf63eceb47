"""dgraph::feature_merge: new values where rows are listed, kept ones elsewhere, and positions without a page."""

from __future__ import annotations

import pytest
import torch

from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.ops.draws import cu_rows_of

ops = torch.ops.dgraph
PAGE = 2


def test_it_is_a_write_and_a_read_where_every_position_has_a_page() -> None:
    for sample in OPS["feature_merge"].samples(torch.Generator().manual_seed(3)):
        new, index, cache, positions, table, cu_rows = sample.args
        if new.dim() > 2 or (table[:, 0] < 0).any():
            continue
        listed = index[index >= 0]
        counts = torch.searchsorted(listed, cu_rows.long()).int()
        mine = cache.clone()
        ops.feature_write(new[: len(listed)], mine, positions[listed], table, counts)
        want = ops.feature_read(mine, positions, table, cu_rows)
        assert torch.equal(ops.feature_merge(new, index, cache, positions, table, cu_rows), want), sample.name
        assert torch.equal(cache, mine), sample.name


def test_rows_by_kind() -> None:
    """Listed or not, with a page or without; a sequence without rows stands between the two."""
    cache = torch.arange(8.0).view(4, PAGE, 1)
    table = torch.tensor([[-1, 2], [0, 0], [1, -1]]).int()
    positions, cu_rows = torch.tensor([0, 1, 2, 3, 1, 2, 3, 9]), cu_rows_of([4, 0, 3])  # the last row is padding
    new, index = torch.tensor([[10.0], [20.0], [30.0], [torch.nan]]), torch.tensor([1, 3, 6, -1])
    found = ops.feature_merge(new, index, cache, positions, table, cu_rows)
    assert found[:, 0].tolist() == [0, 10, 4, 20, 3, 0, 30, 0]
    assert cache.flatten().tolist() == [0, 1, 2, 3, 4, 20, 6, 7]


def test_errors_say_what_is_wrong() -> None:
    new, cache, cu_rows = torch.zeros(3, 1), torch.zeros(1, PAGE, 1), cu_rows_of([2])
    positions, table = torch.tensor([0, 1, 0]), torch.tensor([[0]]).int()
    with pytest.raises(InputError, match="index lists row 2, but only 2 rows are no padding"):
        ops.feature_merge(new, torch.tensor([0, 2, -1]), cache, positions, table, cu_rows)
    with pytest.raises(InputError, match="dgraph::feature_merge: a row's position lies on page 1, but the cache has 1"):
        ops.feature_merge(new, torch.tensor([0, 1, -1]), cache, positions, table + 1, cu_rows)
    assert not cache.any()
