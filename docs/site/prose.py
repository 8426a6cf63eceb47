"""Docstrings and values of the code as Markdown."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$", flags=re.MULTILINE)


def first_paragraphs(documented: Any) -> str:
    """The paragraphs of a docstring before its sections; papers and pages of results become links."""
    text = SECTION.split(inspect.getdoc(documented) or "")[0].strip()
    text = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"benchmarks/results/(\w+)\.md", r"[results/\1](../results/\1.md)", text)


def literal(value: Any) -> str:
    """A value as text of the command line."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(literal, value)) or "none"
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if is_dataclass(value) and not isinstance(value, type):
        return "+".join(f"{f.name}={literal(getattr(value, f.name))}" for f in fields(value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def inline(text: str) -> str:
    """Text that stands in a paragraph or a cell of a table as it is; what stands in backticks stays code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if n % 2 else re.sub(r"([<>*_\[\]])", r"\\\1", part) for n, part in enumerate(parts))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; cells are Markdown without line breaks."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
