"""Alignment of two listings: calls are the same by op, arguments and wiring, never by number.

Calls are aligned layer by layer. A call's *key* is its op and arguments, with each value named by the call that made
it; so a call that moved down because others were inserted keeps its key. Values that were only gathered (`compact`)
count as the values they were gathered from. Types are compared without their rows: another row set is not another
computation. Calls that aligned are then held to it: one whose arguments were made by calls that did not align has
changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from dgraph.text.listing import Line, Listing, Ref, map_refs

Place = int | str
"""A layer, or "before", "between" or "after the layers"."""

GATHER = "dgraph.compact"

_ROWS = re.compile(r"\[(?:b, t|N|K\d*)(?=[,\]])")


def without_rows(kind: str) -> str:
    """A type whose leading rows are left open: `f32[*, 64]`."""
    return _ROWS.sub("[*", kind)


@dataclass(frozen=True)
class Entry:
    """A call of the old listing, of the new one, or of both.

    Attributes:
        before, after: its index among the calls of its place, None where it does not occur.
        changed: it occurs in both with other arguments.
    """

    before: int | None
    after: int | None
    changed: bool = False

    @property
    def mark(self) -> str:
        """`-` removed, `+` added, `~` changed, or a space."""
        if self.after is None:
            return "-"
        return "+" if self.before is None else "~" if self.changed else " "


def calls_by_place(listing: Listing) -> dict[Place, list[Line]]:
    """The calls of a listing, layer by layer."""
    found: dict[Place, list[Line]] = {}
    for section in listing.sections:
        found.setdefault(section.place if section.layer is None else section.layer, []).extend(section.lines)
    return found


def align(before: Listing, after: Listing) -> dict[Place, list[Entry]]:
    """The calls of two listings side by side, in order, for every place that one of them has."""
    old, new = _Names(before), _Names(after)
    aligned = {place: _entries(old, new, place) for place in _merged(list(old.calls), list(new.calls))}
    same: dict[Ref, Ref] = {}
    for place, entries in aligned.items():
        layer = place if isinstance(place, int) else None
        for entry in entries:
            if entry.before is not None and entry.after is not None:
                results = zip(
                    old.calls[place][entry.before].results, new.calls[place][entry.after].results, strict=False
                )
                same |= {Ref("value", a, layer): Ref("value", b, layer) for a, b in results if a and b}
    for place, entries in aligned.items():
        for i, entry in enumerate(entries):
            if entry.mark != " ":
                continue
            left, right = old.calls[place][entry.before or 0], new.calls[place][entry.after or 0]
            pairs = zip(map(old.origin, left.references()), map(new.origin, right.references()), strict=True)
            if any(a.kind == "value" and same.get(a) != b for a, b in pairs):
                entries[i] = Entry(entry.before, entry.after, changed=True)
    return aligned


class _Names:
    """The call that made each value of a listing."""

    def __init__(self, listing: Listing):
        self.calls = calls_by_place(listing)
        self.made: dict[Ref, tuple[Line, int]] = {}
        for section in listing.sections:
            for line in section.lines:
                for i, name in enumerate(line.results):
                    if name is not None:
                        self.made[Ref("value", name, section.layer)] = line, i

    def origin(self, ref: Ref) -> Ref:
        """The value that a value was gathered from; another reference is its own origin."""
        while ref.kind == "value":
            line, part = self.made[ref]
            if line.op != GATHER:
                break
            ref = line.args[0][part]
        return ref

    def key(self, line: Line) -> Any:
        """Key that a call shares with the same call in another graph; hashable."""
        types = tuple(map(without_rows, line.types))
        return line.op, map_refs(line.args, self._anonymous), map_refs(line.kwargs, self._anonymous), types

    def _anonymous(self, ref: Ref) -> Any:
        ref = self.origin(ref)
        if ref.kind != "value":
            return ref
        line, part = self.made[ref]
        return line.op, part, tuple(r.name for r in line.references() if r.kind == "weight")


def _entries(old: _Names, new: _Names, place: Place) -> list[Entry]:
    left, right = old.calls.get(place, []), new.calls.get(place, [])
    entries: list[Entry] = []
    for same, (a, b, c, d) in _blocks([*map(old.key, left)], [*map(new.key, right)]):
        if same:
            entries += [Entry(i, c + i - a) for i in range(a, b)]
            continue
        for alike, (e, f, g, h) in _blocks([x.op for x in left[a:b]], [x.op for x in right[c:d]]):
            if alike:
                entries += [Entry(a + i, c + g + i - e, changed=True) for i in range(e, f)]
            else:
                entries += [Entry(a + i, None) for i in range(e, f)]
                entries += [Entry(None, c + i) for i in range(g, h)]
    return entries


def _blocks(left: Sequence[Any], right: Sequence[Any]) -> Iterable[tuple[bool, tuple[int, int, int, int]]]:
    for tag, *bounds in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        a, b, c, d = bounds
        yield tag == "equal", (a, b, c, d)


def _merged(left: list[Place], right: list[Place]) -> list[Place]:
    """Places of both in order."""
    out: list[Place] = []
    for _, (a, b, c, d) in _blocks(left, right):
        out += [*left[a:b], *(p for p in right[c:d] if p not in left[a:b])]
    return out
