"""Values that several ops derive from the same arguments, computed once while a stage runs.

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

    Tensors are the same if they are one object that nothing was written to in between. The result is shared, so no
    caller may write to it.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        found = _FOUND.get()
        if found is None:
            return function(*args, **kwargs)
        key = (function, *map(_identity, args), *((name, _identity(value)) for name, value in kwargs.items()))
        if key not in found:
            # The arguments stay alive, so that no other object gets their id.
            found[key] = ((args, kwargs), function(*args, **kwargs))
        result: R = found[key][1]
        return result

    return call


@contextmanager
def one_stage() -> Iterator[None]:
    """Keep the results of `per_stage` functions while it is entered, and drop them at its end."""
    token = _FOUND.set({})
    try:
        yield
    finally:
        _FOUND.reset(token)


def _identity(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return value
    # An inference tensor has no version that would show that it was written to.
    return (id(value), object() if value.is_inference() else value._version)
