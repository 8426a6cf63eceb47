"""Plain tables. What prints one needs neither a graph nor torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines of left-aligned columns, the last as wide as it likes."""
    cells = [titles, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [f"{indent}{line}".rstrip() for line in lines]
