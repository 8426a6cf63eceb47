"""Recipes of several parts, as "dllm_serve+dyllm+focus": keys to keep, a gate in the layers, rows to forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn

from dgraph.errors import InputError, UnknownName
from dgraph.plans.regions import Extent
from dgraph.recipes.gated import GateOptions
from dgraph.recipes.kept import KeyOptions, obstacle
from dgraph.recipes.options import Builder, RecipeOptions

RULE = (
    "a combination has at most one part that selects keys, then at most one that gates rows in the layers, then at "
    "most one that says which rows are forwarded"
)


def singles(names: Iterable[str]) -> list[str]:
    """The names of recipes that are no combination."""
    return [name for name in names if "+" not in name]


def role_of(options: type[RecipeOptions]) -> int:
    """Place of a recipe in a combination: 0 if it selects keys, 1 if it gates rows in the layers, else 2."""
    return 0 if issubclass(options, KeyOptions) else 1 if issubclass(options, GateOptions) else 2


def combine(*parts: type[RecipeOptions]) -> type[RecipeOptions]:
    """The recipe "keys+gate+rows", of two or three of these parts. It has the options of each; shared ones go to all.

    An option that a gate shares with the rows has their default.

    Without a part for the rows, they are those of the part that selects keys, where the gate goes together with them.
    Else they are those of the gate.

    Raises:
        InputError: the parts do not go together; the message says why.
    """
    name, roles = "+".join(part.name for part in parts), [role_of(part) for part in parts]
    if len(parts) < 2 or sorted(set(roles)) != roles:
        ordered = sorted(parts, key=role_of)
        again = [part.name for part in ordered if roles.count(role_of(part)) > 1]
        if again:
            raise InputError(f"recipe {name!r}: {RULE}. Leave out all but one of {', '.join(map(repr, again[:2]))}.")
        if len(parts) > 1:
            raise InputError(f"recipe {name!r}: {RULE}; write {'+'.join(part.name for part in ordered)!r}.")
        raise InputError(f"recipe {name!r}: {RULE}.")
    last = parts[-1] if roles[-1] == 2 else None
    halves = [_own(part) for part in parts if part is not last]
    choices = [last] if last is not None else [rows for _, rows in halves if rows is not None]
    reasons = [_obstacle([part for part, _ in halves], each) for each in choices]
    if "" not in reasons:
        raise InputError(f"recipe {name!r}: {reasons[0] if reasons else RULE}.")
    rows = choices[reasons.index("")]
    if any(own is not None and own.papers and own.papers == rows.papers for _, own in halves) and last is not None:
        raise InputError(f"recipe {name!r}: {rows.name!r} is the half with the rows of {parts[0].name!r} already.")
    # The gate is applied last, to the rows with their selection of keys.
    bases: list[Any] = [part for part, _ in sorted(halves, key=lambda half: -role_of(half[0]))]
    gate = {own.name for half, _ in halves if issubclass(half, GateOptions) for own in fields(half)}
    theirs = {f.name: f for f in fields(rows) if f.name in gate and f.default is not MISSING}
    body = {
        **{option: f.default for option, f in theirs.items()},
        "__annotations__": {option: f.type for option, f in theirs.items()},
        "__doc__": _summary(parts, rows),
        "name": name,
        "papers": tuple(dict.fromkeys(paper for part in (*[h for h, _ in halves], rows) for paper in part.papers)),
    }
    return dataclass(frozen=True, kw_only=True)(type(name, (*bases, rows), body))


def _own(part: type[RecipeOptions]) -> tuple[type[RecipeOptions], type[RecipeOptions] | None]:
    """The half of a recipe that selects keys or gates, and the half with its own rows; None if it has none."""
    bases: tuple[Any, ...] = part.__bases__
    return (bases[0], bases[1]) if len(bases) > 1 else (part, None)  # a half from outside may come without rows


def _obstacle(halves: list[type[RecipeOptions]], rows: type[RecipeOptions]) -> str:
    """Reason why parts do not go with the rows of a recipe; "" if they do."""
    for part in halves:
        reason, instead = "", "whose steps forward the block"
        if issubclass(part, KeyOptions):
            reason = obstacle(part.window, rows.extent, rows.carries)
        elif rows.reuses:
            reason = f"reuses {rows.reuses} already, so no gate goes with it"
            instead = "that runs every layer on all of its rows"
        if reason:
            return f"{rows.name!r} {reason}. Combine {part.name!r} with a recipe {instead}, as 'focus'"
    return ""


def _summary(parts: tuple[type[RecipeOptions], ...], rows: type[RecipeOptions]) -> str:
    """First sentence of the docstring of a combination."""
    names = {role_of(part): part.name for part in parts}
    said = [f"keys as `{names[0]}` keeps them"] if 0 in names else []
    said += [f"layers gated as in `{names[1]}`"] if 1 in names else []
    said += [f"rows as `{names[2]}` forwards them"] if 2 in names else []
    text = ", ".join(said)
    return text[0].upper() + text[1:] + "."


def listed(recipes: Mapping[str, Builder]) -> list[tuple[str, ...]]:
    """Names of the parts of combinations to list, if they go together.

    A gate of a recipe that forwards rows anywhere in the canvas is built by its name, and not listed.
    """
    single = {name: recipes[name].options for name in singles(recipes)}
    keys, gates, rows = ([name for name, each in single.items() if role_of(each) == role] for role in range(3))
    kept = [*((first, second) for first in keys for second in rows), *((first,) for first in keys)]
    gated = [*kept, *((name,) for name in rows if single[name].extent is not Extent.CANVAS)]
    with_gate = [(*parts[:at], gate, *parts[at:]) for gate in gates for parts in gated for at in [parts[0] in keys]]
    return [*(parts for parts in kept if len(parts) > 1), *with_gate]


def refuse(recipes: Mapping[str, Builder], name: str) -> NoReturn:
    """Refuse a name with "+" that is no recipe.

    Raises:
        UnknownName: an unknown part.
        InputError: parts that do not go together; the message says why.
    """
    parts = [part.strip() for part in name.split("+")]
    single = singles(recipes)
    for part in parts:
        if part not in single:
            raise UnknownName("part of a recipe", part, single)
    combine(*(recipes[part].options for part in parts))
    raise InputError(f"recipe {name!r}: {RULE}.")
