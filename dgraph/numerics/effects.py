"""Checks of declared effects (`Effect`): a graph is run before and after each pass on small inputs."""

from __future__ import annotations

from dataclasses import replace

from dgraph.compiler.phases import rewrite
from dgraph.errors import InputError, PassError
from dgraph.ir.graph import Graph
from dgraph.numerics.run import run
from dgraph.numerics.small_runs import Beside, SmallRuns, rewrites, small_runs
from dgraph.passes.base import Effect, Pass, Report
from dgraph.recipes import Recipe


def check_effects(captured: Graph, recipe: Recipe) -> None:
    """Run the graph before and after each pass of a recipe on small inputs, and compare all results.

    Each pass runs at its identity (`Pass.identity`), where an APPROXIMATE one must change nothing. So every pass finds
    a graph that computes the model's function. EXACT must give the same bits, REASSOCIATES and the identity of an
    APPROXIMATE one values within `dgraph.numerics.TOLERANCES`. Outputs and caches that both graphs have are compared,
    and so are decisions with those that the logits give. The real weights are used; ops are computed by their
    references.

    Args:
        captured: the graph that the recipe starts from, on one process; left as it is.
        recipe: the recipe whose passes are checked.

    Raises:
        InputError: a graph that is divided over ranks.
        PassError: a pass breaks its declaration. The message names the pass, the declared effect, the output, the first
            node that differs with its layer, and the distance. Or an APPROXIMATE pass has no identity, or nothing that
            it leaves can be compared.
    """
    if captured.sharding is not None:
        raise InputError("passes are checked on one process: leave check (DGRAPH_CHECK) out, or the ranks.")
    phases = rewrite(captured, at_identity(recipe))
    small = small_runs(captured, phases)
    for name, report, before, after in rewrites(captured, phases):
        _check(small[name], report, before, after)


def at_identity(recipe: Recipe) -> Recipe:
    """The recipe with each pass at its identity (`Pass.identity`): it computes the model's function.

    Raises:
        PassError: an APPROXIMATE pass has no identity.
    """
    phases = (replace(phase, passes=tuple(map(_identity, phase.passes))) for phase in recipe.phases)
    return replace(recipe, phases=tuple(phases))


def _identity(step: Pass) -> Pass:
    found = step.identity()
    if found is None:
        raise PassError(
            f"{step!r} declares {step.effect.value}, but no setting at which it changes nothing, so that it cannot be "
            f"checked. Give its class a method `identity` that returns one, as replace(self, share=1.0)."
        )
    return found


def _check(small: SmallRuns, report: Report, before: Graph, after: Graph) -> None:
    """Compare a graph with what a pass made of it.

    Raises:
        PassError: see `check_effects`.
    """
    tolerance = 0.0 if report.effect is Effect.EXACT else None
    found = small.beside((before, run), (after, run), tolerance)
    if found.parted is not None:
        raise PassError(_message(report, found))
    if not found.compared:
        raise PassError(
            f"{report.config} declares {report.effect.value}, but leaves no output or cache that was there before, so "
            f"that it cannot be checked."
        )


def _message(report: Report, found: Beside) -> str:
    demands = {
        Effect.EXACT: "the same bits",
        Effect.REASSOCIATES: "the same values but for rounding",
        Effect.APPROXIMATE: "the same values but for rounding at this setting, its identity",
    }[report.effect]
    parts = found.parting
    first = f"The first node that parts is in {parts}." if parts else "All nodes that both graphs have are alike."
    declared = f"{report.config} declares {report.effect.value}, {demands}"
    return f"{declared}, but {found.where} differs on small inputs: {found.parted}. {first}"
