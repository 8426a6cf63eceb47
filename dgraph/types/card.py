"""Short descriptions of objects, as text and, for notebooks, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_CELL = "text-align:left;vertical-align:top;padding:0.1em 0.8em 0.1em 0"
_TEXT = 60
"""Letters of a quoted text."""


@dataclass(frozen=True)
class Card:
    """A title and facts below it.

    Attributes:
        title: one line.
        facts: names and texts; an empty text is left out.
        whole: the object in full, which HTML has folded and text does not; "" for nothing.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    whole: str = ""

    def __str__(self) -> str:
        shown = [(name, text) for name, text in self.facts if text]
        width = max((len(name) for name, _ in shown), default=0)
        return "\n".join([self.title, *(f"  {name:<{width}}  {text}" for name, text in shown)])

    def to_html(self) -> str:
        """An element by itself: no scripts, no styles of a page, nothing to be loaded."""
        rows = "".join(
            f'<tr><th style="{_CELL}">{escape(name)}</th><td style="{_CELL}"><code>{escape(text)}</code></td></tr>'
            for name, text in self.facts
            if text
        )
        whole = f"<details><summary>all of it</summary><pre>{escape(self.whole)}</pre></details>" if self.whole else ""
        return f"<div><strong>{escape(self.title)}</strong><table>{rows}</table>{whole}</div>"


class Described:
    """Base of objects that are shown by a card."""

    def card(self) -> Card:
        """The description."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self.card())

    def _repr_html_(self) -> str:
        return self.card().to_html()


def quoted(text: str, letters: int = _TEXT) -> str:
    """The beginning of a text as Python writes it."""
    return repr(text if len(text) <= letters else text[: letters - 3] + "...")


def counted(number: int, noun: str) -> str:
    """A number and a noun, in the plural where there are several."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
