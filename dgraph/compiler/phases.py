"""The phases of a recipe: one captured graph, rewritten for each."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from dgraph.errors import PassError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.ir.linears import head_of
from dgraph.passes.adapt_drafts import AdaptDrafts
from dgraph.passes.base import Pass, Report
from dgraph.passes.manager import run_passes
from dgraph.passes.pack_rows import PackRows
from dgraph.recipes import Phase, Recipe
from dgraph.types.nodes import args_of

DRAFTING = ("step", "select")
"""Phases whose rows may be drafts."""

# The passes that made a graph, in order, and whether each might apply nowhere: phases may differ in the latter.
Steps = tuple[tuple[Pass, bool], ...]

# What was derived from a captured graph, as long as that lives: recipes of one graph begin with the same passes.
_DERIVED: weakref.WeakKeyDictionary[Graph, dict[Steps, tuple[Graph, list[Report]]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Rewritten:
    """One phase after its passes.

    Attributes:
        graph: the final graph.
        reports: one per pass, in order.
        snapshots: the graph after each pass, in order, the final one included.
    """

    graph: Graph
    reports: tuple[Report, ...]
    snapshots: tuple[Graph, ...]

    def after(self, name: str) -> Graph:
        """The graph after the pass of that name.

        Raises:
            UnknownName: the phase does not run it.
        """
        for report, snapshot in zip(self.reports, self.snapshots, strict=True):
            if report.name == name:
                return snapshot
        raise UnknownName("pass of this phase", name, [r.name for r in self.reports])


def rewrite(graph: Graph, recipe: Recipe) -> dict[str, Rewritten]:
    """Derive every phase of a recipe from one captured graph, which is left as it is.

    Phases that begin with the same passes share their work (and the weights that these stack), and so do recipes of one
    graph. So neither that graph nor one that it gave may be changed after: change a copy.

    Steps of a model that drafts by an adapter run `AdaptDrafts` after PackRows, whatever the recipe.

    Raises:
        PassError, VerifyError: a pass applied nowhere, or broke a rule.
    """
    done = _DERIVED.setdefault(graph, {})
    phases = {}
    for phase in recipe.phases:
        passes = _adapted(phase) if graph.adapter is not None else phase.passes
        steps = tuple((step, step.name in phase.optional) for step in passes)
        keys = [steps[: i + 1] for i in range(len(steps))]
        for key in keys:
            if key not in done:
                derived = (done[key[:-1]][0] if key[:-1] else graph).copy()
                done[key] = (derived, run_passes(derived, [key[-1][0]], phase.optional))
        reports = tuple(report for key in keys for report in done[key][1])
        snapshots = tuple(done[key][0] for key in keys)
        phases[phase.name] = Rewritten(snapshots[-1] if snapshots else graph, reports, snapshots)
    return phases


def _adapted(phase: Phase) -> tuple[Pass, ...]:
    """The passes of a phase, and of one that drafts what its rows read of an adapter."""
    if phase.name not in DRAFTING:
        return phase.passes
    return tuple(p for step in phase.passes for p in ((step, AdaptDrafts()) if isinstance(step, PackRows) else (step,)))


def scoring(captured: Graph) -> Graph:
    """Graph of one forward of packed sequences without a cache, to score labels.

    Its outputs are `hidden` [N, d], which the LM head reads, its `weight` [vocabulary, d], and its `bias` if it has
    one. In a sharded graph no rank has all of that weight, so the output is `logits` [N, vocabulary].

    Raises:
        PassError: the logits come from something else than a linear layer.
    """
    graph = rewrite(captured, Recipe("scoring", 1, (Phase("scoring", (PackRows(),)),)))["scoring"].graph.copy()
    if graph.sharding is not None:
        return graph
    head = head_of(graph)
    if isinstance(head, str):
        raise PassError(f"labels cannot be scored: {head}.")
    graph.set_outputs({"hidden": head.x, "weight": head.weight} | ({} if head.bias is None else {"bias": head.bias}))
    graph.sweep()
    return graph


def graph_of_phase(phases: Mapping[str, Rewritten], phase: str, after: str | None) -> Graph:
    """The graph at the end of a phase, or after one of its passes.

    Raises:
        UnknownName: no such phase or pass.
    """
    if phase not in phases:
        raise UnknownName("phase", phase, phases)
    return phases[phase].graph if after is None else phases[phase].after(after)


def routed_blocks(captured: Graph) -> frozenset[int]:
    """Lengths in positions of blocks whose rows share experts; empty if each row has its own."""
    return frozenset(args_of(node)[2] for node in captured.find("block_numbers"))
