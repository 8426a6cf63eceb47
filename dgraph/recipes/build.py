"""From a recipe's name and options to the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from dgraph.errors import InputError, UnknownName
from dgraph.recipes.base import Recipe
from dgraph.recipes.compose import refuse, singles
from dgraph.recipes.options import Builder, RecipeOptions, options_of
from dgraph.spec import ModelSpec

RecipeLike: TypeAlias = str | Recipe | RecipeOptions
"""A recipe: by name, as options (`Focus(alpha=1.8)`), or finished for a model."""


def builder_of(recipes: Mapping[str, Builder], name: str) -> Builder:
    """The builder of that name.

    Raises:
        UnknownName: an unknown recipe, or part of one.
        InputError: a combination of parts that do not go together; the message says why.
    """
    if name not in recipes:
        if "+" in name:
            refuse(recipes, name)
        raise UnknownName("recipe", name, singles(recipes))
    return recipes[name]


def check_recipe(recipes: Mapping[str, Builder], recipe: RecipeLike, options: Mapping[str, Any]) -> None:
    """Refuse, before a model is loaded, what `build` would refuse without a model.

    Raises:
        UnknownName: an unknown recipe.
        InputError: no recipe at all, options beside a finished one, or parts that do not go together.
    """
    if isinstance(recipe, str):
        builder_of(recipes, recipe)
    elif not isinstance(recipe, Recipe | RecipeOptions):
        raise InputError(
            f"recipe must be a name, a dgraph.Recipe or options of one (dgraph.recipes.RecipeOptions), got {recipe!r}; "
            f"`dgraph recipes` lists the names."
        )
    elif options:
        raise InputError(
            f"options {', '.join(options)} were given beside a finished recipe; build it with them instead."
        )


def build(recipes: Mapping[str, Builder], recipe: RecipeLike, spec: ModelSpec, options: Mapping[str, Any]) -> Recipe:
    """Build a recipe by name or from its options; a finished one is returned as it is.

    Raises:
        UnknownName: an unknown recipe, or an option that it does not have; with the closest matches.
        InputError: an option's value is out of range, options beside a finished recipe, or one that does not fit the
            model; the builder of that name returns no recipe.
    """
    check_recipe(recipes, recipe, options)
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        known = options_of(recipes[recipe])
        for option in options:
            if option not in known:
                raise UnknownName(f"option of recipe {recipe!r}", option, known)
        recipe = Builder.of(recipe, recipes[recipe]).options(**options)
    made = recipe.recipe(spec)
    spec.check_keys(made.recommit, made.kv)
    return made
