"""Base class of passes, and the report that a pass writes.

A pass is a frozen dataclass. Its fields are its whole configuration. So `repr` is its history entry, its JSON is part
of the cache key, and equal passes have equal configurations.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch.fx import Node

from dgraph.errors import InputError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.ir.matching import Matches
from dgraph.plans.papers import Paper
from dgraph.spec import ModelSpec
from dgraph.types.nodes import where
from dgraph.types.shapes import InputSpec


class Effect(enum.Enum):
    """Effect of a pass on the numbers."""

    EXACT = "exact"
    """Bit for bit the same outputs."""
    REASSOCIATES = "reassociates"
    """The same mathematics in another order of operations; equal within rounding."""
    APPROXIMATE = "approximate"
    """Another function, equal only at the pass's lossless setting."""


@dataclass(frozen=True)
class Applied:
    """One place where a pass fired."""

    layer: int | None
    what: str


@dataclass(frozen=True)
class Skipped:
    """One near miss: a place that looked right and why it was left alone."""

    layer: int | None
    reason: str
    node: str


@dataclass
class Report:
    """Record of one pass over one graph.

    Attributes:
        name, config, effect: the pass.
        applied, skipped: places where it fired, and near misses.
        matches: number of matches of each pattern that it looked for, by name.
        nodes: number of calls before and after.
        made, removed: number of calls that it made, and of those that it removed.
        inputs: declarations of the run-time inputs that it added.
        seconds: host seconds of the rewrite and of its verification.
    """

    name: str
    config: str
    effect: Effect
    applied: list[Applied] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    matches: dict[str, int] = field(default_factory=dict)
    nodes: tuple[int, int] = (0, 0)
    made: int = 0
    removed: int = 0
    inputs: tuple[InputSpec, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)

    def did(self, what: str, layer: int | None = None) -> None:
        """Record that the pass fired in a layer (None: outside the layers)."""
        self.applied.append(Applied(layer, what))

    def skip(self, reason: str, node: Node) -> None:
        """Record a near miss at a node."""
        self.skipped.append(Skipped(node.meta.get("layer"), reason, where(node)))

    def matched(self, found: Matches, near: int | None = None) -> Matches:
        """Count the matches of a pattern, and give them back.

        Args:
            near: calls of the pattern that must stand in a miss for it to be recorded as a near miss; None for no miss.
        """
        name = found.pattern.name
        self.matches[name] = self.matches.get(name, 0) + len(found)
        for miss in found.misses:
            if near is not None and miss.found >= near:
                self.skip(str(miss), miss.root)
        return found

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of the new inputs by the unit that they are per: "position", "row", "sequence x P"."""
        found: dict[str, int] = {}
        for spec in self.inputs:
            sizes = [size for size in spec.shape[1:] if size != "page"]
            unit = " x ".join([spec.per, *(size for size in sizes if isinstance(size, str))])
            numbers = math.prod(size for size in sizes if isinstance(size, int))
            found[unit] = found.get(unit, 0) + numbers * spec.dtype.itemsize
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            "pass": self.name,
            "config": self.config,
            "effect": self.effect.value,
            "applied": [{"layer": a.layer, "what": a.what} for a in self.applied],
            "skipped": [{"layer": s.layer, "reason": s.reason, "node": s.node} for s in self.skipped],
            "matches": self.matches,
            "nodes_before": self.nodes[0],
            "nodes_after": self.nodes[1],
            "nodes_made": self.made,
            "nodes_removed": self.removed,
            "input_bytes": self.memory,
            "seconds": {"rewrite": self.seconds[0], "verify": self.seconds[1]},
        }


@dataclass(frozen=True)
class Pass:
    """Base of every pass.

    Subclasses are frozen dataclasses, state their `effect`, and implement `run`. A pass that adds, removes or renames
    run-time inputs or outputs lists their names in `signature`; one that replaces weights sets `changes_weights`. The
    verifier refuses a pass that changes anything that it does not declare here. `papers` are the publications that it
    implements. `carries` names values that its steps update by what changes in all keys, so that no
    key and no row may be dropped. `reuses` names what rows of a layer may take from an earlier step, as a saliency gate
    does. `evicts` is True if rows leave the program before its last layer.

        @dataclass(frozen=True)
        class Mine(Pass):
            share: float = 0.5

            effect = Effect.APPROXIMATE
            summary = "what it does, in a line"

            def identity(self) -> Mine:
                return replace(self, share=1.0)

    Raises:
        InputError: a subclass declares one of these as something else; see `check_pass` for what is left.
    """

    effect: ClassVar[Effect]
    summary: ClassVar[str]
    signature: ClassVar[frozenset[str]] = frozenset()
    changes_weights: ClassVar[bool] = False
    papers: ClassVar[tuple[Paper, ...]] = ()
    carries: ClassVar[str] = ""
    reuses: ClassVar[str] = ""
    evicts: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        for name, (kind, example) in _DECLARED.items():
            value = own.get(name)
            if name in own and not isinstance(value, (kind, property)):
                raise InputError(f"pass {cls.__name__}: {name} must be {example}, got {value!r}.")
            if name in own.get("__annotations__", {}) and "ClassVar" not in str(own["__annotations__"][name]):
                raise InputError(f"pass {cls.__name__}: {name} is no field; annotate it as ClassVar, or not.")
        if "__init__" in own:
            raise InputError(
                f"pass {cls.__name__}: its settings are the fields of a dataclass; write @dataclass(frozen=True) above "
                f"the class and a line as `share: float = 0.5` for each, and no __init__."
            )

    @property
    def name(self) -> str:
        """The pass's name: that of its class."""
        return type(self).__name__

    @staticmethod
    def obstacle(spec: ModelSpec) -> str:
        """Reason why it cannot be used with any graph of a model; "" if it can."""
        return ""

    def identity(self) -> Pass | None:
        """The pass at the setting at which it changes no result: bit for bit if it is EXACT, else within rounding.

        An APPROXIMATE pass declares it, and so does one with a setting that rounds. None: it has no such setting.
        """
        return None if self.effect is Effect.APPROXIMATE else self

    def run(self, graph: Graph, report: Report) -> None:
        """Rewrite the graph in place; record each place where the pass fired, and each near miss."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The pass's name and configuration as plain values."""
        return {"pass": self.name, **{f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.compare}}


_DECLARED: dict[str, tuple[type, str]] = {
    "effect": (Effect, "Effect.EXACT, Effect.REASSOCIATES or Effect.APPROXIMATE"),
    "summary": (str, "a text"),
    "signature": (frozenset, 'a frozenset of names, as frozenset({"kept"})'),
    "changes_weights": (bool, "True or False"),
    "papers": (tuple, "a tuple of dgraph.plans.papers.Paper"),
    "carries": (str, "a text"),
    "reuses": (str, "a text"),
    "evicts": (bool, "True or False"),
}
"""Declarations of the class of a pass, with their types and how to write them."""


def check_pass(step: object) -> None:
    """Refuse an object that is no pass, or a pass that is no value.

    Raises:
        InputError: naming the pass, and what to write.
    """
    if not isinstance(step, Pass):
        raise InputError(f"passes are objects of subclasses of dgraph.passes.Pass, as CacheKV(), got {step!r}.")
    missing = [name for name in ("effect", "summary") if not hasattr(step, name)]
    missing += ["run"] if type(step).run is Pass.run else []
    if missing:
        raise InputError(f"pass {step.name} must say its {' and its '.join(missing)}; see dgraph.passes.Pass.")
    if "__dataclass_params__" not in vars(type(step)):
        raise InputError(
            f"pass {step.name} must be a dataclass of its own, so that its settings are compared and shown; write "
            f"@dataclass(frozen=True) above class {type(step).__name__}."
        )
    for name in (f.name for f in fields(step) if f.compare):
        try:
            hash(getattr(step, name))
        except TypeError:
            raise InputError(
                f"pass {step.name}: {name} must be a value that never changes, as a tuple and no list, got "
                f"{getattr(step, name)!r}."
            ) from None


def pass_from_json(value: Mapping[str, Any], known: Mapping[str, type[Pass]]) -> Pass:
    """The pass that `Pass.to_json` described.

    Args:
        value: its name under "pass", and its fields.
        known: passes by name.

    Raises:
        UnknownName: an unknown pass or field.
        InputError: a field out of range.
    """
    options = {k: _from_plain(v) for k, v in value.items() if k != "pass"}
    name = str(value.get("pass"))
    if name not in known:
        raise UnknownName("pass", name, known)
    names = [f.name for f in fields(known[name])]
    for option in options:
        if option not in names:
            raise UnknownName(f"field of pass {name!r}", option, names)
    return known[name](**options)


def _plain(value: Any) -> Any:
    """JSON has no infinity, and lists for tuples; every other field is a plain value already."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return "inf" if value == float("inf") else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(each) for each in value)
    return float("inf") if value == "inf" else value
