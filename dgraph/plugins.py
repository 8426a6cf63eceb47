"""Extensions that installed packages add to dgraph, through entry points of their pyproject.toml.

    [project.entry-points."dgraph.recipes"]     # a builder: (spec, option=default, ...) -> Recipe
    mine = "package.recipes:mine"
    [project.entry-points."dgraph.policies"]    # a decoding rule (a class), or settings of one (an object)
    patient = "package.policies:Patient"
    [project.entry-points."dgraph.passes"]      # a pass, by the name of its class: recipes come back from JSON by it
    DropRows = "package.passes:DropRows"
    [project.entry-points."dgraph.parts"]       # a region or a schedule of a row plan, likewise
    Nearby = "package.plans:Nearby"
    [project.entry-points."dgraph.ops"]         # a module; importing it registers ops
    mine = "package.ops"
    [project.entry-points."dgraph.schedulers"]  # a scheduler (a class), by its name
    last = "package.schedulers:Last"
    [project.entry-points."dgraph.models"]      # a family or an embedded model, see dgraph.families
    mine = "package.families:mine"
    [project.entry-points."dgraph.families.causal"]      # a loader of autoregressive models, see dgraph.families.causal
    mine = "package.judges:mine"

A group is read when a name in it is first asked for. An entry point is imported when its name is needed.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from dgraph.errors import PluginError, warn

T = TypeVar("T")

OPS = "dgraph.ops"
"""The group of modules that register ops."""


@functools.cache
def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of a group by name, in alphabetical order, none of them imported.

    Raises:
        PluginError: two distributions declare the same name.
    """
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in sorted(importlib.metadata.entry_points(group=group), key=lambda e: e.name):
        other = found.setdefault(entry.name, entry)
        if (other.value, _owner(other)) != (entry.value, _owner(entry)):
            raise PluginError(
                f"{_owner(other)} and {_owner(entry)} both declare {entry.name!r} in the entry-point group {group!r}; "
                f"uninstall one of them, or rename its entry point."
            )
    return found


@functools.cache
def load(group: str, name: str) -> Any:
    """Import and return the object that an entry point names.

    Raises:
        KeyError: the group has no such name.
        PluginError: it cannot be imported.
    """
    entry = entry_points(group)[name]
    try:
        return entry.load()
    except Exception as error:  # whatever a module of somebody else does while it is imported
        raise refusal(group, name, f"cannot be imported: {type(error).__name__}: {error}") from error


def refusal(group: str, name: str, reason: str) -> PluginError:
    """The error for an entry point that cannot be used."""
    entry = entry_points(group)[name]
    return PluginError(
        f"{name!r} of {_owner(entry)} (entry-point group {group!r}, {entry.value}) {reason}. Repair or uninstall it."
    )


def _owner(entry: importlib.metadata.EntryPoint) -> str:
    return f"distribution {entry.dist.name!r}" if entry.dist is not None else "an unknown distribution"


def load_ops() -> None:
    """Import every module of the group `dgraph.ops`, so that the ops of other packages are registered.

    Raises:
        PluginError: one cannot be imported.
    """
    for name in entry_points(OPS):
        load(OPS, name)


def check_class(kind: type) -> Callable[[str, Any], bool]:
    """A check for `Table`: every entry is a subclass of `kind`, under its own name, which is the one in JSON."""

    def check(name: str, value: Any) -> bool:
        if not (isinstance(value, type) and issubclass(value, kind)):
            raise ValueError(f"is no subclass of {kind.__name__}, got {value!r}")
        if value.__name__ != name:
            raise ValueError(f"is the class {value.__name__}; both names must be the same")
        return True

    return check


class Table(Mapping[str, T], Generic[T]):
    """A table of dgraph's own by name, and what an entry-point group adds to it.

    Args:
        own: dgraph's entries, which come first.
        group: the entry-point group.
        check: called with the name and value of an entry from outside; says whether it belongs into this table, or
            raises `ValueError` with the reason why it belongs into none.

    Raises:
        PluginError: an entry that was asked for cannot be imported or used, or one has the name of one of dgraph's own.

    Iteration over all entries warns of those that cannot be used, and gives the others.
    """

    def __init__(self, own: Mapping[str, T], group: str, check: Callable[[str, Any], bool]):
        self.own, self.group, self._check = dict(own), group, check

    def added(self) -> list[str]:
        """Names of the group that are not dgraph's own; not all of them need belong into this table."""
        names = entry_points(self.group)
        for name in names:
            if name in self.own:
                raise refusal(self.group, name, "has the name of one of dgraph's own")
        return list(names)

    def names(self) -> list[str]:
        """Every name that may belong into this table; nothing is imported for it."""
        return [*self.own, *self.added()]

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        if name not in self.added():
            raise KeyError(name)
        value = load(self.group, name)
        try:
            belongs = self._check(name, value)
        except ValueError as error:
            raise refusal(self.group, name, str(error)) from None
        if not belongs:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        for name in self.added():
            try:
                belongs = name in self
            except PluginError as error:
                warn(str(error))
            else:
                if belongs:
                    yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)
