"""The ops that move rows, the row-wise ops, and the helpers that the references share."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of
from dgraph.ops.padded import groups, padded_length, sequence_of

ops = torch.ops.dgraph


def test_keep_index_lists_kept_rows_in_order() -> None:
    keep = torch.tensor([1, 0, 1, 0, 0, 1, 1, 1]).bool()
    cu_rows = cu_rows_of([3, 0, 2, 2])  # row 7 is padding
    index, offsets = ops.keep_index(keep, cu_rows, -1)
    assert (index.tolist(), offsets.tolist()) == ([0, 2, 5, 6], [0, 2, 2, 2, 4])
    assert (index.dtype, offsets.dtype) == (torch.int64, torch.int32)
    assert ops.keep_index(keep, cu_rows, 4)[0].tolist() == [0, 2, 5, 6]
    assert ops.keep_index(keep, cu_rows, 6)[0].tolist() == [0, 2, 5, 6, -1, -1]


def test_keep_index_refuses_more_rows_than_its_capacity() -> None:
    with pytest.raises(InputError, match="3 rows are kept, capacity is 2"):
        ops.keep_index(torch.ones(3).bool(), cu_rows_of([3]), 2)


def test_compact_gathers_rows_and_fills_the_padding_of_integers_and_flags() -> None:
    values = [torch.arange(12.0).view(4, 3), torch.tensor([1, 2, 3, 4]), torch.ones(4).bool()]
    got = ops.compact(values, torch.tensor([3, 0, -1]))
    assert got[0][:2].tolist() == [[9, 10, 11], [0, 1, 2]]
    assert got[0][2].isnan().all(), "of floats it is not written"
    assert got[1].tolist() == [4, 1, 0]
    assert got[2].tolist() == [True, True, False]


def test_compact_of_kept_rows_is_boolean_indexing() -> None:
    x, keep = torch.randn(20, 4), torch.rand(20) < 0.5
    index, _ = ops.keep_index(keep, cu_rows_of([12, 8]), -1)
    assert ops.compact([x], index)[0].equal(x[keep])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_the_formula_of_qwen3(dtype: torch.dtype) -> None:
    x, weight = torch.randn(6, 16).to(dtype), torch.randn(16).to(dtype)
    wide = x.float()
    want = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    assert ops.rms_norm(x, weight, 1e-6).equal(want)


def test_rope_turns_each_pair_by_its_angle() -> None:
    x, theta = torch.randn(5, 2, 8), torch.rand(5, 4) * 6
    angles = theta.repeat(1, 2)[:, None]
    got = ops.rope(x, angles.cos(), angles.sin())
    for row in range(5):
        for i in range(4):
            c, s = theta[row, i].cos(), theta[row, i].sin()
            a, b = x[row, :, i], x[row, :, i + 4]
            assert_close(got[row, :, i], a * c - b * s)
            assert_close(got[row, :, i + 4], b * c + a * s)


def test_padded_length_is_monotone_and_wastes_a_quarter_at_most() -> None:
    lengths = [padded_length(n) for n in range(1, 3000)]
    assert lengths == sorted(lengths)
    assert all(n <= length <= max(8, n * 1.25 + 3) for n, length in enumerate(lengths, 1))
    assert len(set(lengths[:1024])) <= 32


def test_groups_cover_every_row_once() -> None:
    counts = [3, 0, 40, 5, 33, 3]
    rows = torch.cat([group.rows[group.live] for group in groups(cu_rows_of(counts))])
    assert sorted(rows.tolist()) == list(range(sum(counts)))
    assert sequence_of(cu_rows_of([2, 0, 1]), 5).tolist() == [0, 0, 2, 3, 3]
