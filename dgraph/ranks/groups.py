"""Ranks that hold a model together, by the name of their group.

A sharded graph names its group ("tp") and not its members. So the same program runs on every rank, and in every process
that joins that group. The caller of `join` chooses the means of communication (`dgraph.parallel`). One process may be
several ranks, each in a thread of its own (`dgraph.testing.ranks`). So a group's name is resolved in the context of a
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor

from dgraph.errors import InputError, RankLost
from dgraph.ranks.sharding import Sharding


class Group(Protocol):
    """Communication among the ranks of a group: two collectives for device tensors, and messages between hosts.

    Every rank calls the same collectives in the same order, with tensors of the same shape and dtype; all get the same
    bits. Messages are values that pickle takes, few and small. Every call that waits raises `RankLost` when a rank has
    ended.
    """

    @property
    def rank(self) -> int:
        """Index of this rank, from 0."""
        ...

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, a new tensor; summed in one order, so that all have the same bits."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[world, *x.shape]: what each rank gave, by rank; a new tensor."""
        ...

    @property
    def recordable(self) -> bool:
        """True if its collectives can be part of a CUDA graph."""
        ...

    @property
    def checks(self) -> bool:
        """True if ranks compare their calls as they go, which is slow, to find the first difference."""
        ...

    def broadcast(self, message: object) -> None:
        """Send a message of rank 0 to all others, without waiting for them."""
        ...

    def receive(self) -> Any:
        """Wait for the next message of rank 0 and return it; called by the other ranks."""
        ...

    def exchange(self, value: object) -> list[Any]:
        """Wait until every rank has given a value, and return all values in order of rank."""
        ...

    def check(self) -> None:
        """Raise `RankLost` if a rank has ended."""
        ...

    def fail(self, reason: str) -> None:
        """Tell the others that this rank goes no further: what they wait for raises `RankLost` with the reason."""
        ...

    def when_lost(self, listener: Callable[[RankLost], None]) -> None:
        """Call it, in a thread of its own, when another rank has ended or failed."""
        ...

    def forget(self, listener: Callable[[RankLost], None]) -> None:
        """Call it no more."""
        ...


_JOINED: dict[str, Group] = {}
_OF_CONTEXT: ContextVar[dict[str, Group] | None] = ContextVar("groups", default=None)


def join(name: str, group: Group) -> None:
    """Let a name mean a group, for the whole process."""
    _JOINED[name] = group


def leave(name: str) -> None:
    """Forget what a name meant."""
    _JOINED.pop(name, None)


@contextmanager
def joined(name: str, group: Group) -> Iterator[None]:
    """Let a name mean a group in this context alone."""
    token = _OF_CONTEXT.set({**(_OF_CONTEXT.get() or {}), name: group})
    try:
        yield
    finally:
        _OF_CONTEXT.reset(token)


def group_of(name: str) -> Group:
    """The group of that name.

    Raises:
        InputError: this process has not joined it.
    """
    here = _OF_CONTEXT.get()
    if here is not None and name in here:
        return here[name]
    if name not in _JOINED:
        raise InputError(
            f"this process is in no group {name!r}, over which the model is sharded. Join it on every rank with "
            f"dgraph.parallel.init() first (torchrun sets what that needs)."
        )
    return _JOINED[name]


def ranks_of(sharding: Sharding | None) -> Group:
    """Return the group that holds a graph of a sharding; for None, a group of this process alone.

    Raises:
        InputError: this process has not joined the group, or it has another number of ranks.
    """
    if sharding is None:
        return Alone()
    group = group_of(sharding.group)
    if group.world != sharding.world:
        raise InputError(
            f"the model is divided over {sharding.world} ranks, and group {sharding.group!r} has {group.world}; divide "
            f"it over the mesh whose group this is."
        )
    return group


class Alone:
    """A group of one rank, without others to talk to."""

    rank, world = 0, 1
    recordable, checks = True, False

    def all_reduce(self, x: Tensor) -> Tensor:
        """A copy."""
        return x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        """[1, *x.shape]"""
        return x.clone()[None]

    def broadcast(self, message: object) -> None:
        """Send nothing: there is no other rank."""

    def receive(self) -> Any:
        """Raise `InputError`: rank 0 decides and receives no message."""
        raise InputError("rank 0 broadcasts to the other ranks and receives no message.")

    def exchange(self, value: object) -> list[Any]:
        """[value]"""
        return [value]

    def check(self) -> None:
        """Raise nothing: no rank can be lost."""

    def fail(self, reason: str) -> None:
        """Do nothing: no other rank waits."""

    def when_lost(self, listener: Callable[[RankLost], None]) -> None:
        """Do nothing: there is no other rank to lose."""

    def forget(self, listener: Callable[[RankLost], None]) -> None:
        """Do nothing: no listener was stored."""
