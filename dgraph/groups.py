"""Ranks that hold a model together, by the name of their group.

A sharded graph names its group ("tp") and not its members: the same program runs on every rank, and in every place
where that group is joined. Who joins it says by what means (`dgraph.parallel`); one process may be several ranks, each
in a thread of its own (`dgraph.testing.ranks`), so what a name means belongs to the context of a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from dgraph.errors import InputError


class Group(Protocol):
    """What collectives need of a group.

    Every rank calls the same ones in the same order, with tensors of the same shape and dtype; all get the same bits.
    """

    @property
    def rank(self) -> int:
        """Which of the ranks this one is, from 0."""
        ...

    @property
    def world(self) -> int:
        """How many there are."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, a new tensor; summed in one order, so that all have the same bits."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[world, *x.shape]: what each rank gave, by rank; a new tensor."""
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


class Alone:
    """A group of one rank."""

    rank, world = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """A copy."""
        return x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        """[1, *x.shape]"""
        return x.clone()[None]
