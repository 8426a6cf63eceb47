"""Printing: results to stdout, everything else to stderr; coloured on a terminal, plain when piped."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.table import Table
from rich.theme import Theme

from dgraph.errors import DgraphWarning, InputError
from dgraph.text.columns import table as plain_table

_THEME = Theme(
    {
        "dg.value": "cyan",
        "dg.kept": "bold yellow",
        "dg.cut": "bold magenta",
        "dg.heading": "bold",
        "dg.removed": "red",
        "dg.added": "green",
        "dg.pass": "dim",
    }
)


class _Listings(RegexHighlighter):
    """Colours of dumps, diffs and explanations."""

    base_style = "dg."
    highlights = [  # noqa: RUF012  (a class attribute of the base class)
        r"(?P<value>%\w+(?:\.\d+)?)",
        r"(?P<kept>\b\w+\[K\d*\b[^\]]*\])",
        r"(?P<cut>-- stage cut: .*)",
        r"(?m)^(?P<heading>(?:layers\[|before the|between the|after the|phase |return |@@).*)$",
        r"(?m)^(?P<removed>- .*)$",
        r"(?m)^(?P<added>\+ .*)$",
        r"(?m)(?P<pass>  [A-Z][A-Za-z]+)$",
    ]


_PLAIN: Any = {"theme": _THEME, "highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
OUT = Console(**_PLAIN)
"""The console of results."""
ERR = Console(stderr=True, **_PLAIN)
"""The console of everything else. There is only one, so that messages and a spinner share the terminal."""
_HUSHED = False


def print_text(text: str) -> None:
    """Print a result that is plain text, byte for byte, with a newline at its end.

    Raises:
        InputError: it cannot be written.
    """
    try:
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        sys.stdout.flush()  # or a pipe that was closed would be noticed too late to be quiet about it
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        _discard()  # or Python would try again at the end of the process
        raise InputError(f"standard output cannot be written: {error.strerror}.") from error


def print_listing(text: str) -> None:
    """Print a dump, a diff or an explanation: coloured on a terminal, byte for byte when piped."""
    if OUT.is_terminal:
        OUT.print(_Listings()(text), end="")
    else:
        print_text(text)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; infinities become strings, as JSON has no numbers for them."""
    indent = 2 if sys.stdout.isatty() else None
    print_text(json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """A value in a form that JSON can hold."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def check_page(file: str) -> None:
    """Refuse a page that `write_page` could not write, before the work whose results it shows.

    Raises:
        InputError: as `write_page`.
    """
    check_file("--html", Path(file))


def write_page(file: str, text: str) -> None:
    """Write the page of `--html FILE`.

    Raises:
        InputError: the file cannot be written.
    """
    write_file("--html", Path(file), text)


def check_file(option: str, path: Path) -> None:
    """Refuse a file that `write_file` could not write, before the work whose results it holds.

    Raises:
        InputError: it is a folder, or in none that can be written.
    """
    if path.is_dir():
        raise InputError(f"{option} {path} cannot be written: it is a folder.")
    if not path.resolve().parent.is_dir():
        raise InputError(f"{option} {path} cannot be written: there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise InputError(f"{option} {path} cannot be written: permission denied; give another path.")


def write_file(option: str, path: Path, text: str) -> None:
    """Write the file that an option asks for.

    Raises:
        InputError: it cannot be written.
    """
    if not writes():
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written: {error.strerror}.") from None


def columns() -> int | None:
    """Letters of a line: the value of COLUMNS, else those of the terminal; None for no limit, in a pipe."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said):
        return int(said)
    return OUT.width if OUT.is_terminal else None


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], piped: int | None = None) -> None:
    """Print a table: with rules on a terminal if it fits, else as aligned columns or paragraphs.

    piped: letters of a line in a pipe, unless COLUMNS says; None for any number.
    """
    width = columns() or piped
    if not OUT.is_terminal or (width is not None and _ruled_width(titles, rows) > width):
        print_text("\n".join(plain_table(titles, rows, indent="", width=width)))
        return
    shown = Table(*titles, box=box.SIMPLE_HEAD, pad_edge=False)
    shown.columns[0].style = "bold"
    for row in rows:
        shown.add_row(*row)
    OUT.print(shown, soft_wrap=False)


def _ruled_width(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Letters of a line of a table with rules, with three between two columns."""
    return sum(max(map(len, column)) + 3 for column in zip(titles, *rows, strict=True))


def complain(message: str) -> None:
    """Print an error, even after `hush`."""
    before, ERR.quiet = ERR.quiet, False
    ERR.print(f"error: {message}")
    ERR.quiet = before


def hush() -> None:
    """Print errors alone from now on, and write no files, as another process prints and writes the same."""
    global _HUSHED
    _HUSHED, ERR.quiet = True, True
    _discard()


def _discard() -> None:
    """Drop results that are printed from now on."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)


def writes() -> bool:
    """True if this process writes files; False after `hush`."""
    return not _HUSHED


@contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """Show a text beside a spinner, while stderr is a terminal; yields a function that changes the text."""
    if _HUSHED or not ERR.is_terminal:
        yield lambda what: None
        return
    with ERR.status(what) as shown:
        yield shown.update


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print each distinct `UserWarning` of dgraph and of plugins as one line on stderr; drop those of torch."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], filename: str, *_: Any) -> None:
        text = str(message)
        told = category is DgraphWarning or (category is UserWarning and "/torch/" not in filename)
        if told and text not in seen:
            seen.add(text)
            ERR.print(f"warning: {text}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        yield
