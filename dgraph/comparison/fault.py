"""Result of a bisection, as values, text and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dgraph.comparison.pairing import Named
from dgraph.numerics.parting import Difference
from dgraph.text.columns import table
from dgraph.text.notation import ranges_text
from dgraph.types.card import Card, Described, counted


@dataclass(frozen=True)
class Check:
    """Results before and after a pass, or a stage of lowering.

    Attributes:
        phase: of the recipe.
        name, config: the pass, or the stage.
        effect: of the pass; "lowering" for a stage.
        compared: outputs and caches that both have, over all steps, up to the first that parts.
        farthest: the largest difference of one, as a share of its magnitudes.
    """

    phase: str
    name: str
    config: str
    effect: str
    compared: int
    farthest: float


@dataclass(frozen=True)
class Fault:
    """The first check that failed.

    Attributes:
        check: the check.
        where: the output or cache that parted, with its step.
        difference: its distance.
        node: the first value that parts, as a dump names it; None if all values that both have are alike.
        apart: its distance.
        made: values that the pass made; of a stage of lowering, those that it runs as one with the node.
    """

    check: Check
    where: str
    difference: Difference
    node: str | None
    apart: Difference | None
    made: tuple[Named, ...]

    def __str__(self) -> str:
        check = self.check
        out = [
            f"{check.config if check.effect != 'lowering' else check.name} ({check.effect}) is the first after which "
            f"results part, in phase {check.phase}.",
            f"  {self.where}: {self.difference}",
            f"  first node: {'all that both have are alike' if self.node is None else f'{self.node}: {self.apart}'}",
        ]
        title = "made" if check.effect != "lowering" else "runs as one"
        return "\n".join([*out, *(f"  {title}: {text}" for text in _by_layers(self.made))])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        apart = self.apart or self.difference
        return {
            "phase": self.check.phase,
            "name": self.check.name,
            "config": self.check.config,
            "effect": self.check.effect,
            "result": self.where,
            "node": self.node,
            "absolute": apart.most,
            "relative": apart.share,
            "cosine": apart.cosine,
            "made": [
                {"layer": n.ref.layer, "node": n.ref.name, "op": n.line.op, "role": n.line.role} for n in self.made
            ],
        }


def _by_layers(made: Sequence[Named]) -> Iterator[str]:
    """Numbers of calls by op, and the layers that have the same."""
    lines = {id(each.line): (each.ref.layer, each.line.op) for each in made}
    ops: dict[int | None, Counter[str]] = {}
    for layer, op in lines.values():
        ops.setdefault(layer, Counter())[op] += 1
    layers: dict[str, list[int | None]] = {}
    for layer, counts in ops.items():
        text = ", ".join(op if count == 1 else f"{op} x{count}" for op, count in counts.items())
        layers.setdefault(text, []).append(layer)
    for text, places in layers.items():
        inside = [layer for layer in places if layer is not None]
        where = [f"layers[{ranges_text(inside)}]"] * bool(inside) + ["outside the layers"] * (None in places)
        yield f"{text} in {' and '.join(where)}"


@dataclass(frozen=True, repr=False)
class Bisection(Described):
    """Checks of passes and stages of lowering, up to the first that failed; prints as text. True if one failed.

    Attributes:
        name: of model and recipe.
        as_set: True if passes ran as they are set, not at their identity.
        tolerance: as a share of the largest magnitude; None: by dtype.
        checks: in order.
        fault: of the last one; None if all passed.
    """

    name: str
    as_set: bool
    tolerance: float | None
    checks: tuple[Check, ...]
    fault: Fault | None = None

    def __bool__(self) -> bool:
        return self.fault is not None

    def card(self) -> Card:
        """See `Described`."""
        said = "no results part" if self.fault is None else f"parts after {self.fault.check.name}"
        facts = (("checks", f"{len(self.checks)}"), ("result", said), ("use", "print(bisection), .fault"))
        return Card(f"Bisection of {self.name}", facts, str(self))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "as_set": self.as_set,
            "tolerance": self.tolerance,
            "checks": [
                {
                    "phase": check.phase,
                    "name": check.name,
                    "config": check.config,
                    "effect": check.effect,
                    "compared": check.compared,
                    "farthest": check.farthest,
                }
                for check in self.checks
            ],
            "fault": None if self.fault is None else self.fault.to_json(),
        }

    def heading(self) -> str:
        """The line before the table."""
        set_ = "as set" if self.as_set else "at their identity"
        allowed = "the rounding of their dtype" if self.tolerance is None else f"{self.tolerance:g} of their magnitude"
        return f"{self.name}, passes {set_}: {counted(len(self.checks), 'check')}, results may lose {allowed}"

    def ending(self) -> str:
        """The lines after the table."""
        return "No results part." if self.fault is None else str(self.fault)

    def rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Titles and rows of the table."""
        failed = None if self.fault is None else self.fault.check
        return ("phase", "after", "effect", "results", "farthest", ""), [
            (
                check.phase,
                check.name,
                check.effect,
                str(check.compared),
                f"{check.farthest:.2g}",
                "parts" if check is failed else "",
            )
            for check in self.checks
        ]

    def __str__(self) -> str:
        return "\n\n".join([self.heading(), "\n".join(table(*self.rows(), indent="")), self.ending()]) + "\n"
