"""The phases of a recipe: one captured graph, rewritten for each."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dgraph.errors import PassError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.ir.linears import head_of
from dgraph.passes.adapt_drafts import AdaptDrafts
from dgraph.passes.base import Pass, Report
from dgraph.passes.fuse_glu import OPERANDS, FuseGLU
from dgraph.passes.manager import run_passes
from dgraph.passes.pack_rows import PackRows
from dgraph.passes.quantised_operands import QuantisedOperands
from dgraph.recipes import Phase, Recipe
from dgraph.types.nodes import args_of

DRAFTING = ("step", "select")
"""Phases whose rows may be drafts."""

HOPPER = (9, 0)
"""Compute capability of the GPUs for which products in 16 bits have a kernel as fast as the library's."""

# The passes that made a graph, in order, and whether each might apply nowhere: phases may differ in the latter.
Steps = tuple[tuple[Pass, bool], ...]

# What was derived from a captured graph, as long as that lives: recipes of one graph begin with the same passes.
_DERIVED: weakref.WeakKeyDictionary[Graph, dict[Steps, tuple[Graph, Report]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Rewritten:
    """One phase after its passes: those of the recipe, and those that lowering needs.

    Attributes:
        graph: the final graph, which is lowered as it is.
        reports: one per pass, in order.
        snapshots: the graph after each pass, in order, the final one included.
    """

    graph: Graph
    reports: tuple[Report, ...]
    snapshots: tuple[Graph, ...]

    def after(self, name: str) -> Graph:
        """The graph after the first pass of that name.

        Raises:
            UnknownName: the phase does not run it.
        """
        for report, snapshot in zip(self.reports, self.snapshots, strict=True):
            if report.name == name:
                return snapshot
        raise UnknownName("pass of this phase", name, [r.name for r in self.reports])


def lowering_passes(capability: tuple[int, int] | None) -> tuple[Pass, ...]:
    """The passes that prepare a graph for lowering; each may apply nowhere.

    Args:
        capability: compute capability of the GPU that runs the program; None for a CPU.
    """
    if capability is None:
        return (QuantisedOperands(),)
    return QuantisedOperands(live_rows=True), FuseGLU(OPERANDS if capability == HOPPER else ("quantised",))


def lowerable(graph: Graph) -> Graph:
    """A copy of a graph that no recipe made, after the passes that lowering needs on its device.

    Raises:
        VerifyError: a pass broke a rule.
    """
    graph, passes = graph.copy(), lowering_passes(_capability_of(graph.device))
    run_passes(graph, passes, frozenset(step.name for step in passes))
    return graph


def rewrite(graph: Graph, recipe: Recipe, lowering: Sequence[Pass] | None = None) -> dict[str, Rewritten]:
    """Derive every phase of a recipe from one captured graph, which is left as it is.

    Phases that begin with the same passes share their work (and the weights that these stack), and so do recipes of one
    graph. So neither that graph nor one that it gave may be changed after: change a copy.

    Steps of a model that drafts by an adapter run `AdaptDrafts` after PackRows, whatever the recipe.

    Args:
        graph: as captured.
        recipe: the recipe.
        lowering: passes after those of the recipe. A pass of them that finds nothing to do or to report leaves no
            trace. None: `lowering_passes` for the graph's device.

    Raises:
        PassError, VerifyError: a pass applied nowhere, or broke a rule.
    """
    last = lowering_passes(_capability_of(graph.device)) if lowering is None else tuple(lowering)
    phases = {}
    for phase in recipe.phases:
        passes = _adapted(phase) if graph.adapter is not None else phase.passes
        done: Steps = ()
        made: list[tuple[Graph, Report]] = []
        for step in passes:
            done += ((step, step.name in phase.optional),)
            made.append(_derived(graph, done))
        for step in last:
            derived, report = _derived(graph, (*done, (step, True)))
            if report.applied or report.skipped:
                done += ((step, True),)
                made.append((derived, report))
        reports, snapshots = tuple(report for _, report in made), tuple(derived for derived, _ in made)
        phases[phase.name] = Rewritten(snapshots[-1] if snapshots else graph, reports, snapshots)
    return phases


def _derived(graph: Graph, steps: Steps) -> tuple[Graph, Report]:
    """The graph after some passes, of which the last may not have run yet, and the report of that one."""
    known = _DERIVED.setdefault(graph, {})
    if steps not in known:
        step, optional = steps[-1]
        derived = (known[steps[:-1]][0] if len(steps) > 1 else graph).copy()
        (report,) = run_passes(derived, [step], frozenset({step.name} if optional else ()))
        known[steps] = derived, report
    return known[steps]


def _capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _adapted(phase: Phase) -> tuple[Pass, ...]:
    """The passes of a phase, and of one that drafts what its rows read of an adapter."""
    if phase.name not in DRAFTING:
        return phase.passes
    return tuple(p for step in phase.passes for p in ((step, AdaptDrafts()) if isinstance(step, PackRows) else (step,)))


def scoring(captured: Graph) -> Graph:
    """Graph of one forward of packed sequences without a cache, to score labels; ready to be lowered.

    Its outputs are `hidden` [N, d], which the LM head reads, its `weight` [vocabulary, d], and its `bias` if it has
    one. In a sharded graph no rank has all of that weight, so the output is `logits` [N, vocabulary].

    Raises:
        PassError: the logits come from something else than a linear layer.
    """
    graph = captured.copy()
    run_passes(graph, [PackRows()])
    if graph.sharding is None:
        head = head_of(graph)
        if isinstance(head, str):
            raise PassError(f"labels cannot be scored: {head}.")
        bias = {} if head.bias is None else {"bias": head.bias}
        graph.set_outputs({"hidden": head.x, "weight": head.weight} | bias)
        graph.sweep()
    return lowerable(graph)


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
