"""A recipe and its options on the command line of a script, spelt and read as those of `dgraph`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, get_args

from dgraph.cli.options import Options, recipe_options


@dataclass(frozen=True)
class Chosen:
    """A recipe by name, and its options as `dgraph.optimize` takes them."""

    name: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return ", ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


def add_recipe(parser: argparse.ArgumentParser, default: str) -> None:
    """What `chosen` asks for."""
    parser.add_argument("--recipe", "-r", default=default, help="see `dgraph recipes`")
    _, declared = get_args(Options)
    names = declared.default, *declared.param_decls  # typer has the first one where a default would be
    parser.add_argument(*names, action="append", metavar=declared.metavar, help=declared.help)


def chosen(args: argparse.Namespace) -> Chosen:
    """The recipe of a command line.

    Raises:
        UnknownName, InputError: as `recipe_options`.
    """
    return Chosen(args.recipe, recipe_options(args.recipe, args.option))
