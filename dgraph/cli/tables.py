"""`dgraph recipes`, `dgraph policies`, `dgraph passes`, `dgraph models`: tables of the declarations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from dgraph.cli import options as given
from dgraph.cli.listing import Entry, listed
from dgraph.cli.output import print_json, print_table, print_text
from dgraph.errors import UnknownName

WIDTH = 80
"""Width of a line in a pipe, in letters."""


def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe, to explain its options.", show_default=False)] = None,
    json: given.Json = False,
) -> None:
    """List the recipes: papers, options, and the cost of the defaults against dense in exact match and steps.

    \b
    dgraph recipes
    dgraph recipes focus
    """
    columns: dict[str, Callable[[Entry], str]] = {
        "recipe": lambda entry: entry["recipe"],
        "summary": lambda entry: entry["summary"],
        "paper": _papers,
        "against dense": lambda entry: "; ".join(cost["text"] for cost in entry["costs"]),
        "options": _options,
    }
    if name is None:
        _show("recipes", columns, json)
        return
    found = {entry["recipe"]: entry for entry in listed("recipes")}
    if name not in found:
        raise UnknownName("recipe", name, found)
    if json:
        print_json({"recipes": [found[name]]})
    else:
        _explain(found[name])


def _explain(recipe: Entry) -> None:
    """Print all that is known of a recipe."""
    print_text(f"{recipe['recipe']}: {recipe['summary']}")
    for paper in recipe["papers"]:
        print_text(f"Paper: {paper['text']}")
    for cost in recipe["costs"]:
        print_text(f"Against dense: {cost['text']} ({cost['hardware']}, {cost['date']}, {cost['commit']})")
    rows = []
    for option, value in recipe["options"].items():
        default = "" if value is None else f" Default: {_text(value)}."
        rows.append([option, recipe["meaning"][option] + default])
    print_table(["option", "meaning"], rows, WIDTH)


def policies(json: given.Json = False) -> None:
    """List the decoding rules, and the settings of them that systems publish, with their options.

    \b
    dgraph policies
    """
    _show("policies", {**_named("policy", "summary"), "paper": _papers, "options": _options}, json)


def passes(json: given.Json = False) -> None:
    """List the passes, their effect on the numbers and their options.

    \b
    dgraph passes
    """
    _show("passes", {**_named("pass", "effect", "summary"), "paper": _papers, "options": _options}, json)


def models(json: given.Json = False) -> None:
    """List the embedded models and the families of checkpoints and model objects.

    \b
    dgraph models
    """
    _show("models", _named("model", "kind", "summary"), json)


def _show(kind: str, columns: dict[str, Callable[[Entry], str]], json: bool) -> None:
    """Print the entries of a kind. columns: by title, a function that gives the text of an entry's cell."""
    found = listed(kind)
    if json:
        print_json({kind: found})
    else:
        print_table(list(columns), [[cell(entry) for cell in columns.values()] for entry in found], WIDTH)


def _named(*names: str) -> dict[str, Callable[[Entry], str]]:
    def cell(name: str) -> Callable[[Entry], str]:
        return lambda entry: entry[name]

    return {name: cell(name) for name in names}


def _papers(entry: Entry) -> str:
    return "; ".join(paper["text"] for paper in entry["papers"])


def _options(entry: Entry) -> str:
    return ", ".join(f"{name}={_text(value)}" for name, value in entry["options"].items())


def _text(value: Any) -> str:
    """A default value as text of the command line."""
    if isinstance(value, dict):
        return "+".join(f"{name}={each}" for name, each in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
