"""Ranks as threads of one process, which run a sharded model without a second process or a device.

from dgraph.testing import ranks

def function(rank):
    return dgraph.ops.OPS["all_reduce"].reference(torch.full((2,), float(rank)), "tp")

first, second = ranks(2, function)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor

from dgraph.errors import RankLost
from dgraph.ranks.groups import joined
from dgraph.ranks.sharding import GROUP

T = TypeVar("T")
WAIT = 300.0
"""Seconds that a rank waits for the others in a collective; they may compile meanwhile."""


class RankEnded(RankLost, AssertionError):
    """Error of a rank that waits for one that has ended, failed, or calls something else."""


class _Meeting:
    """Meeting point at which ranks wait for each other.

    They run one at a time, from one collective to the next. So capture and compilation, which are not made for threads,
    never run at the same time, and runs are reproducible.
    """

    def __init__(self, world: int):
        self.world = world
        self._changed = threading.Condition()
        self._running: int | None = None
        self._given: dict[int, tuple[str, Any]] = {}
        self._rounds = 0
        self._result: Any = None
        self._told: list[deque[Any]] = [deque() for _ in range(world)]
        self._ended: set[int] = set()
        self._broken: str | None = None

    def begin(self, rank: int) -> None:
        """Wait for the rank's turn."""
        with self._changed:
            self._take_turn(rank)

    def end(self, rank: int, error: BaseException | None) -> None:
        """Tell the others that a rank runs no more."""
        with self._changed:
            self._ended.add(rank)
            if error is not None and self._broken is None:
                self._broken = f"rank {rank} failed: {type(error).__name__}: {error}"
            self._leave_turn(rank)

    def meet(self, rank: int, what: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait for all ranks, and combine their values, which `combine` gets in order of ranks.

        All ranks get the same object.
        """
        with self._changed:
            self._check(rank, what)
            self._given[rank] = what, value
            if len(self._given) == self.world:
                self._finish(combine)
                return self._result
            wanted = self._rounds + 1
            self._leave_turn(rank)
            there = self._changed.wait_for(lambda: self._rounds == wanted or bool(self._ended or self._broken), WAIT)
            if self._rounds != wanted:
                if there:
                    self._check(rank, what)
                raise RankEnded(f"rank {rank} waited {WAIT:.0f} s in {what}; the others never came.")
            self._take_turn(rank)
            return self._result

    def broadcast(self, message: Any) -> None:
        """Send a message from rank 0 to all others."""
        with self._changed:
            for told in self._told[1:]:
                told.append(message)
            self._changed.notify_all()

    def receive(self, rank: int) -> Any:
        """Wait for the next message to the rank."""
        told = self._told[rank]
        with self._changed:
            if not told:
                self._leave_turn(rank)
                self._changed.wait_for(lambda: told or self._ended or self._broken)
                if not told:
                    self._check(rank, "hear")
            self._take_turn(rank)
            return told.popleft()

    def fail(self, reason: str) -> None:
        """End all waits with an error that has this reason."""
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()

    def check(self, rank: int) -> None:
        """Raise `RankEnded` if a rank has failed."""
        if self._broken is not None:
            raise RankEnded(f"rank {rank} goes on, but {self._broken}")

    def _finish(self, combine: Callable[[list[Any]], Any]) -> None:
        kinds = {rank: what for rank, (what, _) in sorted(self._given.items())}
        values = [self._given[rank][1] for rank in range(self.world)]
        self._given.clear()
        if len(set(kinds.values())) > 1:
            self._broken = "ranks do not call the same: " + "; ".join(f"rank {r} {what}" for r, what in kinds.items())
            self._changed.notify_all()
            raise RankEnded(self._broken)
        self._result = combine(values)
        self._rounds += 1
        self._changed.notify_all()

    def _check(self, rank: int, what: str) -> None:
        """Raise `RankEnded` for a wait that would never end."""
        if self._broken is not None:
            raise RankEnded(f"rank {rank} waits in {what}, but {self._broken}")
        if self._ended:
            raise RankEnded(f"rank {rank} waits in {what}, but rank {min(self._ended)} has ended.")

    def _take_turn(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._running in (None, rank) or self._broken is not None)
        self._running = rank

    def _leave_turn(self, rank: int) -> None:
        if self._running == rank:
            self._running = None
        self._changed.notify_all()


class ThreadGroup:
    """One rank of a group whose ranks are threads (`dgraph.ranks.groups.Group`). Any thread of a rank may call it."""

    recordable, checks = False, True

    def __init__(self, meeting: _Meeting, rank: int):
        self._meeting, self.rank, self.world = meeting, rank, meeting.world

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum in the order of ranks, at least in float32."""
        total: Tensor = self._meeting.meet(self.rank, f"all_reduce of {_like(x)}", x, _sum)
        return total.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack the tensors of all ranks, in order of ranks, as [world, *x.shape]."""
        every: Tensor = self._meeting.meet(self.rank, f"all_gather of {_like(x)}", x, torch.stack)
        return every.clone()

    def exchange(self, value: object) -> list[Any]:
        """The objects that all ranks give, in order of ranks; the ranks share them."""
        return list(self._meeting.meet(self.rank, "exchange", value, list))

    def broadcast(self, message: object) -> None:
        """Send a message to all other ranks."""
        self._meeting.broadcast(message)

    def receive(self) -> Any:
        """Wait for the next message of rank 0."""
        return self._meeting.receive(self.rank)

    def check(self) -> None:
        """Raise `RankEnded` if a rank has failed."""
        self._meeting.check(self.rank)

    def fail(self, reason: str) -> None:
        """End the waits of the other ranks with an error that has this reason."""
        self._meeting.fail(f"rank {self.rank} failed: {reason}")

    def when_lost(self, listener: Callable[[RankLost], None]) -> None:
        """Do nothing: the rank that waits for an ended one finds that out itself."""

    def forget(self, listener: Callable[[RankLost], None]) -> None:
        """Do nothing: the listener is never called."""


def ranks(world: int, function: Callable[[int], T], group: str = GROUP) -> list[T]:
    """Run `function(rank)` on `world` ranks of a group, each in a thread of its own that has joined it.

    They take turns: a rank runs until it waits in a collective or ends. So a rank must wait for another one in nothing
    but a collective. Calls of ranks that do not match are an error on all of them. Calls do not match if they are other
    collectives, have other shapes or dtypes, or if a rank has ended.

    Args:
        world: number of ranks.
        function: called once on each rank, with the rank.
        group: the name of the group, as sharded graphs name it.

    Returns:
        The results of `function`, in order of ranks.

    Raises:
        RankEnded: calls of ranks do not match. Any other error of a rank is raised as it is, with a note of the rank;
            it is the first one, and the other ranks end with it.
    """
    meeting = _Meeting(world)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        error: BaseException | None = None
        try:
            with joined(group, ThreadGroup(meeting, rank)):
                meeting.begin(rank)
                results[rank] = function(rank)
        except BaseException as raised:
            error = raised
            raised.add_note(f"on rank {rank} of {world}")
            # A `RankEnded` that follows from another rank's error says less, so it goes last.
            errors.insert(0 if not isinstance(raised, RankEnded) else len(errors), raised)
        finally:
            meeting.end(rank, error)

    threads = [
        threading.Thread(target=copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True)
        for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world)]


def _sum(values: Sequence[Tensor]) -> Tensor:
    first = values[0]
    exact = torch.promote_types(first.dtype, torch.float32) if first.is_floating_point() else first.dtype
    total = first.to(exact, copy=True)
    for value in values[1:]:
        total += value.to(exact)
    return total.to(first.dtype)


def _like(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
