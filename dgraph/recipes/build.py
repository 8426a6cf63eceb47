"""From a recipe's name and options to the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgraph.errors import InputError, UnknownName
from dgraph.recipes.base import Builder, Recipe, options_of
from dgraph.recipes.compose import refuse
from dgraph.spec import ModelSpec


def builder_of(recipes: Mapping[str, Builder], name: str) -> Builder:
    """The builder of that name.

    Raises:
        UnknownName: an unknown recipe, or part of one.
        InputError: a combination of parts that do not go together; the message says why.
    """
    if name not in recipes:
        if "+" in name:
            refuse(name, recipes)
        raise UnknownName("recipe", name, recipes)
    return recipes[name]


def check_recipe(recipes: Mapping[str, Builder], recipe: str | Recipe, options: dict[str, Any]) -> None:
    """Refuse, before a model is loaded, what `build` would refuse of a name or of a finished recipe.

    Raises:
        UnknownName: an unknown recipe.
        InputError: neither a name nor a recipe, options beside a finished recipe, or parts that do not go together.
    """
    if isinstance(recipe, str):
        builder_of(recipes, recipe)
    elif not isinstance(recipe, Recipe):
        raise InputError(f"recipe must be a name or a dgraph.Recipe, got {recipe!r}; `dgraph recipes` lists the names.")
    elif options:
        raise InputError(
            f"options {', '.join(options)} were given beside a finished recipe; build it with them instead."
        )


def build(recipes: Mapping[str, Builder], recipe: str | Recipe, spec: ModelSpec, options: dict[str, Any]) -> Recipe:
    """Build a recipe by name; a finished one is returned as it is.

    Raises:
        UnknownName: an unknown recipe, or an option that it does not have; with the closest matches.
        InputError: an option's value is out of range, options beside a finished recipe, or one that does not fit the
            model; the builder of that name returns no recipe.
    """
    check_recipe(recipes, recipe, options)
    if not isinstance(recipe, str):
        return recipe
    known = options_of(recipes[recipe])
    for option in options:
        if option not in known:
            raise UnknownName(f"option of recipe {recipe!r}", option, known)
    made: object = recipes[recipe](spec, **options)
    if not isinstance(made, Recipe):
        raise InputError(f"the builder of recipe {recipe!r} must return a dgraph.Recipe, got {made!r}.")
    spec.check_keys(made.recommit, made.kv)
    return made
