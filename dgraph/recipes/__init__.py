"""Recipes: published systems, each as a list of passes per phase."""

from __future__ import annotations

from typing import Any

from dgraph.errors import InputError
from dgraph.plugins import Table
from dgraph.recipes.base import Phase, Recipe
from dgraph.recipes.bidirectional import DKVCache, FastDLLM, Vicinity
from dgraph.recipes.build import RecipeLike, build, builder_of, check_recipe
from dgraph.recipes.compose import combine, listed
from dgraph.recipes.costs import Cost
from dgraph.recipes.dense import Dense
from dgraph.recipes.dllm_cache import DLLMCache
from dgraph.recipes.dyllm import DyLLM, DyLLMGate
from dgraph.recipes.focus import Ablation, Focus
from dgraph.recipes.former import caching, costing
from dgraph.recipes.gated import GateOptions
from dgraph.recipes.kept import KeyOptions
from dgraph.recipes.options import Builder, RecipeOptions, costs_of, options_of, types_of
from dgraph.recipes.sparse import DLLMServe, DLLMServeKeys, MaskKV, MaskKVKeys, SparseDLLM, SparseDLLMKeys

GROUP = "dgraph.recipes"

_SINGLE: tuple[type[RecipeOptions], ...] = (
    Dense,
    Focus,
    FastDLLM,
    DKVCache,
    Vicinity,
    DyLLM,
    DLLMCache,
    MaskKV,
    DLLMServe,
    SparseDLLM,
)


def _with_combinations(single: dict[str, Builder]) -> dict[str, Builder]:
    """Recipes and their combinations, by name."""
    made = dict(single)
    for parts in listed(single):
        try:
            made["+".join(parts)] = Builder(combine(*(single[part].options for part in parts)))
        except InputError:
            continue
    return made


def check_builder(name: str, builder: Any) -> bool:
    """Refuse an entry point that builds no recipes.

    Raises:
        ValueError: neither options of a recipe nor a function, or an option without a default.
    """
    Builder.of(name, builder)
    return True


class Recipes(Table[Builder]):
    """Builders by name: dgraph's own, those of other packages, and "keys+gate+rows" of parts of each.

    A recipe from outside that declares nothing goes with every recipe that selects keys or gates rows. Its steps are
    checked where they are put together.
    """

    def __getitem__(self, name: str) -> Builder:
        if "+" not in name or name in self.own:
            given: Any = super().__getitem__(name)
            return Builder.of(name, given)
        try:
            return Builder(combine(*(self[part].options for part in name.split("+"))))
        except InputError:
            raise KeyError(name) from None


RECIPES = Recipes(_with_combinations({each.name: Builder(each) for each in _SINGLE}), GROUP, check_builder)
"""Every recipe's builder by name."""

__all__ = [
    "RECIPES",
    "Ablation",
    "Builder",
    "Cost",
    "DKVCache",
    "DLLMCache",
    "DLLMServe",
    "DLLMServeKeys",
    "Dense",
    "DyLLM",
    "DyLLMGate",
    "FastDLLM",
    "Focus",
    "GateOptions",
    "KeyOptions",
    "MaskKV",
    "MaskKVKeys",
    "Phase",
    "Recipe",
    "RecipeLike",
    "RecipeOptions",
    "SparseDLLM",
    "SparseDLLMKeys",
    "Vicinity",
    "build",
    "builder_of",
    "caching",
    "check_recipe",
    "costing",
    "costs_of",
    "options_of",
    "types_of",
]
