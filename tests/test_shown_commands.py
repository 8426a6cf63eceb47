"""Commands that pages, docstrings and messages show have the names and options that they are shown with."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from dgraph.cli import app
from dgraph.recipes import RECIPES, options_of

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "dgraph", "docs", "models", "training")
FILES = [ROOT / "README.md", *(file for name in FOLDERS for file in sorted((ROOT / name).rglob("*.*")))]
EARLIER = re.compile(r"`[^`]*` at [0-9a-f]{7}\b")
"""Commands of an earlier commit, which need not run today."""
TEXTS = {
    str(file.relative_to(ROOT)): EARLIER.sub("", file.read_text("utf-8"))
    for file in FILES
    if file.suffix in (".md", ".py")
}

OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
SHOWN = re.compile(r"\bdgraph (?=[a-z])[^`\n]*|-m (?:dgraph|benchmarks|training)[.\w]*[^`\n]*")
NO_COMMAND = re.compile(r"\s#\s|&&|\sand\s|\s{3,}(?!-)")
ELSEWHERE = {"--nproc-per-node", "--no-deps", "--revision", "--tasks"}
"""Options of other programs, beside those with an underscore."""
BORROWED = ("dgraph.evaluate.harness",)
"""Scripts whose options are those of a package that need not be installed."""


def commands_of(text: str) -> Iterator[str]:
    """The commands that a text shows, and sentences that begin like one: each on one line, quoted words left out."""
    text = re.sub(r"\\\\?\n\s*", " ", text.replace("```", "\n"))
    text = re.sub(r"`[^`]*`", lambda code: re.sub(r"\s*\n\s*", " ", code[0]), text)
    for shown in SHOWN.findall(text):
        yield NO_COMMAND.split(re.sub(r"\"[^\"]*\"|'[^']*'", "...", shown))[0].strip()


def found(words: Sequence[str]) -> tuple[Any, int]:
    """The command of dgraph that words begin with, and how many of them name it."""
    command: Any = typer.main.get_command(app)
    for count, word in enumerate(words):
        if word not in getattr(command, "commands", {}):
            return command, count
        command = command.commands[word]
    return command, len(words)


def options_of_command(command: Any) -> set[str]:
    """What a command of dgraph takes; a group, without its commands."""
    return {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}


@cache
def options_of_script(module: str) -> frozenset[str]:
    """What a script takes, by the help of its parser."""
    helps: list[str] = []

    def stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        helps.append(parser.format_help())
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [module])
        patch.syspath_prepend(ROOT / "examples" / "methods")
        with pytest.raises(SystemExit):
            import_module(module).main()
    return frozenset(OPTION.findall(helps[0]))


def wrong(shown: str) -> set[str]:
    """What a command names that does not exist."""
    program, *words = shown.removeprefix("-m ").split()
    options = set(OPTION.findall(shown.removeprefix("-m ")))
    if program in BORROWED:
        return set()
    if program != "dgraph":
        return options - options_of_script(program)
    command, count = found(words)
    if not count:
        return set()
    return (options - options_of_command(command)) | wrong_settings(shown)


def wrong_settings(shown: str) -> set[str]:
    """Options that no recipe of a command has; none where a recipe is of another package."""
    recipes = re.findall(r" (?:-r|--recipe) ([\w+]+)", shown) or ["focus"]
    if not RECIPES.keys() >= set(recipes):
        return set()
    given = {*re.findall(r" -o (\w+)=", shown)}
    for texts in re.findall(r" (?:-r|--recipe) [\w+]+:(\S+)", shown):
        given.update(text.partition("=")[0] for text in texts.split(","))
    return given - {name for recipe in recipes for name in options_of(RECIPES[recipe])}


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if SHOWN.search(text)])
def test_commands_have_the_options_they_are_shown_with(name: str) -> None:
    assert {shown: missing for shown in commands_of(TEXTS[name]) if (missing := wrong(shown))} == {}


def test_commands_in_code_exist() -> None:
    words = {(name, words) for name, text in TEXTS.items() for words in re.findall(r"`dgraph ([a-z ]+)", text)}
    assert [each for each in sorted(words) if not found(each[1].split())[1]] == []


def test_options_that_are_spoken_of_exist() -> None:
    def all_of(command: Any) -> set[str]:
        return options_of_command(command).union(*map(all_of, getattr(command, "commands", {}).values()))

    scripts = {m for text in TEXTS.values() for m in re.findall(r"-m ((?:benchmarks|training)[.\w]+)", text)}
    known = all_of(typer.main.get_command(app)).union(ELSEWHERE, *map(options_of_script, scripts))
    texts = {name: text for name, text in TEXTS.items() if name.endswith(".md") or name.startswith("dgraph/")}
    spoken = {(name, o) for name, text in texts.items() for o in re.findall(r"(?<![\w-])--[a-z][a-z-]*\b(?!_)", text)}
    assert [each for each in sorted(spoken) if each[1] not in known] == []
