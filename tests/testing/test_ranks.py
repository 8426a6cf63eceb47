"""Ranks as threads: sums by rank, errors that end all, and calls that do not match."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.ranks.groups import group_of
from dgraph.testing import ranks
from dgraph.testing.ranks import RankEnded


def test_ranks_reduce_and_gather() -> None:
    def function(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.arange(6.0).reshape(2, 3) + 10**rank
        reduced = OPS["all_reduce"].overload(own, "tp")
        own.fill_(-1)  # what a rank does with its own afterwards is nobody's business
        return reduced, OPS["all_gather"].overload(torch.full((2, 1), rank), "tp", 3)

    for reduced, gathered in ranks(3, function):
        assert torch.equal(reduced, 3 * torch.arange(6.0).reshape(2, 3) + 111)
        assert gathered.tolist() == [[0, 1, 2]] * 2


def test_bf16_is_summed_as_on_a_device_and_rounded_once() -> None:
    shares = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    sums = ranks(3, lambda rank: group_of("tp").all_reduce(shares[rank : rank + 1]))
    assert [s.item() for s in sums] == [258.0] * 3


def test_a_group_is_joined_in_its_threads_alone() -> None:
    assert ranks(2, lambda rank: group_of("mine").rank, group="mine") == [0, 1]
    with pytest.raises(InputError, match="in no group 'mine'"):
        group_of("mine")


def test_ranks_run_one_at_a_time() -> None:
    inside, most = 0, 0

    def function(rank: int) -> None:
        nonlocal inside, most
        for _ in range(3):
            inside += 1
            most = max(most, inside)
            time.sleep(0.002)
            inside -= 1
            group_of("tp").all_reduce(torch.ones(1))

    ranks(3, function)
    assert most == 1


def test_any_thread_of_a_rank_may_call_collectives() -> None:
    def function(rank: int) -> float:
        group, found = group_of("tp"), []
        worker = threading.Thread(target=lambda: found.append(group.all_reduce(torch.ones(1)).item()))
        worker.start()
        worker.join()
        return found[0]

    assert ranks(2, function) == [2.0, 2.0]


def test_the_error_of_one_rank_ends_all() -> None:
    def function(rank: int) -> None:
        if rank == 1:
            raise ValueError("no more")
        group_of("tp").all_reduce(torch.ones(1))

    begun = time.monotonic()
    with pytest.raises(ValueError, match="no more") as caught:
        ranks(3, function)
    assert caught.value.__notes__ == ["on rank 1 of 3"]
    assert time.monotonic() - begun < 5


def test_calls_that_do_not_match_are_named() -> None:
    with pytest.raises(RankEnded, match=r"rank 0 all_reduce of float32 \[1\]; rank 1 all_reduce of float32 \[2\]"):
        ranks(2, lambda rank: group_of("tp").all_reduce(torch.ones(rank + 1)))
    with pytest.raises(RankEnded, match=r"rank 0 waits in all_gather of int64 \[1\], but rank 1 has ended"):
        ranks(2, lambda rank: rank or group_of("tp").all_gather(torch.tensor([rank])))
