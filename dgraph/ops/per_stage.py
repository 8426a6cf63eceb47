"""What several calls of ops read from the same arguments, computed once while a stage runs.

Every layer of a step is given the same page table, offsets and limits. A reference reads lists, places and masks from
them, which on a CPU takes as long as a small product.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_FOUND: ContextVar[dict[Hashable, tuple[Any, Any]] | None] = ContextVar("found in a stage", default=None)


def per_stage(function: Callable[P, R]) -> Callable[P, R]:
    """Compute a function once in a stage for the same arguments; outside of a stage, at every call.

    Tensors are the same if they are one object that nothing was written to in between. What the function returns is
    shared, so nobody may write to it.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        found = _FOUND.get()
        if found is None:
            return function(*args, **kwargs)
        key = (function, *map(_identity, args), *((name, _identity(value)) for name, value in kwargs.items()))
        if key not in found:
            # The arguments stay alive, so that nothing else comes to have their identity.
            found[key] = ((args, kwargs), function(*args, **kwargs))
        result: R = found[key][1]
        return result

    return call


@contextmanager
def one_stage() -> Iterator[None]:
    """While it is entered, functions that are `per_stage` keep their results; they are dropped at its end."""
    token = _FOUND.set({})
    try:
        yield
    finally:
        _FOUND.reset(token)


def _identity(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return value
    # Nothing tells whether an inference tensor was written to.
    return (id(value), object() if value.is_inference() else value._version)
