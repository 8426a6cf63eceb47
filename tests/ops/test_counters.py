"""Counters that are zero when a kernel starts."""

from __future__ import annotations

import torch

from dgraph.ops import counters

CPU = torch.device("cpu")


def test_a_call_has_counters_of_its_own() -> None:
    one, other = counters.zeros(5, CPU), counters.zeros(5, CPU)
    assert one.tolist() == [0] * 5
    assert one.dtype == torch.int32
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_within_a_graph_calls_share_what_one_kernel_clears() -> None:
    with counters.shared():
        taken = [counters.zeros(100, CPU) for _ in range(3)]
        assert len({t.untyped_storage().data_ptr() for t in taken}) == 1
        assert len({t.data_ptr() for t in taken}) == 3
        for i, t in enumerate(taken):
            t.fill_(i)
        assert [t.unique().tolist() for t in taken] == [[0], [1], [2]]
        odd, after = counters.zeros(7, CPU), counters.zeros(7, CPU)
        assert len(odd) == 7
        assert (after.data_ptr() - taken[0].data_ptr()) % 16 == 0, "as a kernel's pointers that need no other code"
    assert counters.zeros(1, CPU).untyped_storage().data_ptr() != taken[0].untyped_storage().data_ptr()


def test_more_than_one_chunk_holds_takes_another_and_keeps_the_first() -> None:
    with counters.shared():
        first = counters.zeros(counters.CHUNK - 1, CPU)
        second = counters.zeros(2, CPU)
        third = counters.zeros(counters.CHUNK + 1, CPU)
        storages = {t.untyped_storage().data_ptr() for t in (first, second, third)}
        assert len(storages) == 3
        assert len(third) == counters.CHUNK + 1
        nested = counters.zeros(3, CPU)
        assert nested.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
