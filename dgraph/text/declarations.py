"""Declarations that two graphs differ in: model, passes, inputs, outputs, weights, row sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dgraph.ir.graph import Graph
from dgraph.text.align import without_rows
from dgraph.text.listing import Listing
from dgraph.text.notation import fold_names, input_type
from dgraph.text.writer import symbols, wrapped
from dgraph.types.shapes import is_row_set


@dataclass(frozen=True)
class Names:
    """Declarations that only one of the graphs has, folded over layers."""

    removed: tuple[str, ...]
    added: tuple[str, ...]

    @classmethod
    def of(cls, before: Mapping[str, str], after: Mapping[str, str]) -> Names:
        """From names with their types; another row set is not another type."""
        old, new = ({name: without_rows(kind) for name, kind in kinds.items()} for kinds in (before, after))
        return cls(
            tuple(fold_names({k: v for k, v in before.items() if new.get(k) != old[k]})),
            tuple(fold_names({k: v for k, v in after.items() if old.get(k) != new[k]})),
        )

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)

    def lines(self, title: str) -> list[str]:
        """As text after a title: removed names, then added ones."""
        out: list[str] = []
        for mark, names in (("-", self.removed), ("+", self.added)):
            if names:
                out += wrapped("" if out else title, [f"{mark} {names[0]}", *names[1:]])
        return out


def declarations(old: Listing, new: Listing) -> dict[str, Names]:
    """Declarations that only one of two graphs has, by kind."""
    a, b = old.graph, new.graph
    return {
        "model": Names.of(_facts(a), _facts(b)),
        "passes": Names(*_only(a.history, b.history)),
        "inputs": Names.of(
            {s.name: input_type(s) for s in a.inputs.values()}, {s.name: input_type(s) for s in b.inputs.values()}
        ),
        "outputs": Names.of(
            {n: a.type_text(a.result(n)) for n in a.outputs}, {n: b.type_text(b.result(n)) for n in b.outputs}
        ),
        "weights": Names.of(_weights(a), _weights(b)),
        "row sets": Names.of(_row_sets(old), _row_sets(new)),
    }


def _facts(graph: Graph) -> dict[str, str]:
    return {f"{name}:": str(value) for name, value in graph.spec.to_json().items()}


def _only(a: Sequence[str], b: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(x for x in a if x not in b), tuple(x for x in b if x not in a)


def _weights(graph: Graph) -> dict[str, str]:
    return {name: graph.type_text(node) for name, node in graph.weight_nodes().items()}


def _row_sets(found: Listing) -> dict[str, str]:
    return {name: f"= {meaning}" for name, meaning in symbols(found) if is_row_set(name)}
