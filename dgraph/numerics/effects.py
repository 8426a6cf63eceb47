"""Checks of declared effects (`Effect`): a graph is run before and after each pass on small inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from torch import Tensor

from dgraph.compiler.phases import rewrite
from dgraph.errors import InputError, PassError
from dgraph.ir.graph import Graph
from dgraph.numerics.parting import Difference, aligned, difference, first_parting
from dgraph.numerics.run import Run, run
from dgraph.numerics.steps import SmallStep, State, reads_choice, small_steps
from dgraph.ops.lm_head.lm_head import decode_logits
from dgraph.passes.base import Effect, Pass, Report
from dgraph.recipes import Phase, Recipe


@dataclass(frozen=True)
class _Result:
    """An output or a cache after a step, and the number of each of its rows in the step (None: all in order)."""

    value: Tensor
    numbers: Tensor | None = None


_Results = Mapping[str, _Result]


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
    phases = rewrite(captured, replace(recipe, phases=tuple(map(_identities, recipe.phases))))
    chooser = phases["select"].graph if "select" in phases else None
    steps = {prompts: small_steps(captured.spec, captured.device, prompts) for prompts in (False, True)}
    kinds = {prompts: _Small(made, chooser) for prompts, made in steps.items()}
    checked: set[tuple[Graph, Graph, bool]] = set()
    for name, phase in phases.items():
        prompts = name == "prefill" and "encoded" in captured.inputs  # else such steps are no others
        before = captured
        for report, after in zip(phase.reports, phase.snapshots, strict=True):
            if (before, after, prompts) not in checked:  # phases share their first passes
                kinds[prompts].check(report, before, after)
                checked.add((before, after, prompts))
            before = after


def _identities(phase: Phase) -> Phase:
    return replace(phase, passes=tuple(map(_identity, phase.passes)))


def _identity(step: Pass) -> Pass:
    found = step.identity()
    if found is None:
        raise PassError(
            f"{step!r} declares {step.effect.value}, but no setting at which it changes nothing, so that it cannot be "
            f"checked. Give its class a method `identity` that returns one, as replace(self, share=1.0)."
        )
    return found


def _results(made: Run) -> _Results:
    """The outputs and caches of a run; caches are copied, since the next step writes them."""
    graph = made.graph
    found = {name: _Result(made.flat(node), made.numbers(node)) for name, node in graph.results().items()}
    caches = (spec.name for spec in graph.inputs.values() if spec.in_place)
    return found | {name: _Result(made.inputs[name].clone()) for name in caches}


@dataclass
class _Small:
    """Graphs on small steps.

    Attributes:
        steps: in order.
        chooser: the program that chooses keys for a graph that reads chosen keys; it runs on steps with all rows.
    """

    steps: Sequence[SmallStep]
    chooser: Graph | None
    results: dict[Graph, list[_Results | None]] = field(default_factory=dict)

    def check(self, report: Report, before: Graph, after: Graph) -> None:
        """Compare a graph with what a pass made of it.

        Raises:
            PassError: see `check_effects`.
        """
        tolerance = 0.0 if report.effect is Effect.EXACT else None
        pairs = zip(self.steps, self._results_of(before), self._results_of(after), strict=True)
        ran = [(n, step, was, now) for n, (step, was, now) in enumerate(pairs) if was is not None and now is not None]
        compared = 0
        for number, step, was, now in ran:
            for name, (a, b) in _common(was, now, step, before.spec.mask_id).items():
                compared += 1
                found = difference(aligned(a.value, b.value, a.numbers, b.numbers), tolerance)
                if found is not None:
                    runs = [next(islice(self._runs(graph, number), number, None)) for graph in (before, after)]
                    raise PassError(_message(report, f"{name} of step {number + 1}", found, runs, tolerance))
        if not compared:
            raise PassError(
                f"{report.config} declares {report.effect.value}, but leaves no output or cache that was there before, "
                f"so that it cannot be checked."
            )

    def _results_of(self, graph: Graph) -> list[_Results | None]:
        if graph not in self.results:
            self.results[graph] = [None if made is None else _results(made) for made in self._runs(graph)]
        return self.results[graph]

    def _runs(self, graph: Graph, keep: int | None = None) -> Iterator[Run | None]:
        """A graph on each step, with its caches from step to step; None where it cannot run. keep: the step of which
        the values of all nodes are kept.
        """
        state, reads = State(), reads_choice(graph)
        for number, step in enumerate(self.steps):
            ran = self.chooser if reads and step.whole else graph
            inputs = None if ran is None else state.inputs(ran, step)
            if ran is None or inputs is None:
                yield None
                continue
            made = run(ran, inputs, keep=number == keep)
            state.take(ran, {name: made.values[node] for name, node in ran.results().items()})
            yield made if ran is graph else None


def _common(was: _Results, now: _Results, step: SmallStep, mask_id: int) -> dict[str, tuple[_Result, _Result]]:
    """Results by name, before and after; of logits before decisions, what they say of the rows that decide."""
    found = {name: (result, now[name]) for name, result in was.items() if name in now}
    if "logits" in was and "logits" not in now:
        candidates = step.values["candidate"].nonzero()[:, 0]
        logits, rows = aligned(was["logits"].value, candidates, was["logits"].numbers, candidates)
        said = decode_logits(logits, step.values["temperature"][rows], step.values["seed"][rows], mask_id)
        for name, value in said._asdict().items():
            if name in now:
                found[name] = _Result(value, rows), now[name]
    return found


def _message(report: Report, name: str, found: Difference, runs: Sequence[Run | None], tolerance: float | None) -> str:
    demands = {
        Effect.EXACT: "the same bits",
        Effect.REASSOCIATES: "the same values but for rounding",
        Effect.APPROXIMATE: "the same values but for rounding at this setting, its identity",
    }[report.effect]
    before, after = runs
    parts = None if before is None or after is None else first_parting(before, after, tolerance)
    first = f"The first node that parts is in {parts}." if parts else "All nodes that both graphs have are alike."
    declared = f"{report.config} declares {report.effect.value}, {demands}"
    return f"{declared}, but {name} differs on small inputs: {found}. {first}"
