"""Recipes of two halves, as "maskkv+focus": the first selects the keys to keep, the second the rows to forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dgraph.errors import InputError, UnknownName
from dgraph.recipes.kept import KeyOptions, obstacle
from dgraph.recipes.options import Builder, RecipeOptions


def combine(keys: type[RecipeOptions], rows: type[RecipeOptions]) -> type[RecipeOptions]:
    """The recipe "keys+rows". It has the options of both halves; one that both have goes to both.

    Args:
        keys: a recipe that selects keys; its own rows are left out.
        rows: the recipe whose steps forward the rows.

    Raises:
        InputError: they do not go together; the message says why.
    """
    name = f"{keys.name}+{rows.name}"
    if issubclass(rows, KeyOptions) and not issubclass(keys, KeyOptions):
        swapped = f"{rows.name}+{keys.name}"
        raise InputError(f"recipe {name!r}: the half that selects keys comes first; write {swapped!r}.")
    if not issubclass(keys, KeyOptions) or issubclass(rows, KeyOptions):
        raise InputError(f"recipe {name!r}: {RULE}.")
    bases: tuple[Any, ...] = keys.__bases__
    selecting, *own = bases if len(bases) > 1 else (keys,)  # a half from outside may come without rows of its own
    reason = obstacle(keys.window, rows.extent, rows.carries)
    if any(base.papers and base.papers == rows.papers for base in own):
        reason = f"is the half with the rows of {keys.name!r} already"
    if reason:
        raise InputError(f"recipe {name!r}: {rows.name!r} {reason}.")
    body = {
        "__doc__": f"Keys as `{keys.name}` keeps them, rows as `{rows.name}` forwards them.",
        "name": name,
        "papers": (*selecting.papers, *rows.papers),
    }
    return dataclass(frozen=True, kw_only=True)(type(name, (selecting, rows), body))


RULE = "a combination has one half that selects keys, then one that says which rows are forwarded"


def halves(recipes: Mapping[str, Builder]) -> tuple[list[str], list[str]]:
    """Names of the recipes that select keys, and of the others, without combinations."""
    single = {name: recipes[name].options for name in recipes if "+" not in name}
    keys = [name for name, options in single.items() if issubclass(options, KeyOptions)]
    return keys, [name for name in single if name not in keys]


def refuse(recipes: Mapping[str, Builder], name: str) -> NoReturn:
    """Refuse a name with "+" that is no recipe.

    Raises:
        UnknownName: an unknown half.
        InputError: halves that do not go together; the message says why.
    """
    parts = [part.strip() for part in name.split("+")]
    keys, rows = halves(recipes)
    for part in parts:
        if part not in keys and part not in rows:
            raise UnknownName("part of a recipe", part, [*keys, *rows])
    if len(parts) == 2:
        combine(*(recipes[part].options for part in parts))
    raise InputError(f"recipe {name!r}: {RULE}.")
