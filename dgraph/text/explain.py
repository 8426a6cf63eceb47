"""Explanation of a recipe on a model: each pass and where it applied, the stages, and the regions to compile.

Nothing is compiled for an explanation: passes and schedule are enough.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.peephole import Fusion
from dgraph.lowering.regions import region_text
from dgraph.lowering.schedule import Call, Region, Stage, schedule
from dgraph.passes.base import Report
from dgraph.recipes import Recipe
from dgraph.text.columns import table
from dgraph.text.notation import ranges_text
from dgraph.types.card import Card, Described, counted
from dgraph.types.nodes import is_view, op_name


class Phase(Protocol):
    """A phase after its passes: `dgraph.compiler.phases.Rewritten`."""

    @property
    def graph(self) -> Graph:
        """The final graph."""
        ...

    @property
    def reports(self) -> tuple[Report, ...]:
        """One per pass."""
        ...


@dataclass(frozen=True)
class RegionKind:
    """Regions with equal text; one function serves them all.

    Attributes:
        name: "A", "B", ...
        ops: number of occurrences by op.
        uses: number of regions.
        compiled: True if Inductor compiles it; a single op runs as it is.
    """

    name: str
    ops: dict[str, int]
    uses: int
    compiled: bool


@dataclass(frozen=True)
class StageUse:
    """A stage: its name, its row set, how often each kind of region and each opaque call occurs, and how it ends.

    cut is the call that makes the next stage's rows, "" in the last stage.
    """

    name: str
    rows: str
    regions: dict[str, int]
    calls: dict[str, int]
    cut: str


@dataclass(frozen=True, repr=False)
class Explanation(Described):
    """Explanation of a recipe on a model; prints as text.

    Attributes:
        recipe: as a value.
        buckets: padding of row counts.
        reports: per phase, one per pass.
        stages: per phase, in order.
        regions: the distinct regions of all phases.
    """

    recipe: Recipe
    buckets: Buckets
    reports: dict[str, tuple[Report, ...]]
    stages: dict[str, tuple[StageUse, ...]]
    regions: tuple[RegionKind, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "recipe": self.recipe.to_json(),
            "buckets": self.buckets.to_json(),
            "phases": [
                {
                    "phase": name,
                    "passes": [r.to_json() for r in reports],
                    "stages": [
                        {"stage": s.name, "rows": s.rows, "regions": s.regions, "calls": s.calls, "cut": s.cut or None}
                        for s in self.stages[name]
                    ],
                }
                for name, reports in self.reports.items()
            ],
            "regions": [{"region": r.name, "ops": r.ops, "uses": r.uses, "compiled": r.compiled} for r in self.regions],
        }

    def card(self) -> Card:
        """See `Described`."""
        phases = (
            (name, f"{' > '.join(r.name for r in self.reports[name])}; rows {' -> '.join(s.rows for s in stages)}")
            for name, stages in self.stages.items()
        )
        kinds = counted(len(self.regions), "kind")
        regions = f"{sum(r.uses for r in self.regions)} of {kinds}, {sum(r.compiled for r in self.regions)} to compile"
        facts = (*phases, ("regions", regions), ("use", "print(explanation)"))
        return Card(f"Explanation of recipe {self.recipe.name}", facts, str(self))

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The explanation; width: letters of a line at most, as far as tables go, None for any number."""
        out = [
            f"recipe    {self.recipe.name}, block_cache={self.recipe.block_cache!r}, recommit={self.recipe.recommit}",
            f"buckets   {_buckets_text(self.buckets)}",
        ]
        for name, reports in self.reports.items():
            out += ["", f"phase {name}"]
            rows = [row for r in reports for row in _pass_rows(r)]
            out += table(("pass", "effect", "calls", "", "ms", "applied"), rows, width=width)
            stages = [_stage_row(stage) for stage in self.stages[name]]
            out += ["", *table(("stage", "rows", "regions", "opaque calls"), stages, width=width)]
        uses, compiled = sum(r.uses for r in self.regions), [r for r in self.regions if r.compiled]
        out += ["", f"regions   {uses} of {len(self.regions)} kinds, {len(compiled)} to compile"]
        rows = [(r.name, f"x{r.uses}", "" if r.compiled else "runs as it is", _times(r.ops)) for r in self.regions]
        out += table(("kind", "uses", "", "ops"), rows, width=width)
        return "\n".join(out) + "\n"


def explain(phases: Mapping[str, Phase], recipe: Recipe, buckets: Buckets | None = None) -> Explanation:
    """Explain what a recipe makes of a model.

    Args:
        phases: result of `dgraph.rewrite` for the recipe.
        recipe: the recipe.
        buckets: buckets of the row counts; None for exact ones.

    Raises:
        LoweringError: a phase cannot be cut into stages.
    """
    kinds: dict[str, Region] = {}
    uses: Counter[str] = Counter()
    stages = {}
    for name, phase in phases.items():
        found = []
        for stage in schedule(phase.graph):
            texts = [region_text(phase.graph, step) for step in stage.steps if isinstance(step, Region)]
            kinds |= {t: r for t, r in zip(texts, _regions(stage), strict=True) if t not in kinds}
            uses.update(texts)
            names = [_letters(list(kinds).index(t)) for t in texts]
            found.append(StageUse(stage.name, stage.rows, dict(Counter(names)), _calls(stage), _cut(stage)))
        stages[name] = tuple(found)
    regions = tuple(_kind(_letters(i), region, uses[text]) for i, (text, region) in enumerate(kinds.items()))
    return Explanation(recipe, buckets or Buckets(), {n: p.reports for n, p in phases.items()}, stages, regions)


def _buckets_text(buckets: Buckets) -> str:
    if buckets.kind == "exact":
        return "exact: a stage runs on as many rows as there are"
    examples = ", ".join(f"{rows} to {buckets(rows)}" for rows in (10, 100, 1000))
    return f"{buckets.to_json()}: row counts are padded, {examples}"


def _regions(stage: Stage) -> list[Region]:
    return [step for step in stage.steps if isinstance(step, Region)]


def _calls(stage: Stage) -> dict[str, int]:
    return dict(Counter(_call(step) for step in stage.steps if not isinstance(step, Region)))


def _call(step: Call | Fusion) -> str:
    if isinstance(step, Call):
        return op_name(step.node.target)
    return " + ".join(op_name(node.target) for node in step.nodes if not is_view(node))


def _cut(stage: Stage) -> str:
    return "" if stage.cut is None else op_name(stage.cut.node.target)


def _kind(name: str, region: Region, uses: int) -> RegionKind:
    ops = Counter(op_name(n.target) for n in region.nodes if n.target is not operator.getitem)
    return RegionKind(name, dict(ops), uses, ops.total() > 1)


def _letters(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    return (_letters(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def _times(counts: Mapping[str, int]) -> str:
    return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in counts.items()) or "-"


def _stage_row(stage: StageUse) -> tuple[str, ...]:
    calls = _times(stage.calls) + (f"; cut by {stage.cut}" if stage.cut else "")
    return stage.name, stage.rows, _times(stage.regions), calls


def _pass_rows(report: Report) -> list[tuple[str, ...]]:
    """A pass in a table: where it applied and, below, where not and why, and the memory of its inputs."""
    done = [_where(what, layers) for what, layers in _by_layers([(a.what, a.layer) for a in report.applied])]
    missed = [
        f"not: {_where(reason, layers)}" for reason, layers in _by_layers([(s.reason, s.layer) for s in report.skipped])
    ]
    calls, ms = f"{report.nodes[0]} -> {report.nodes[1]}", f"{1000 * sum(report.seconds):.0f}"
    changes = f"+{report.made} -{report.removed}"
    memory = ", ".join(f"{size:,} B per {unit}" for unit, size in report.memory.items())
    first, *others = [*(done or ["nowhere"]), *missed, *([f"new inputs: {memory}"] if memory else [])]
    top = (report.name, report.effect.value, calls, changes, ms, first)
    return [top, *(("", "", "", "", "", other) for other in others)]


def _by_layers(places: Sequence[tuple[str, int | None]]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for what, layer in places:
        found.setdefault(what, []).extend([] if layer is None else [layer])
    return list(found.items())


def _where(what: str, layers: Sequence[int]) -> str:
    return f"{what} in layer{'s' if len(set(layers)) > 1 else ''} {ranges_text(layers)}" if layers else what
