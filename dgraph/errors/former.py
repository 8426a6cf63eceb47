"""Former names of what a module, a class or a frozen dataclass has; each use warns, until version 0.3.

Former names of modules themselves are those of `dgraph.moved`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dgraph.errors import warn

T = TypeVar("T")

_FIELDS: dict[type, Mapping[str, str]] = {}


def tell_former(former: str, now: str) -> None:
    """Warn that a former name was used."""
    warn(f"{former} is {now} since version 0.2; the former name goes with version 0.3.")


def tell_going(thing: str, instead: str) -> None:
    """Warn that something was used that has no present name; `instead` says what to write."""
    warn(f"{thing} goes with version 0.3; {instead}.")


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has some objects under former names, too.

    Args:
        module: name of the module.
        names: the present name of each former one.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        tell_former(f"{module}.{name}", names[name])
        return getattr(sys.modules[module], names[name])

    return find


def former_attribute(owner: str, former: str, now: str) -> property:
    """An attribute of the class `owner` under its former name."""

    def get(self: Any) -> Any:
        tell_former(f"{owner}.{former}", now)
        return getattr(self, now)

    return property(get, doc=f"The former name of `{now}`.")


def former_fields(**names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: a frozen dataclass also takes and has fields by their former names.

    names: the present name of each former one. A field given by both names takes the value of the former one, which is
    how `dataclasses.replace` passes it on.
    """

    def decorate(kind: type[T]) -> type[T]:
        init = kind.__init__

        @functools.wraps(init)
        def takes_former(self: T, *args: Any, **keywords: Any) -> None:
            for former in names.keys() & keywords.keys():
                tell_former(f"{kind.__name__}({former}=...)", f"{names[former]}=")
                keywords[names[former]] = keywords.pop(former)
            init(self, *args, **keywords)

        kind.__init__ = takes_former  # type: ignore[method-assign, assignment]
        for former, now in names.items():
            setattr(kind, former, former_attribute(kind.__name__, former, now))
        _FIELDS[kind] = names
        return kind

    return decorate


def has_former_field(kind: type, name: str) -> bool:
    """True if a dataclass takes a field by this former name."""
    return name in _FIELDS.get(kind, {})
