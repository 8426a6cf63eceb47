"""Tables that print, and write themselves as Markdown and JSON, with the setting in which they were measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Cell = str | int | float


@dataclass
class Report:
    """What one script measured: a setting, and tables in order."""

    title: str
    tables: list[tuple[str, list[str], list[list[Cell]], str]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], note: str = "", show: bool = True
    ) -> None:
        """Add a table; show: and print it."""
        self.tables.append((title, list(columns), [list(r) for r in rows], note))
        if show:
            self.show(len(self.tables) - 1)

    def show(self, first: int = 0) -> None:
        """Print the tables, from some place on."""
        for title, columns, rows, note in self.tables[first:]:
            shown = Table(title=title, caption=note or None)
            for i, column in enumerate(columns):
                shown.add_column(column, justify="left" if i == 0 else "right")
            for row in rows:
                shown.add_row(*map(text_of, row))
            Console(width=None if sys.stdout.isatty() else 160).print(shown)

    def markdown(self) -> str:
        """Every table as Markdown, below the setting."""
        lines = [f"## {self.title}", "", f"{setting()}", ""]
        for title, columns, rows, note in self.tables:
            lines += [f"### {title}", "", *markdown_of(columns, rows), "", *([note, ""] if note else [])]
        return "\n".join(lines)

    def write(self, markdown: Path | None, json_file: Path | None) -> None:
        """Write what was asked for."""
        if markdown is not None:
            markdown.write_text(self.markdown() + "\n", encoding="utf-8")
        if json_file is not None:
            tables = [{"title": t, "columns": c, "rows": r, "note": n} for t, c, r, n in self.tables]
            value = {"title": self.title, "setting": setting(), "tables": tables, "data": self.data}
            json_file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def markdown_of(columns: Sequence[str], rows: Sequence[Sequence[Cell]], left: bool = False) -> list[str]:
    """Lines of a table; the first column is aligned left, the others right unless `left` is set."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' + ('---|' if left else '---:|') * (len(columns) - 1)}"]
    return lines + [f"| {' | '.join(map(text_of, row))} |" for row in rows]


def text_of(cell: Cell) -> str:
    """A cell as it prints: three significant digits for a fraction."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.0f}"


def setting() -> str:
    """Hardware, versions, date and command."""
    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"CPU, {os.cpu_count()} cores ({platform.machine()})"
    command = " ".join(["python", *map(shlex.quote, _arguments())])
    date = datetime.date.today().isoformat()
    return f"{hardware}; torch {torch.__version__}, Python {platform.python_version()}; {date}; `{command}`"


def _arguments() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    command = ["-m", spec.name, *sys.argv[1:]] if spec is not None else list(sys.argv)
    for option in ("--markdown", "--json", "--plot"):  # where the output went is no part of the measurement
        if option in command:
            at = command.index(option)
            del command[at : at + 2]
    return command
