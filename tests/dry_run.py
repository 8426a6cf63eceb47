"""Commands that are parsed as they would be run, and not run: modules, options and their values exist."""

from __future__ import annotations

import argparse
import inspect
import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, util
from typing import Any

import pytest
import typer

from dgraph.cli.app import app
from dgraph.cli.options import recipe_options
from dgraph.evaluate import harness
from dgraph.recipes import RECIPES, builder_of


class Wrong(Exception):
    """A command that could not run, and why."""


def check(command: str) -> None:
    """Parse a command of `dgraph`, of a script or of the harness.

    Raises:
        Wrong: it names something that is not there.
    """
    words = shlex.split(command)
    try:
        if words[0] == "dgraph":
            _check_dgraph(words[1:])
        elif words[:2] == ["python", "-m"] and words[2] == harness.__name__:
            _check_harness(words[3:])
        elif words[:2] == ["python", "-m"]:
            _check_script(words[2], words[3:])
        else:
            raise Wrong("begins neither with `dgraph` nor with `python -m`")
    except (Exception, SystemExit) as error:
        raise Wrong(f"{command}: {getattr(error, 'message', None) or error or type(error).__name__}") from error


def _check_dgraph(words: Sequence[str]) -> None:
    """Parse the words of a command line, then its recipes and their options."""
    command: Any = typer.main.get_command(app)
    path = ["dgraph"]
    while words and words[0] in getattr(command, "commands", {}):
        path, command, words = [*path, words[0]], command.commands[words[0]], words[1:]
    given = command.make_context(" ".join(path), [*words]).params
    named = given.get("recipe") or ["focus"]
    recipes = [text.partition(":")[::2] for text in ([named] if isinstance(named, str) else named)]
    for name, options in recipes:
        _check_recipe(name, options.split(",") if options else ())
    for text in given.get("option") or ():
        _check_shared([name for name, _ in recipes], text)
    for text in given.get("sweep") or ():
        key, _, values = text.partition("=")
        if any(key in _options(name) for name, _ in recipes):  # else it is one of a rule
            for value in values.split(","):
                _check_shared([name for name, _ in recipes], f"{key}={value}")


def _check_shared(recipes: Sequence[str], text: str) -> None:
    """Check an option that is set for every recipe that has it."""
    having = [name for name in recipes if text.partition("=")[0] in _options(name)]
    for name in having or recipes:
        _check_recipe(name, [text])


def _options(recipe: str) -> set[str]:
    """Names of the options of a recipe."""
    return {option.name for option in builder_of(RECIPES, recipe).accepted}


def _check_recipe(name: str, options: Sequence[str]) -> None:
    builder_of(RECIPES, name).options(**recipe_options(name, options))


def _check_script(module: str, words: Sequence[str]) -> None:
    """Let the parser of a script read its words, and stop there."""
    parse = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *given: Any, **settings: Any) -> None:
        parse(parser, *given, **settings)
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [module, *words])
        try:
            import_module(module).main()
        except _Parsed:
            return
    raise Wrong("the script reads no command line")


class _Parsed(Exception):
    """The words of a script were read."""


def _check_harness(words: Sequence[str]) -> None:
    """Check the model's arguments; the harness's own where it is installed."""
    given = dict(itertools.pairwise(words))
    assert words[0] == "run"
    assert given["--model"] == harness.NAME
    arguments: Mapping[str, str] = dict(text.split("=", 1) for text in given["--model_args"].split(","))
    own = inspect.signature(harness.adapter_of).parameters
    assert "pretrained" in arguments
    _check_recipe(arguments.get("recipe", "dense"), [f"{k}={v}" for k, v in arguments.items() if k not in own])
    if util.find_spec("lm_eval") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lm-eval", *words])
        import_module("lm_eval._cli.harness").HarnessCLI().parse_args()


def tasks_of(command: str) -> list[str]:
    """Tasks that a command of the harness asks for."""
    words = shlex.split(command)
    return words[words.index("--tasks") + 1].split(",") if "--tasks" in words else []
