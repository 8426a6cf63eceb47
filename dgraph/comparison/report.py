"""Report of a comparison: distances by step, layer and node, as values, text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgraph.comparison.pairing import Named
from dgraph.ir.graph import Graph
from dgraph.numerics.parting import Difference
from dgraph.text.columns import table
from dgraph.types.card import Card, Described, counted


@dataclass(frozen=True)
class NodeDifference:
    """A value of the second side beside the value of the first one that it stands for.

    Attributes:
        named: the value, as the second side's dump names it.
        difference: the distance of both; its `parts` says if they are apart.
    """

    named: Named
    difference: Difference

    @property
    def place(self) -> str:
        """The layer, or the words "outside the layers"."""
        return "outside the layers" if self.named.ref.layer is None else f"layers[{self.named.ref.layer}]"

    def __str__(self) -> str:
        by = f", made by {self.named.line.by}" if self.named.line.by else ""
        return f"{self.named}{by}: {measures(self.difference)}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        line, found = self.named.line, self.difference
        return {
            "layer": self.named.ref.layer,
            "node": self.named.ref.name,
            "op": line.op,
            "role": line.role,
            "by": line.by,
            "source": line.source,
            "absolute": found.most,
            "relative": found.share,
            "cosine": found.cosine,
            "parts": found.parts,
        }


@dataclass(frozen=True)
class TokenDifference:
    """A token that the first side commits, and the second would not.

    Attributes:
        sequence: index of the prompt.
        position: place of the token in prompt and response.
        tokens: of the first and of the second side; -1 where the second decides nothing, since it left the row out.
    """

    sequence: int
    position: int
    tokens: tuple[int, int]


@dataclass(frozen=True)
class StepDifference:
    """One forward of both sides.

    Attributes:
        name: "prompt", or "step 1", "step 2", ...
        programs: phases that the sides ran.
        rows: rows of each stage of either side.
        nodes: every value that both have, but tokens, in the order of the second side.
        decided: tokens that the first side commits in this step.
        tokens: those that the second side decides differently, or does not decide.
    """

    name: str
    programs: tuple[str, str]
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    nodes: tuple[NodeDifference, ...]
    decided: int = 0
    tokens: tuple[TokenDifference, ...] = ()

    @property
    def first(self) -> NodeDifference | None:
        """The first node whose values are apart."""
        return next((each for each in self.nodes if each.difference.parts), None)

    @property
    def farthest(self) -> NodeDifference | None:
        """The node whose values differ the most, as a share of their magnitudes."""
        return max(self.nodes, key=lambda each: each.difference.share, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; of nodes those that differ at all."""
        return {
            "step": self.name,
            "programs": list(self.programs),
            "rows": [list(rows) for rows in self.rows],
            "compared": len(self.nodes),
            "first": None if self.first is None else self.first.to_json(),
            "nodes": [each.to_json() for each in self.nodes if each.difference.most],
            "decided": self.decided,
            "tokens": [
                {"sequence": each.sequence, "position": each.position, "tokens": list(each.tokens)}
                for each in self.tokens
            ],
        }


@dataclass(frozen=True, repr=False)
class Comparison(Described):
    """Two sides on the same steps; prints as text. False if no values are apart, and no token is decided differently.

    Attributes:
        names: of the sides.
        tolerance: distance up to which values are not apart, as a share of their largest magnitude; None: by dtype,
            see `dgraph.numerics.TOLERANCES`.
        steps: in order.
        graphs: of the second side, by program.
    """

    names: tuple[str, str]
    tolerance: float | None
    steps: tuple[StepDifference, ...]
    graphs: Mapping[str, Graph]

    def __bool__(self) -> bool:
        return self.first is not None or self._others() > 0

    @property
    def first(self) -> tuple[StepDifference, NodeDifference] | None:
        """The first step with values that are apart, and the first node there."""
        return next(((step, step.first) for step in self.steps if step.first is not None), None)

    @property
    def decided(self) -> int:
        """Tokens that the first side commits."""
        return sum(step.decided for step in self.steps)

    @property
    def tokens(self) -> list[TokenDifference]:
        """Tokens that the second side decides differently, or does not decide."""
        return [each for step in self.steps for each in step.tokens]

    def card(self) -> Card:
        """See `Described`."""
        facts = (("first", self._first()), ("tokens", self._tokens()), ("use", "print(comparison), .first, .steps"))
        return Card(f"Comparison of {self.names[0]} with {self.names[1]}", facts, str(self))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found = self.first
        return {
            "from": self.names[0],
            "to": self.names[1],
            "tolerance": self.tolerance,
            "first": None if found is None else {"step": found[0].name, **found[1].to_json()},
            "tokens": {"decided": self.decided, "differently": self._others(), "left_out": self._left_out()},
            "layers": [
                {"place": place, "first": first, "step": step.name, **worst.to_json()}
                for place, first, step, worst in self._by_layer()
            ],
            "steps": [step.to_json() for step in self.steps],
        }

    def heading(self) -> str:
        """Lines before the tables: the sides, where they part, and the tokens."""
        allowed = "the rounding of its dtype" if self.tolerance is None else f"{self.tolerance:g} of its magnitude"
        title = f"{self.names[0]} -> {self.names[1]}: {counted(len(self.steps), 'forward')}, a value may lose {allowed}"
        return "\n".join((title, self._first(), *([self._tokens()] if self.decided else [])))

    def step_rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Titles and rows of a table of the steps."""
        titles = ("step", "program", "rows", "first node that parts", "absolute", "relative", "cosine", "tokens")
        return titles, [
            (
                step.name,
                " / ".join(dict.fromkeys(step.programs)),
                " / ".join(dict.fromkeys(" -> ".join(map(str, rows)) for rows in step.rows)),
                *_measured(step.first),
                f"{len(step.tokens)} of {step.decided}" if step.decided else "",
            )
            for step in self.steps
        ]

    def layer_rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Titles and rows of a table of the layers."""
        titles = ("place", "first parts in", "farthest in", "node", "absolute", "relative", "cosine")
        return titles, [
            (place, first or "-", *((step.name, *_measured(worst)) if worst.difference.most else _SAME))
            for place, first, step, worst in self._by_layer()
        ]

    def __str__(self) -> str:
        tables = (table(*each, indent="") for each in (self.step_rows(), self.layer_rows()))
        return "\n\n".join([self.heading(), *("\n".join(lines) for lines in tables)]) + "\n"

    def by_node(self) -> Iterator[tuple[str, Named, str, Difference]]:
        """Each value once for each program of the second side: where it differs the most, with that step."""
        worst: dict[tuple[str, Any], tuple[Named, str, Difference]] = {}
        for step in self.steps:
            for each in step.nodes:
                key = step.programs[1], each.named.ref
                if key not in worst or each.difference.share > worst[key][2].share:
                    worst[key] = each.named, step.name, each.difference
        for (program, _), found in worst.items():
            yield program, *found

    def _by_layer(self) -> list[tuple[str, str | None, StepDifference, NodeDifference]]:
        """By layer: its place, the step in which it parts first, and the node that is the farthest, with its step."""
        found: dict[int | None, list[tuple[StepDifference, NodeDifference]]] = {}
        for step in self.steps:
            for each in step.nodes:
                found.setdefault(each.named.ref.layer, []).append((step, each))
        order = sorted(found, key=lambda layer: (layer is None, layer or 0))
        rows = []
        for layer in order:
            step, worst = max(found[layer], key=lambda each: each[1].difference.share)
            first = next((step.name for step, each in found[layer] if each.difference.parts), None)
            rows.append((worst.place, first, step, worst))
        return rows

    def _first(self) -> str:
        if self.first is None:
            return "No values part."
        step, node = self.first
        return f"Values first part in {step.name} at {node}."

    def _others(self) -> int:
        return sum(each.tokens[1] >= 0 for each in self.tokens)

    def _left_out(self) -> int:
        return sum(each.tokens[1] < 0 for each in self.tokens)

    def _tokens(self) -> str:
        left = f", and {self._left_out()} not at all (their rows were left out)" if self._left_out() else ""
        return f"Tokens: the second side decides {self._others()} of {self.decided} differently{left}."


_SAME = ("-", "-", "0", "0", "1")
"""Cells of a layer in which all values are the same."""


def measures(found: Difference) -> str:
    """A distance in three numbers."""
    absolute, relative, cosine = numbers(found)
    return f"absolute {absolute}, relative {relative}, cosine {cosine}"


def numbers(found: Difference) -> tuple[str, str, str]:
    """A distance as texts: absolute, relative, cosine."""
    return f"{found.most:.3g}", f"{found.share:.2g}", f"{found.cosine:.6f}"


def _measured(each: NodeDifference | None) -> Sequence[str]:
    return ("-", "", "", "") if each is None else (str(each.named), *numbers(each.difference))
