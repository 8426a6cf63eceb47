"""Differences between two graphs: a summary, then the changed calls over folded layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dgraph.ir.graph import Graph
from dgraph.text.align import Entry, Place, align, calls_by_place
from dgraph.text.declarations import Names, declarations
from dgraph.text.folding import fold
from dgraph.text.listing import Line, Listing, listing
from dgraph.text.notation import layers_text
from dgraph.text.writer import Row, column_widths, row_text, table_rows
from dgraph.types.card import Card, Described

_MARKS = {"+": "added", "-": "removed", "~": "changed"}
CONTEXT = 1
"""Unchanged calls that are shown around a change."""


@dataclass(frozen=True)
class Change:
    """One call, as it reads in the old and in the new graph.

    Attributes:
        mark: `-` removed, `+` added, `~` changed, or a space.
        before, after: rows (call, type, pass); empty where it does not occur.
        rows: the row sets of its result before and after, if they differ.
    """

    mark: str
    before: tuple[Row, ...]
    after: tuple[Row, ...]
    rows: tuple[str, str] | None


@dataclass(frozen=True)
class GroupDiff:
    """Layers that changed alike, or a place outside the layers.

    Attributes:
        layers: first and last, or None.
        place: place of the first, in words.
        changes: changes of each of them, unchanged calls among them.
        passes: per mark and pass, the number of calls of each layer.
    """

    layers: tuple[int, int] | None
    place: str
    changes: tuple[Change, ...]
    passes: tuple[tuple[tuple[str, str], int], ...]

    @property
    def count(self) -> int:
        """Number of layers."""
        return 1 if self.layers is None else self.layers[1] - self.layers[0] + 1

    def total(self, mark: str) -> int:
        """Calls with a mark in each layer."""
        return sum(c.mark == mark for c in self.changes)

    @property
    def rows(self) -> dict[tuple[str, str], int]:
        """Row sets that changed: (before, after) and the number of calls in each layer."""
        return dict(Counter(c.rows for c in self.changes if c.rows is not None))

    @property
    def title(self) -> str:
        """`layers[2..35] x34` or `after the layers`."""
        return self.place if self.layers is None else layers_text(self.layers)


@dataclass(frozen=True, repr=False)
class Diff(Described):
    """Differences between two graphs; prints as text, summary first. False if there are no differences.

    Attributes:
        names: names of the graphs.
        declared: names that only one of them has, by "model", "passes", "inputs", "outputs", "weights", "row sets".
        groups: every layer and the places around them, equal ones folded.
    """

    names: tuple[str, str]
    declared: dict[str, Names]
    groups: tuple[GroupDiff, ...]

    def card(self) -> Card:
        """See `Described`."""
        named = {by: ", ".join(f"{n} {what}" for what, n in counts.items() if n) for by, counts in self.by_pass.items()}
        counts = ", ".join(f"{self.total(mark)} {what}" for mark, what in _MARKS.items())
        facts = (("calls", f"{counts}, {self.total(' ')} unchanged"), *named.items(), ("use", "print(diff)"))
        return Card(f"Diff from {self.names[0]} to {self.names[1]}", facts, str(self))

    def total(self, mark: str) -> int:
        """Calls with a mark (`-`, `+`, `~`, space) in the whole graph."""
        return sum(g.total(mark) * g.count for g in self.groups)

    def __bool__(self) -> bool:
        return (
            any(self.declared.values()) or any(self.total(mark) for mark in "-+~") or any(g.rows for g in self.groups)
        )

    @property
    def by_pass(self) -> dict[str, dict[str, int]]:
        """Per pass, the calls in the whole graph that it added, removed and changed."""
        found: dict[str, dict[str, int]] = {}
        for group in self.groups:
            for (mark, by), number in group.passes:
                counts = found.setdefault(by or "captured", dict.fromkeys(_MARKS.values(), 0))
                counts[_MARKS[mark]] += number * group.count
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values: `summary`, then `groups` with the changed calls."""
        return {
            "from": self.names[0],
            "to": self.names[1],
            "summary": {
                "calls": {"unchanged": self.total(" "), **{what: self.total(mark) for mark, what in _MARKS.items()}},
                "by_pass": self.by_pass,
                **{
                    what.replace(" ", "_"): {"removed": list(n.removed), "added": list(n.added)}
                    for what, n in self.declared.items()
                },
            },
            "groups": [
                {
                    "layers": None if g.layers is None else list(g.layers),
                    "place": g.place,
                    **{what: g.total(mark) for mark, what in _MARKS.items()},
                    "rows": [{"from": a, "to": b, "calls": n} for (a, b), n in g.rows.items()],
                    "changes": [
                        {"mark": c.mark, "before": _one(c.before), "after": _one(c.after)}
                        for c in g.changes
                        if c.mark != " "
                    ],
                }
                for g in self.groups
            ],
        }

    def __str__(self) -> str:
        old, new = self.names
        if not self:
            return f"{old} and {new}: no difference\n"
        counts = [f"{self.total(mark)} {what}" for mark, what in _MARKS.items()]
        out = [f"{old} -> {new}: calls {', '.join(counts)}, {self.total(' ')} unchanged", ""]
        out += [line for what, names in self.declared.items() for line in names.lines(what)]
        out += ["", f"{'by pass':<28}{_columns(_MARKS.values())}"]
        out += [f"{by:<28}{_columns(counts.values())}" for by, counts in self.by_pass.items() if any(counts.values())]
        out += ["", f"{'in each of':<28}{_columns(_MARKS.values())}   rows"]
        for group in self.groups:
            if any(group.total(mark) for mark in _MARKS) or group.rows:
                moved = ", ".join(f"{a} -> {b} in {n} calls" for (a, b), n in group.rows.items())
                out.append(f"{group.title:<28}{_columns(group.total(m) for m in _MARKS)}   {moved}".rstrip())
        out += ["", f"--- {old}", f"+++ {new}"]
        widths = column_widths(row for g in self.groups for c in g.changes for row in (*c.before, *c.after))
        for group in self.groups:
            if any(group.total(mark) for mark in _MARKS):
                out += [f"@@ {group.title} @@", *_body(group, widths)]
        return "\n".join(out) + "\n"


def _body(group: GroupDiff, widths: tuple[int, int]) -> Iterator[str]:
    """The changes of a group with a little context; numbers of unchanged calls are those of the new graph."""
    changed = [i for i, c in enumerate(group.changes) if c.mark != " "]
    shown = {j for i in changed for j in range(i - CONTEXT, i + CONTEXT + 1)}
    gap = False
    for i, change in enumerate(group.changes):
        if i not in shown:
            if not gap:
                yield "      ..."
            gap = True
            continue
        gap = False
        if change.mark == " ":
            yield from (f"    {row_text(row, widths)}" for row in change.after)
            continue
        yield from (f"-   {row_text(row, widths)}" for row in change.before)
        yield from (f"+   {row_text(row, widths)}" for row in change.after)


def _columns(values: Iterable[Any]) -> str:
    return "".join(f"{value:>9}" for value in values)


def _one(rows: tuple[Row, ...]) -> dict[str, Any] | None:
    """A call's rows as one plain value."""
    return {"call": [r.call for r in rows], "type": [r.type for r in rows], "by": rows[0].by} if rows else None


# -- making a diff -----------------------------------------------------------------------------------------------


def diff(before: Graph, after: Graph, names: tuple[str, str] = ("before", "after")) -> Diff:
    """Compare two graphs.

    Args:
        before, after: usually two phases or stages of one captured model.
        names: names of the two.
    """
    old, new = listing(before), listing(after)
    aligned = align(old, new)
    old_rows, new_rows = _rows_by_place(old), _rows_by_place(new)
    old_calls, new_calls = calls_by_place(old), calls_by_place(new)
    groups: list[GroupDiff] = []
    for place, entries in aligned.items():
        left, right = old_calls.get(place, []), new_calls.get(place, [])
        changes = tuple(
            Change(
                e.mark,
                () if e.before is None else old_rows[place][e.before],
                () if e.after is None else new_rows[place][e.after],
                _moved(e, left, right),
            )
            for e in entries
        )
        passes = Counter((e.mark, _by(e, left, right)) for e in entries if e.mark != " ")
        layers = (place, place) if isinstance(place, int) else None
        group = GroupDiff(layers, f"layers[{place}]" if layers else str(place), changes, tuple(passes.items()))
        groups = [*groups[:-1], *_joined(groups[-1], group)] if groups else [group]
    return Diff(names, declarations(old, new), tuple(groups))


def _joined(last: GroupDiff, group: GroupDiff) -> list[GroupDiff]:
    if (
        last.layers is None
        or group.layers is None
        or last.layers[1] + 1 != group.layers[0]
        or last.changes != group.changes
    ):
        return [last, group]
    return [GroupDiff((last.layers[0], group.layers[1]), last.place, last.changes, last.passes)]


def _rows_by_place(found: Listing) -> dict[Place, list[tuple[Row, ...]]]:
    """Rows of every call as the folded dump has them, so that equal layers have equal rows."""
    rows: dict[Place, list[tuple[Row, ...]]] = {}
    for group in fold(found.sections):
        first = None if group.layers is None else group.layers[0]
        shown = [tuple(table_rows(line, first)) for line in group.lines]
        for place in [group.place] if group.layers is None else range(group.layers[0], group.layers[1] + 1):
            rows.setdefault(place, []).extend(shown)
    return rows


def _moved(entry: Entry, left: list[Line], right: list[Line]) -> tuple[str, str] | None:
    if entry.before is None or entry.after is None:
        return None
    old, new = left[entry.before].rows, right[entry.after].rows
    return next(((a, b) for a, b in zip(old, new, strict=False) if a and b and a != b), None)


def _by(entry: Entry, left: list[Line], right: list[Line]) -> str:
    """The pass that made the new call, or the old one if the call is gone."""
    return right[entry.after].by if entry.after is not None else left[entry.before or 0].by
