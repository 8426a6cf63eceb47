"""Names of version 0.1 that go with version 0.3: builder functions, and decorators of such functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgraph.errors.former import tell_going
from dgraph.recipes.base import Recipe
from dgraph.recipes.costs import Cost
from dgraph.recipes.options import Builder, RecipeOptions


def builders(**recipes: type[RecipeOptions]) -> Callable[[str], Builder]:
    """A module's `__getattr__` for builder functions that options of recipes replaced, by their names."""

    def find(name: str) -> Builder:
        if name not in recipes:
            raise AttributeError(f"no attribute {name!r}")
        tell_going(f"the builder function {name}", f"use dgraph.recipes.{recipes[name].__name__}")
        return Builder(recipes[name])

    return find


def caching(builder: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """Return the builder: every recipe has the option `kv_dtype`."""
    tell_going("dgraph.recipes.caching", "leave it out, every recipe has the option kv_dtype")
    return builder


def costing(*costs: Cost) -> Callable[[Callable[..., Recipe]], Callable[..., Recipe]]:
    """Declare the measured costs of a builder's defaults."""
    tell_going("dgraph.recipes.costing", "set RecipeOptions.costs")

    def declare(builder: Any) -> Callable[..., Recipe]:
        builder.costs = costs
        return builder

    return declare
