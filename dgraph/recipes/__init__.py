"""Recipes: published systems, each as a list of passes per phase."""

from __future__ import annotations

import inspect
from typing import Any

from dgraph.plugins import Table
from dgraph.recipes.base import Builder, Cost, Phase, Recipe, caching, costing, costs_of, options_of, types_of
from dgraph.recipes.bidirectional import dkv_cache, fast_dllm, vicinity
from dgraph.recipes.build import build, builder_of, check_recipe
from dgraph.recipes.compose import COMBINATIONS, KEEPERS, combined
from dgraph.recipes.dense import dense
from dgraph.recipes.dllm_cache import dllm_cache
from dgraph.recipes.dyllm import dyllm
from dgraph.recipes.focus import focus
from dgraph.recipes.sparse import dllm_serve, maskkv, sparse_dllm

GROUP = "dgraph.recipes"

_OWN: dict[str, Builder] = {
    "dense": dense,
    "focus": focus,
    "fast_dllm": fast_dllm,
    "dkv_cache": dkv_cache,
    "vicinity": vicinity,
    "dyllm": dyllm,
    "dllm_cache": dllm_cache,
    "maskkv": maskkv,
    "dllm_serve": dllm_serve,
    "sparse_dllm": sparse_dllm,
    **COMBINATIONS,
}


def check_builder(name: str, builder: Any) -> bool:
    """Refuse an entry point that builds no recipes.

    Raises:
        ValueError: it takes no spec, or an option without a default.
    """
    try:
        _, *options = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"is no builder: (spec, option=default, ...) -> Recipe, got {builder!r}") from None
    for option in options:
        if option.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ValueError(f"takes {option}; it must name each of its options, with a default")
        if option.default is inspect.Parameter.empty:
            raise ValueError(f"has the option {option.name!r} without a default")
    return True


class Recipes(Table[Builder]):
    """Builders by name: dgraph's own, those of other packages, and "kept+rows" of a part of each.

    A recipe from outside goes with every recipe of dgraph that says which keys are kept, as "maskkv+mine"; whether its
    steps fit is checked where the two are put together.
    """

    def __getitem__(self, name: str) -> Builder:
        kept, _, rows = name.partition("+")
        if name not in self.own and kept in KEEPERS and rows in self.added():
            return combined(kept, rows, self[rows])
        return super().__getitem__(name)


RECIPES = Recipes(_OWN, GROUP, check_builder)
"""Every recipe's builder by name."""

__all__ = [
    "RECIPES",
    "Builder",
    "Cost",
    "Phase",
    "Recipe",
    "build",
    "builder_of",
    "caching",
    "check_recipe",
    "costing",
    "costs_of",
    "options_of",
    "types_of",
]
