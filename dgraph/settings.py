"""Settings as values: a frozen dataclass whose fields a function also takes as keywords."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from dgraph.errors import InputError, UnknownName

T = TypeVar("T")


def settings_of(kind: type[T], given: T | None, keywords: Mapping[str, Any]) -> T:
    """The value that a caller means: the one given, or one of the keywords.

    Raises:
        UnknownName: a keyword that is no field; the message has the closest matches.
        InputError: keywords beside a value, or something else in its place.
    """
    if given is None:
        known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        for name in keywords:
            if name not in known:
                raise UnknownName(f"setting of {kind.__name__}", name, known)
        return kind(**keywords)
    if not isinstance(given, kind):
        raise InputError(f"expected a {kind.__name__}, got {given!r}; give settings by keyword, or as that value.")
    if keywords:
        raise InputError(
            f"{', '.join(keywords)} cannot be set beside a {kind.__name__}; set it there, with dataclasses.replace."
        )
    return given
