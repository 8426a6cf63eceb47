"""Stop strings: search them in a text, and cut a finished response there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dgraph.errors import InputError


class Decoder(Protocol):
    """Protocol of tokenizers: turns ids into text."""

    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True)
class Trimmed:
    """A response after the cut at its first stop string.

    Attributes:
        text: text up to the stop string, or up to its end.
        token_ids: ids whose text lies inside of it.
        stop: the stop string that was found; None: nothing was cut.
    """

    text: str
    token_ids: list[int]
    stop: str | None = None


def first_stop(text: str, stops: Sequence[str], begin: int = 0) -> tuple[int, str] | None:
    """Index and string of the first stop string in a text, from index `begin` on; None without one.

    Ties at one index go to the longest.
    """
    places = ((text.find(stop, begin), stop) for stop in stops)
    found = [(index, -len(stop), stop) for index, stop in places if index >= 0]
    if not found:
        return None
    index, _, stop = min(found)
    return index, stop


def stops_from(tokenizer: Decoder, token_ids: Sequence[int], least: int) -> int | None:
    """Index in the text of a response from which on a stop string ends it, so that `least` tokens are left of it.

    None if the response has fewer tokens.
    """
    if len(token_ids) < least:
        return None
    return len(tokenizer.decode(token_ids[:least])) if least else 0


def says_stop(tokenizer: Decoder, token_ids: Sequence[int], stops: Sequence[str], least: int = 0) -> bool:
    """True if a stop string ends a response that begins with these tokens."""
    begin = stops_from(tokenizer, token_ids, least)
    return begin is not None and first_stop(tokenizer.decode(token_ids), stops, begin) is not None


def trim(
    tokenizer: Decoder, token_ids: Sequence[int], stops: Sequence[str], least: int = 0, keep: bool = False
) -> Trimmed:
    """Cut a response at the first of the stop strings, which is left out unless `keep`. least: tokens that are left at
    least; a stop string that begins in their text does not count.

    Blocks are decoded in any order, so that a stop string is known for certain only in a finished response; it may also
    lie across tokens. A token that reaches over the cut is left out of the ids, while its text before the cut
    stays in the text.

    Raises:
        InputError: see `check_stops`.
    """
    check_stops(stops)
    ids = list(token_ids)
    text, begin = tokenizer.decode(ids), stops_from(tokenizer, ids, least)
    found = None if begin is None else first_stop(text, stops, begin)
    if found is None:
        return Trimmed(text, ids)
    index, stop = found
    index += len(stop) if keep else 0
    beyond = bisect_left(range(len(ids)), True, key=lambda n: len(tokenizer.decode(ids[: n + 1])) > index)
    return Trimmed(text[:index], ids[:beyond], stop)


def check_stops(stops: Sequence[str]) -> None:
    """Check a list of stop strings.

    Raises:
        InputError: one string in the place of a list, something else than a string, or an empty one.
    """
    if isinstance(stops, str):
        raise InputError(f"stop strings are a list, got the string {stops!r}; wrap it in a list.", field="stop")
    if not isinstance(stops, Iterable):
        raise InputError(f"stop strings are a list, got {stops!r}.", field="stop")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InputError(f"a stop string is a text of at least one character, got {stop!r}.", field="stop")
