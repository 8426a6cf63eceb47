"""The application: its commands, and the handling of errors, warnings and Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import dgraph
from dgraph.cli.output import complain, one_line_warnings, print_text
from dgraph.cli.ranks import is_mine
from dgraph.errors import DgraphError, InputError, RankLost

# The base of typer.BadParameter from which all errors of a command line derive; typer gives it no public name.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

LOST = 1
BAD_INPUT = 2
INTERRUPTED = 130


COMMANDS = {
    "generate": "generate:generate",
    "chat": "chat:chat",
    "serve": "serve:serve",
    "dump": "views:dump",
    "diff": "views:diff",
    "explain": "views:explain",
    "match": "match:match",
    "compare": "parting:compare",
    "bisect": "parting:bisect",
    "bundle": "bundle:bundle",
    "replay": "bundle:replay",
    "compile": "compile:compile_",
    "export": "export:export",
    "calibrate": "calibrate:calibrate",
    "quantize": "quantize:quantize",
    "profile": "profile:profile",
    "recommend": "recommend:recommend",
    "cache": "cache:app",
    "bench": "bench:app",
    "simulate": "simulate:simulate",
    "eval": "eval:evaluate",
    "recipes": "tables:recipes",
    "policies": "tables:policies",
    "passes": "tables:passes",
    "models": "tables:models",
    "doctor": "doctor:doctor",
}
"""Commands by name: the module below dgraph.cli, and its function, or its application with commands of its own."""


class Imported(Mapping[str, Any]):
    """The commands by name, in the order of `COMMANDS`; a command is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = COMMANDS[name].partition(":")
        found = getattr(import_module(f"dgraph.cli.{module}"), attribute)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command(name)(function)
        command = typer.main.get_command(found)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Commands(TyperGroup):
    """The group of commands, which prints errors as one line."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands: Any = Imported()

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands in their order; no command is imported."""
        return list(self.commands)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line and exit.

        Exit codes: 0; 2 for bad input, 130 for Ctrl-C. 1 is for a check of `doctor` or `bisect` that failed, another
        result of `replay`, or a rank that died.
        """
        with _errors(), one_line_warnings():
            if sys.stdout is None:
                raise InputError("standard output is closed; open it, or lead it to /dev/null.")
            code = super().main(*args, **{**extra, "standalone_mode": False})
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except RankLost as error:
        complain(str(error))
        sys.exit(LOST)
    except DgraphError as error:
        if is_mine(error):
            complain("\n".join([str(error), *getattr(error, "__notes__", ())]))
        sys.exit(BAD_INPUT)
    except UsageError as error:
        if not error.format_message():  # no command at all: the help has been printed
            sys.exit(0)
        where = error.ctx.command_path if getattr(error, "ctx", None) is not None else "dgraph"
        message = error.format_message()
        complain(f"{message}{'' if message.endswith(('.', '?')) else '.'} See '{where} --help'.")
        sys.exit(BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)


app = typer.Typer(
    name="dgraph",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print_text(dgraph.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """A compiler for diffusion language models: capture, rewrite, lower, decode.

    \b
    dgraph generate tiny_sdar -p "Sort these words: river stone cloud maple"
    """


def main() -> None:
    """The entry point `dgraph`."""
    app(prog_name="dgraph")
