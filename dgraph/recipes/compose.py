"""Recipes of two parts, as "maskkv+focus": the first chooses the keys to keep, the second the rows to forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from dgraph.errors import InputError, UnknownName
from dgraph.recipes.base import Builder, Recipe
from dgraph.recipes.bidirectional import fast_dllm
from dgraph.recipes.focus import focus
from dgraph.recipes.kept import Kept
from dgraph.recipes.sparse import kept_by_dllm_serve, kept_by_maskkv, kept_by_sparse_dllm
from dgraph.spec import ModelSpec

KEEPERS: dict[str, Callable[..., Kept]] = {
    "maskkv": kept_by_maskkv,
    "dllm_serve": kept_by_dllm_serve,
    "sparse_dllm": kept_by_sparse_dllm,
}
"""Recipes that choose the keys to keep."""

ROWS: dict[str, Builder] = {"focus": focus, "fast_dllm": fast_dllm}
"""Recipes that combine with them, because their steps forward rows of the block and the whole canvas now and then."""

REFUSED = {
    "dense": "forwards every row in every step, so no step could do with the keys that are kept",
    "dyllm": "updates contexts by what changes of all keys (partial attention), so none may be dropped",
    "dkv_cache": "reads the keys of decoded rows wherever they are, so none may be dropped",
    "vicinity": "forwards rows before the block, whose keys would have no place in the cache",
    "dllm_cache": "is the row part of 'maskkv' already",
}
"""Recipes that do not combine with them, and the reasons."""


def combined(kept: str, rows: str, builder: Builder) -> Builder:
    """The builder of "kept+rows"; it has the options of both parts, and one that both have goes to both."""
    parts: tuple[Callable[..., Any], Callable[..., Any]] = (KEEPERS[kept], builder)
    options = {p.name: p for part in parts for p in list(inspect.signature(part).parameters.values())[1:]}

    def build(spec: ModelSpec, **given: Any) -> Recipe:
        mine, other = ({k: v for k, v in given.items() if k in inspect.signature(p).parameters} for p in parts)
        return parts[0](spec, **mine).on(parts[1](spec, **other), f"{kept}+{rows}")

    build.__doc__ = f"Keys as `{kept}` keeps them, rows as `{rows}` forwards them."
    spec = inspect.Parameter("spec", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    build.__signature__ = inspect.Signature([spec, *options.values()])  # type: ignore[attr-defined]
    return build


COMBINATIONS: dict[str, Builder] = {
    f"{kept}+{rows}": combined(kept, rows, ROWS[rows]) for kept in KEEPERS for rows in ROWS
}
"""Recipes of two parts by name."""


def refuse(name: str, recipes: Iterable[str]) -> NoReturn:
    """Say why a name with "+" is no recipe.

    recipes: names of all recipes.

    Raises:
        UnknownName: a part that nothing is known of.
        InputError: parts that do not go together.
    """
    parts = [part.strip() for part in name.split("+")]
    rows = [*ROWS, *(r for r in recipes if not {r, *r.split("+")} & {*ROWS, *KEEPERS, *REFUSED})]
    for part in parts:
        if part not in KEEPERS and part not in rows and part not in REFUSED:
            raise UnknownName("part of a recipe", part, [*KEEPERS, *rows])
    swapped = "+".join(reversed(parts))
    if len(parts) == 2 and parts[0] in rows and parts[1] in KEEPERS:
        raise InputError(f"recipe {name!r}: the part that says which keys are kept comes first; write {swapped!r}.")
    for part in parts:
        if part in REFUSED:
            raise InputError(f"recipe {name!r}: {part!r} {REFUSED[part]}.")
    raise InputError(
        f"recipe {name!r}: a combination has one part that says which keys are kept ({', '.join(KEEPERS)}), then one "
        f"that says which rows are forwarded ({', '.join(rows)})."
    )
