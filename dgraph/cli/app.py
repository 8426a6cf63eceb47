"""The application: its commands, and what becomes of errors, warnings and Ctrl-C."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dgraph.cli import bench, cache, doctor, eval, generate, tables, views
from dgraph.cli.calibrate import calibrate
from dgraph.cli.compile import compile_
from dgraph.cli.output import complain, one_line_warnings, print_text
from dgraph.errors import DgraphError

# The class behind typer.BadParameter that all errors of a command line derive from; typer gives it no public name.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

BAD_INPUT = 2
INTERRUPTED = 130


class Commands(TyperGroup):
    """The commands in the order of their definition; errors as one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order in which the commands were added."""
        return list(self.commands)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line and exit.

        Exit codes: 0, 1 for a check of `doctor` that failed, 2 for bad input, 130 for Ctrl-C.
        """
        with _errors(), one_line_warnings():
            code = super().main(*args, **{**extra, "standalone_mode": False})
        sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except DgraphError as error:
        complain(str(error))
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
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print_text(importlib.metadata.version("dgraph"))
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


app.command("generate")(generate.generate)
app.command("dump")(views.dump)
app.command("diff")(views.diff)
app.command("explain")(views.explain)
app.command("compile")(compile_)
app.command("calibrate")(calibrate)
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")
app.command("eval")(eval.evaluate)
app.command("recipes")(tables.recipes)
app.command("policies")(tables.policies)
app.command("passes")(tables.passes)
app.command("models")(tables.models)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """The entry point `dgraph`."""
    app(prog_name="dgraph")
