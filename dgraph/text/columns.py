"""Plain tables. Printing one needs neither a graph nor torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

NARROWEST = 30
"""Letters of a column in which a text is still read with ease."""
GAP = "  "


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ", width: int | None = None
) -> list[str]:
    """Lines of left-aligned columns, the last as wide as it likes.

    Args:
        titles: titles of the columns.
        rows: their cells.
        indent: before every line.
        width: letters of a line at most; None for any number. A table that is wider has its widest column wrapped, or,
            where too little is left for that, one paragraph for each row.
    """
    cells = [list(titles), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    excess = 0 if width is None else len(indent) + sum(widths) + len(GAP) * (len(widths) - 1) - width
    if excess > 0:
        widest = widths.index(max(widths))
        widths[widest] -= excess
        if widths[widest] < NARROWEST:
            return paragraphs(titles, cells[1:], indent, width or 0)
    lines = []
    for row in cells:
        parts = [_wrapped(cell, size) for cell, size in zip(row, widths, strict=True)]
        for line in range(max(map(len, parts))):
            texts = (part[line] if line < len(part) else "" for part in parts)
            joined = GAP.join(f"{text:<{size}}" for text, size in zip(texts, widths, strict=True))
            lines.append(f"{indent}{joined}".rstrip())
    return lines


def paragraphs(titles: Sequence[str], rows: Iterable[Sequence[str]], indent: str, width: int) -> list[str]:
    """Each row as its first cell, and below it the others after their titles; empty ones are left out."""
    before = max(map(len, titles[1:]), default=0)
    room = max(NARROWEST, width - len(indent) - before - 2 * len(GAP))
    lines = []
    for first, *others in rows:
        lines += [f"{indent}{text}" for text in _wrapped(first, max(NARROWEST, width - len(indent)))]
        for title, cell in zip(titles[1:], others, strict=True):
            if cell in ("", "-"):
                continue
            for number, text in enumerate(_wrapped(cell, room)):
                lines.append(f"{indent}{GAP}{'' if number else title:<{before}}{GAP}{text}")
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` letters; a text that fits stays as it is, spaces and all."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]
