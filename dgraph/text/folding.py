"""Folding: equal layers of a listing as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from dgraph.text.listing import Line, Ref, Section, map_refs


@dataclass(frozen=True)
class Carried:
    """A value that each layer of a run takes from the one before.

    Attributes:
        name: name under which the lines read it.
        first: its value in the first layer.
        then: its value in the second; in the others, the same value of the layer before.
    """

    name: str
    first: Ref
    then: Ref


@dataclass(frozen=True)
class Group:
    """Sections with equal text.

    Attributes:
        layers: first and last layer, or None outside the layers.
        place: place of the first section.
        lines: lines of every one of them.
        carried: values that are handed from layer to layer.
    """

    layers: tuple[int, int] | None
    place: str
    lines: tuple[Line, ...]
    carried: tuple[Carried, ...] = ()

    @property
    def count(self) -> int:
        """Number of layers."""
        return 1 if self.layers is None else self.layers[1] - self.layers[0] + 1

    def bindings(self, layer: int) -> dict[str, Ref]:
        """Values that the carried names stand for in one layer."""
        assert self.layers is not None
        return {c.name: c.first if layer == self.layers[0] else replace(c.then, layer=layer - 1) for c in self.carried}


def fold(sections: Iterable[Section]) -> tuple[Group, ...]:
    """Consecutive layers with equal lines as one group.

    A layer's *foreign* values (of other layers, or outside) are numbered by first use. Two layers are equal if their
    lines are, up to foreign values. Each foreign value must be shared or carried in all layers of a group. A shared one
    is the same value (a table of cosines). A carried one is the same value of the layer before (the hidden states), the
    first layer excepted.
    """
    runs: list[list[Section]] = []
    for section in sections:
        if runs and _continues(runs[-1], section):
            runs[-1].append(section)
        else:
            runs.append([section])
    return tuple(map(_group, runs))


def _continues(run: list[Section], section: Section) -> bool:
    last = run[-1]
    if section.layer is None or last.layer is None or section.layer != last.layer + 1:
        return False
    if _skeleton(section) != _skeleton(run[0]):
        return False
    return all(_kind([*run, section], i) is not None for i in range(len(_foreign(section))))


def _kind(run: list[Section], i: int) -> str | None:
    """Role of the i-th foreign value in a run: "shared", "carried", or None if neither."""
    values = [_foreign(s)[i] for s in run]
    if len(set(values)) == 1:
        return "shared"
    own = [s.layer is not None and v.layer == s.layer - 1 for s, v in zip(run, values, strict=True)]
    return "carried" if all(own[1:]) and len({v.name for v in values[1:]}) == 1 else None


def _foreign(section: Section) -> list[Ref]:
    found: dict[Ref, None] = {}
    for line in section.lines:
        found.update(dict.fromkeys(r for r in line.references() if _is_foreign(r, section.layer)))
    return list(found)


def _is_foreign(ref: Ref, layer: int | None) -> bool:
    return ref.kind == "value" and ref.layer != layer


def _skeleton(section: Section) -> tuple[Line, ...]:
    """Lines of a section without anything that tells its layer from others."""
    numbers = {ref: i for i, ref in enumerate(_foreign(section))}

    def anonymous(ref: Ref) -> Any:
        return Ref("foreign", str(numbers[ref])) if ref in numbers else replace(ref, layer=None)

    return tuple(replace(_with_refs(line, anonymous), source="") for line in section.lines)


def _with_refs(line: Line, change: Callable[[Ref], Any]) -> Line:
    return replace(line, args=map_refs(line.args, change), kwargs=map_refs(line.kwargs, change))


def _group(run: list[Section]) -> Group:
    first = run[0]
    if first.layer is None or len(run) == 1:
        layers = None if first.layer is None else (first.layer, first.layer)
        return Group(layers, first.place, first.lines)
    names: dict[Ref, Carried] = {}
    for i, ref in enumerate(_foreign(first)):
        if _kind(run, i) == "carried":
            names[ref] = Carried(f"%h{len(names) or ''}", ref, _foreign(run[1])[i])

    def named(ref: Ref) -> Ref:
        return Ref("carried", names[ref].name) if ref in names else ref

    lines = tuple(_with_refs(line, named) for line in first.lines)
    return Group((first.layer, first.layer + len(run) - 1), first.place, lines, tuple(names.values()))
