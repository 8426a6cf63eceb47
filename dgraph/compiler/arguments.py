"""Refusal of keywords that a public function does not have, with suggestions: one comparison for all functions."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from dgraph.compiler.compilation import Compilation
from dgraph.engine.build import EngineConfig
from dgraph.errors import UnknownName
from dgraph.errors.foreign import HINTS
from dgraph.recipes import RECIPES, Recipe, RecipeLike, RecipeOptions, check_recipe, options_of
from dgraph.runtime.decoding import Decoding
from dgraph.spec import FACTS


def arguments_of(function: Callable[..., Any], *settings: type) -> frozenset[str]:
    """Names that a function takes: its own parameters, and the fields of settings that it takes by keyword."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    own = {name for name, p in inspect.signature(function).parameters.items() if p.kind not in kinds}
    return frozenset(own.union(f.name for kind in settings for f in fields(kind))) - {"self"}


def check_keywords(kind: str, given: Iterable[str], known: Iterable[str], own: Iterable[str] = ()) -> None:
    """Refuse the first keyword that is not known.

    Args:
        kind: the field's word for the unknown thing, as "setting of Decoding".
        given: the keywords.
        known: the names that the function takes as keyword arguments.
        own: its named parameters, to which a wrong keyword is compared as well.

    Raises:
        UnknownName: the message gives the name's counterpart in dgraph, the function that takes an argument of that
            name, or the closest names.
    """
    known = set(known)
    for name in given:
        if name not in known:
            raise unknown_keyword(kind, name, known, own)


def unknown_keyword(kind: str, name: str, known: Iterable[str], own: Iterable[str] = ()) -> UnknownName:
    """The error for a keyword; see `check_keywords`."""
    known, homes = set(known), _homes()
    here = known.union(own)
    if name in HINTS or name in homes:
        return UnknownName(kind, name, known, HINTS.get(name) or homes[name])
    close = difflib.get_close_matches(name, here.union(homes), n=3, cutoff=0.5)
    hint = ""
    if close and close[0] not in here:
        hint = f"Did you mean {close[0]!r}? {homes[close[0]]}"
    elif close:
        hint = f"Did you mean {' or '.join(repr(other) for other in close if other in here)}?"
    return UnknownName(kind, name, known, hint)


def check_options(recipe: RecipeLike, options: dict[str, Any], own: Iterable[str]) -> None:
    """Refuse a recipe and its options before a model is loaded.

    Args:
        recipe: a name, options of one, or a finished one.
        options: by name.
        own: named parameters of the function that takes them.

    Raises:
        UnknownName: an unknown recipe or option.
        InputError: as `dgraph.recipes.check_recipe`.
    """
    if isinstance(recipe, Recipe | RecipeOptions):
        check_keywords("argument beside a finished recipe", [name for name in options if name in HINTS], own)
    check_recipe(RECIPES, recipe, options)
    if isinstance(recipe, str):
        check_keywords(f"option of recipe {recipe!r}", options, options_of(RECIPES[recipe]), own)


@functools.cache
def _homes() -> Mapping[str, str]:
    """Per argument name, a sentence that names its function; the first one if several take it."""
    found: dict[str, str] = {}
    for names, home in (
        ((f.name for f in fields(Decoding)), "It is a setting of CompiledModel.generate."),
        ((f.name for f in fields(Compilation)), "It is an argument of dgraph.optimize."),
        (("dtype", "device", "tokenizer", "weights", "mesh"), "It is an argument of dgraph.optimize."),
        ((f.name for f in fields(EngineConfig)), "It is a setting of CompiledModel.engine."),
        (("prompts", "input_ids", "canvas", "max_batch", "keep_kv"), "It is an argument of CompiledModel.generate."),
    ):
        found |= {name: home for name in names if name not in found}
    for fact in FACTS:
        example = f"facts={{{fact!r}: ...}} of dgraph.optimize, or {fact}= of dgraph.load"
        found[fact] = f"It is a fact of the model: {example}." + (f" {found[fact]}" if fact in found else "")
    for recipe, builder in RECIPES.own.items():
        for option in options_of(builder):
            found.setdefault(option, f"It is an option of recipe {recipe!r}.")
    return found
