"""Text of a response while it grows: the part that is final, and the stop text that ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile

from dgraph.runtime.sampling.stops import Decoder, first_stop, stops_from, trim

BROKEN = "\N{REPLACEMENT CHARACTER}"


ALIKE = 8
"""Characters that neighbours can change at most: "do n ' t" is "don't" in a vocabulary of words."""


class Shown:
    """A tokenizer that writes some special tokens out, which it else leaves out of a text.

    Args:
        tokenizer: decodes the other ids.
        shown: ids, and their texts.
    """

    def __init__(self, tokenizer: Decoder, shown: Iterable[tuple[int, str]]):
        self._tokenizer, self._shown = tokenizer, dict(shown)

    def decode(self, ids: Sequence[int], /) -> str:
        """Text of ids."""
        parts = (list(part) for _, part in groupby(ids, self._shown.__contains__))
        return "".join(
            "".join(map(self._shown.__getitem__, part)) if part[0] in self._shown else self._tokenizer.decode(part)
            for part in parts
        )

    def unsettled(self, ids: Sequence[int]) -> int:
        """Characters at the end of the text that later ids may change, at most."""
        asked = getattr(self._tokenizer, "unsettled", None)
        last = list(takewhile(lambda token: token not in self._shown, reversed(ids)))
        return 0 if asked is None else asked(last[::-1])


class Writer:
    """Turn the tokens of one response into text, as far as no later token can change it.

    An incomplete character at the end is held back, and so is text that may begin a stop text; the tokens of text that
    may be cut off are held back with it.

    Args:
        tokenizer: decodes ids; None for no text at all. It may have `unsettled(ids) -> int`, how many characters of
            their text later ids may change at most.
        stops: texts that end the response.
        least: tokens that are left of the response at least; see `trim`.
        keep: the stop text that ends it stays.

    Attributes:
        final: number of tokens that stay, whatever follows.
        stopped: True if a stop text has been found.
    """

    def __init__(self, tokenizer: Decoder | None, stops: Sequence[str], least: int = 0, keep: bool = False):
        self._tokenizer, self._stops, self._least, self._keep = tokenizer, tuple(stops), least, keep
        self._ids: list[int] = []
        self._text = ""  # of all tokens so far; its end may change
        self._first = 0  # tokens from here on are decoded anew, since neighbours may join
        self._before = ""  # the text before theirs
        self._skipped = 0  # characters that they begin with by themselves, but not after others
        self._given = 0  # characters that were given out
        self._ends: list[int] = []  # of tokens that are not final yet, characters up to their end
        self.final = 0
        self.stopped = False

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far; cut at a stop text that was found."""
        return self._ids

    def write(self, ids: Sequence[int]) -> str:
        """Add tokens; return the text that has become final."""
        if self.stopped:
            return ""
        known = len(self._ids)
        self._ids += ids
        if self._tokenizer is None or not self._stops:
            self.final = len(self._ids)
        if self._tokenizer is None:
            return ""
        if self._stops:
            self._ends += [len(self._joined(end)) for end in range(known + 1, len(self._ids) + 1)]
        self._text = self._joined(len(self._ids))
        sure = max(self._given, len(self._text) - self._unsettled())
        if self._stops_in(self._text[:sure]):
            return self._cut()
        self._forget(known, len(self._text) - sure)
        return self._give(sure - self._held(sure))

    def _joined(self, end: int) -> str:
        """The text of the tokens before an index."""
        assert self._tokenizer is not None
        return self._before + self._tokenizer.decode(self._ids[self._first : end])[self._skipped :]

    def _unsettled(self) -> int:
        """Characters at the end of the text that later tokens may change."""
        broken = len(self._text) - len(self._text.rstrip(BROKEN))  # in the middle of a character
        asked = getattr(self._tokenizer, "unsettled", None)
        return broken if asked is None else max(broken, asked(self._ids[self._first :]))

    def _forget(self, first: int, unsettled: int) -> None:
        """Stop decoding the tokens before an index, if those from there on give the same text alone as after others.

        Special tokens alone give no text, and a first word may lack its space.
        """
        assert self._tokenizer is not None
        alone = self._tokenizer.decode(self._ids[first:])
        pairs = zip(reversed(self._text), reversed(alone), strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same - unsettled >= ALIKE:
            self._first, self._before = first, self._text[: len(self._text) - same]
            self._skipped = len(alone) - same

    def end(self) -> str:
        """Return the rest of the text, when the response has ended."""
        return "" if self._tokenizer is None or self.stopped else self._cut()

    @property
    def _longest(self) -> int:
        return max(map(len, self._stops), default=0)

    def _stops_in(self, text: str) -> bool:
        """True if a text has a stop text; the part that was given out has none."""
        begin = self._begin
        return begin is not None and first_stop(text, self._stops, max(begin, self._given - self._longest)) is not None

    @property
    def _begin(self) -> int | None:
        """The character from which on a stop text ends the response; None as long as it is too short."""
        assert self._tokenizer is not None
        return stops_from(self._tokenizer, self._ids, self._least)

    def _cut(self) -> str:
        """Cut the text after its first stop text, as that of the whole response; return the rest of it."""
        assert self._tokenizer is not None
        trimmed = trim(self._tokenizer, self._ids, self._stops, self._least, self._keep)
        # Text that was given out stays, also where a tokenizer changes more than it says.
        self._text = self._text[: self._given] + trimmed.text[self._given :]
        self._ids, self.stopped = trimmed.token_ids, trimmed.stop is not None
        self.final, self._ends = len(self._ids), []
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        text = self._text[self._given : max(end, self._given)]
        self._given += len(text)
        while self._ends and self._ends[0] <= self._given:
            self._ends.pop(0)
            self.final += 1
        return text

    def _held(self, sure: int) -> int:
        """Characters before a place that may begin a stop text."""
        begin = self._begin
        if begin is None:
            return 0
        most = min(self._longest - 1, sure - max(self._given, begin))
        for count in range(most, 0, -1):
            tail = self._text[sure - count : sure]
            if any(stop.startswith(tail) for stop in self._stops):
                return count
        return 0
