"""Short completions of a text that a grammar has begun.

The search goes over bytes, so its cost does not depend on the vocabulary. First it goes straight on, and closes at once
all that is open, which completes JSON. If that leads nowhere, or to a text that is too long, a breadth-first search
follows. It takes states at the same depth that allow the same bytes for equal, and looks at a bounded number of them.
Random walks come last.
"""

from __future__ import annotations

import heapq
from collections import Counter
from functools import lru_cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from dgraph.runtime.constraints.grammar import Matcher, byte_tokenizer

STRAIGHT = 4096
"""Bytes after which the straight search gives up."""
REPEATED = 64
"""Bytes in a row, all with the same that may follow, after which it does."""
MOST_STATES = 2500
"""States that the breadth-first search looks at, at most."""
WALK = 600
"""Bytes of a random walk, at most."""
WALKS = 12
"""Random walks, where all else found nothing."""
ALIKE = 3
"""States of one depth that are looked at, at most, among those that allow the same bytes."""
MANY = 64
"""Bytes that a state allows within a quoted string, at least."""
CLOSING = b"}])>,:\"'"
"""Bytes that close or go on with what is open, in the order in which they are tried."""
QUOTED = b'"0a1' + CLOSING
"""The same within a quoted string, with some that stand for all others."""


class Completion:
    """Completions in a grammar; the texts that were asked for last are kept."""

    def __init__(self, grammar: str):
        self._matcher = Matcher(byte_tokenizer(), grammar)
        self._grammar = grammar
        self._begun = b""
        self._known: dict[tuple[bytes, bool], bytes | None] = {}

    def of(self, begun: bytes, short: bool = False) -> bytes | None:
        """The bytes that complete a text, b"" for one that is complete; None if none were found.

        short: search for the fewest bytes, not for the first that do.
        """
        key = (begun, short)
        if key not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[key] = self._search(begun, short) if begun or short else whole_text(self._grammar)
        return self._known[key]

    def _search(self, begun: bytes, short: bool) -> bytes | None:
        if not short and self._go_to(begun) and (found := self._walk(STRAIGHT, None)) is not None:
            return found
        if self._go_to(begun) and (found := self._breadth_first()) is not None:
            return found
        for seed in range(WALKS):
            if self._go_to(begun) and (found := self._walk(WALK, Random(seed))) is not None:
                return found
        return None

    def _go_to(self, text: bytes) -> bool:
        """Move the matcher to a text; False if the grammar does not begin so."""
        if self._matcher.dead:
            self._matcher, self._begun = Matcher(byte_tokenizer(), self._grammar), b""
        shared = 0
        for mine, theirs in zip(self._begun, text, strict=False):
            if mine != theirs:
                break
            shared += 1
        self._matcher.back(len(self._begun) - shared)
        taken = self._matcher.take(text[shared:])
        self._begun = text[: shared + taken]
        return self._begun == text and not self._matcher.dead

    def _walk(self, most: int, draw: Random | None) -> bytes | None:
        """Completion by the first byte that is allowed, or one that is drawn, again and again."""
        begun, last, same = self._begun, b"", 0
        while not self._matcher.accepting:
            allowed = self._matcher.allowed()
            same = same + 1 if allowed.tobytes() == last else 0
            last, found = allowed.tobytes(), candidates(allowed)
            if not found or (draw is None and same > REPEATED) or len(self._begun) - len(begun) >= most:
                return None
            one = found[0] if draw is None else draw.choice(found)
            if not self._matcher.take([one]) or self._matcher.dead:
                return None
            self._begun += bytes([one])
        return self._begun[len(begun) :]

    def _breadth_first(self) -> bytes | None:
        """Completion of the fewest bytes, as far as the search looks."""
        begun, seen = self._begun, Counter[tuple[int, bytes]]()
        queue: list[tuple[int, int, bytes]] = [(0, 0, b"")]
        pushed = visited = 0
        while queue and visited < MOST_STATES:
            depth, _, text = heapq.heappop(queue)
            if not self._go_to(begun + text):
                continue
            if self._matcher.accepting:
                return text
            visited += 1
            allowed = self._matcher.allowed()
            key = (depth, allowed.tobytes())
            seen[key] += 1
            if seen[key] > ALIKE:
                continue
            for one in candidates(allowed):
                pushed += 1
                heapq.heappush(queue, (depth + 1, pushed, text + bytes([one])))
        return None


def candidates(allowed: NDArray[np.bool_]) -> bytes:
    """Bytes that may follow, those first that close what is open; some of them where very many may."""
    there = np.flatnonzero(allowed[:256]).tolist()
    many = len(there) > MANY
    first = [one for one in (QUOTED if many else CLOSING) if one in there]
    rest = [one for one in there if one not in first]
    if many:  # letters, and bytes of other scripts, are alike in most grammars
        rest = [one for one in rest if one < 128 and not chr(one).isalnum()] or rest[:8]
    return bytes([*first, *sorted(rest, key=lambda one: (one in b" \t\r\n", not chr(one).isalnum(), one))])


@lru_cache(maxsize=64)
def whole_text(grammar: str) -> bytes | None:
    """A text of the grammar; None if none was found."""
    return Completion(grammar)._search(b"", short=False)
