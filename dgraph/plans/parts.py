"""Regions and schedules as values: equality, JSON, and the names by which they are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from dgraph.errors import InputError, UnknownName


@dataclass(frozen=True)
class Part:
    """Base of regions and schedules: a frozen dataclass, whose fields are its whole configuration.

    Fields are ints, floats, bools, strings, None, or parts. `version` is raised when the same fields come to mean
    something else.
    """

    version: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """The name in JSON: that of the class."""
        return type(self).__name__

    def to_json(self) -> dict[str, Any]:
        """Name, version and fields as plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {name: value.to_json() if isinstance(value, Part) else value for name, value in values.items()}
        return {"name": self.name, "version": self.version, **plain}


def part_from_json(value: Any, kind: str, known: Mapping[str, type[Part]]) -> Part:
    """The part that `Part.to_json` described.

    Args:
        value: its name, version and fields.
        kind: "region" or "schedule", for messages.
        known: parts by name.

    Raises:
        UnknownName: an unknown part, or a field that it does not have.
        InputError: another version, or a value out of range.
    """
    if not isinstance(value, Mapping) or "name" not in value:
        raise InputError(f"a {kind} is an object with a name and fields, as to_json wrote it; got {value!r}.")
    name, version = str(value["name"]), value.get("version")
    if name not in known:
        raise UnknownName(kind, name, known)
    cls = known[name]
    if version != cls.version:
        raise InputError(
            f"{kind} {name!r} is of version {version!r}, expected {cls.version}: its fields may mean something else; "
            f"build the recipe anew."
        )
    names = [f.name for f in fields(cls)]
    options = {k: v for k, v in value.items() if k not in ("name", "version")}
    for option in options:
        if option not in names:
            raise UnknownName(f"field of {kind} {name!r}", option, names)
    read = {k: part_from_json(v, kind, known) if isinstance(v, Mapping) else v for k, v in options.items()}
    return cls(**read)


def check_counts(part: Part) -> None:
    """Refuse fields that are no integers of at least 0, but for parts and those that are True or False by default."""
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Part):
            continue
        if isinstance(field.default, bool):
            if not isinstance(value, bool):
                raise InputError(f"{part.name}: {field.name} must be True or False, got {value!r}.")
        elif type(value) is not int or value < 0:
            raise InputError(f"{part.name}: {field.name} must be an integer of at least 0, got {value!r}.")
