"""The patterns of a file, and their matches in a graph as text: what `dgraph match` prints."""

from __future__ import annotations

import runpy
from collections.abc import Iterable, Iterator
from pathlib import Path

from dgraph.errors import DgraphError, InputError
from dgraph.ir.graph import Graph
from dgraph.ir.matching import Match, Matches, Miss
from dgraph.ir.pattern import Pattern
from dgraph.text.listing import Ref, arguments_in
from dgraph.text.notation import ranges_text, show
from dgraph.types.card import counted
from dgraph.types.nodes import op_name

MOST = 10
"""Near misses that a text has at most, layers that are alike as one."""


def patterns_in(path: str | Path) -> list[Pattern]:
    """Run a Python file, and give every `dgraph.Pattern` that it names, in order.

    Raises:
        InputError: the file cannot be read or run, or names no pattern.
    """
    try:
        names = runpy.run_path(str(path))
    except DgraphError:
        raise
    except Exception as error:
        raise InputError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    found = dict.fromkeys(value for value in names.values() if isinstance(value, Pattern))
    if not found:
        raise InputError(f"{path} has no pattern; write @dgraph.Pattern above a function.")
    return list(found)


def text_of(graph: Graph, found: Iterable[Matches]) -> str:
    """The matches of patterns by layer, and near misses, the deepest first; layers that are alike in one line.

    Values have the names that they have in a dump.

        gated_unit: 12 matches, 1 near miss
          layers[0..11] x12    %25 = gated_unit(%21, mlp.gate_proj.weight, mlp.up_proj.weight)
          outside the layers   %mul: 1 of 4 nodes: to stands where silu is expected
    """
    names = _Names(graph)
    return "\n".join(line for matches in found for line in _lines(matches, names))


class _Names:
    """Values of a graph as they read in its dump, in each layer alike."""

    def __init__(self, graph: Graph):
        self._argument = arguments_in(graph)

    def value(self, value: object, layer: int | None) -> str:
        """A value as an argument in a layer."""
        found = self._argument(value, layer)
        if isinstance(found, Ref) and found.kind == "value" and layer is not None and found.layer == layer - 1:
            return f"layers[-1].{found.name}"
        return show(found, layer)

    def match(self, match: Match) -> str:
        """A match as a call of its pattern."""
        values = ", ".join(self.value(value, match.layer) for value in match.values)
        return f"{self.value(match.root, match.layer)} = {match.pattern.name}({values})"

    def miss(self, miss: Miss) -> str:
        """A near miss with its place."""
        return f"{self.value(miss.root, miss.layer)}: {miss}"


def _lines(found: Matches, names: _Names) -> Iterator[str]:
    count = "1 match" if len(found) == 1 else f"{len(found)} matches"
    near = "1 near miss" if len(found.misses) == 1 else f"{len(found.misses)} near misses"
    yield f"{found.pattern.name}: {count}, {near}"
    if not found and not found.misses:
        yield f"  the graph has no call of {op_name(found.pattern.ends[-1])}, the last one of the pattern"
    matches = list(_folded((match.layer, names.match(match)) for match in found))
    misses = list(_folded((miss.layer, names.miss(miss)) for miss in found.misses))
    shown = [*matches, *misses[:MOST]]
    width = max((len(place) for place, _ in shown), default=0)
    for place, line in shown:
        yield f"  {place.ljust(width)}   {line}"
    if len(misses) > MOST:
        yield f"  {counted(len(misses) - MOST, 'more kind')} of near misses; --json has all"


def _folded(lines: Iterable[tuple[int | None, str]]) -> Iterator[tuple[str, str]]:
    """Places, and what stands there; layers with the same line together."""
    layers: dict[str, list[int | None]] = {}
    for layer, line in lines:
        layers.setdefault(line, []).append(layer)
    for line, at in layers.items():
        numbers = [layer for layer in at if layer is not None]
        place = f"layers[{ranges_text(numbers)}]" if numbers else "outside the layers"
        yield (f"{place} x{len(at)}" if len(at) > 1 else place), line
