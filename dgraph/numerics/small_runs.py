"""Runs of graphs on small steps, each in some way, and their results side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from dgraph.compiler.phases import Rewritten
from dgraph.ir.graph import Graph
from dgraph.numerics.parting import (
    STATISTICS,
    TOKENS,
    TOLERANCES,
    UNIT,
    Difference,
    Parting,
    Rounded,
    aligned,
    distance,
    first_parting,
)
from dgraph.numerics.run import Run, run
from dgraph.numerics.steps import SmallStep, State, reads_choice, small_steps
from dgraph.ops.lm_head.lm_head import decode_logits
from dgraph.passes.base import Report


class Way(Protocol):
    """A way to run a graph, as `dgraph.numerics.run` is one; hashable."""

    def __call__(self, graph: Graph, inputs: Mapping[str, Tensor], keep: bool = False) -> Run:
        """Run a graph; see `dgraph.numerics.run`."""
        ...


@dataclass(frozen=True)
class _Result:
    """An output or a cache after a step, and the number of each of its rows in the step (None: all in order)."""

    value: Tensor
    numbers: Tensor | None = None


_Results = Mapping[str, _Result]
Ran = tuple[Graph, Way]
"""A graph, and the way in which it is run."""


@dataclass(frozen=True)
class Beside:
    """Results of two runs side by side.

    Attributes:
        compared: results that both have, over all steps.
        farthest: the distance of the result that differs the most, as a share of its magnitudes; None without results.
        where: output or cache of the first result that parts, and its step; "" if none does.
        parted: its distance.
        parting: the first node that parts in that step; None if all nodes of both are alike.
    """

    compared: int
    farthest: Difference | None = None
    where: str = ""
    parted: Difference | None = None
    parting: Parting | None = None


@dataclass
class SmallRuns:
    """Runs of graphs on small steps, which are made once for each graph.

    Attributes:
        steps: in order.
        chooser: the program that chooses keys for a graph that reads chosen keys; it runs on steps with all rows.
    """

    steps: Sequence[SmallStep]
    chooser: Graph | None
    results: dict[Ran, list[_Results | None]] = field(default_factory=dict)

    def beside(self, before: Ran, after: Ran, tolerance: float | None, rounded: Rounded = ()) -> Beside:
        """Compare the results of two runs, up to the first that parts.

        Tokens are left out where numbers were rounded to 16 bits: rounding decides between likely ones.

        Args:
            before, after: what is run.
            tolerance, rounded: as for `first_parting`.
        """
        pairs = zip(self.steps, self._results_of(before), self._results_of(after), strict=True)
        ran = [(n, step, was, now) for n, (step, was, now) in enumerate(pairs) if was is not None and now is not None]
        coarse = any(TOLERANCES.get(dtype, 0.0) > TOLERANCES[torch.float32] for dtype in rounded)
        compared, farthest = 0, None
        for number, step, was, now in ran:
            for name, (a, b) in _common(was, now, step, before[0].spec.mask_id).items():
                if coarse and name in TOKENS:
                    continue
                compared += 1
                least = UNIT if rounded and name in STATISTICS else 0.0
                found = distance(aligned(a.value, b.value, a.numbers, b.numbers), tolerance, rounded, least)
                farthest = max((farthest or found, found), key=lambda each: each.share)
                if found.parts:
                    runs = [next(islice(self._runs(each, number), number, None)) for each in (before, after)]
                    first, second = (each for each in runs if each is not None)
                    parting = first_parting(first, second, tolerance, rounded=rounded)
                    return Beside(compared, farthest, f"{name} of step {number + 1}", found, parting)
        return Beside(compared, farthest)

    def _results_of(self, ran: Ran) -> list[_Results | None]:
        if ran not in self.results:
            self.results[ran] = [None if made is None else _results(made) for made in self._runs(ran)]
        return self.results[ran]

    def _runs(self, ran: Ran, keep: int | None = None) -> Iterator[Run | None]:
        """A graph on each step, with its caches from step to step; None where it cannot run. keep: the step of which
        the values of all nodes are kept.
        """
        graph, way = ran
        state, reads = State(), reads_choice(graph)
        for number, step in enumerate(self.steps):
            choosing = reads and step.whole
            chosen = self.chooser if choosing else graph
            inputs = None if chosen is None else state.inputs(chosen, step)
            if chosen is None or inputs is None:
                yield None
                continue
            made = (run if choosing else way)(chosen, inputs, keep=number == keep)
            state.take(chosen, {name: made.values[node] for name, node in chosen.results().items()})
            yield None if choosing else made


def small_runs(captured: Graph, phases: Mapping[str, Rewritten]) -> dict[str, SmallRuns]:
    """Runs for each phase of a captured graph; phases with the same steps share them."""
    chooser = phases["select"].graph if "select" in phases else None
    modes = {name: _encodes(captured, name) for name in phases}
    made = {mode: SmallRuns(small_steps(captured.spec, captured.device, mode), chooser) for mode in {*modes.values()}}
    return {name: made[mode] for name, mode in modes.items()}


def rewrites(captured: Graph, phases: Mapping[str, Rewritten]) -> Iterator[tuple[str, Report, Graph, Graph]]:
    """Every pass of some phases, once: the phase, its report, and the graph before and after it."""
    done: set[tuple[Graph, Graph, bool]] = set()
    for name, phase in phases.items():
        prompts, before = _encodes(captured, name), captured
        for report, after in zip(phase.reports, phase.snapshots, strict=True):
            if (before, after, prompts) not in done:  # phases share their first passes
                done.add((before, after, prompts))
                yield name, report, before, after
            before = after


def _encodes(captured: Graph, phase: str) -> bool:
    """True for the phase in which a model of two modes encodes prompts; its steps are others."""
    return phase == "prefill" and "encoded" in captured.inputs


def _results(made: Run) -> _Results:
    """The outputs and caches of a run; caches are copied, since the next step writes them."""
    graph = made.graph
    found = {name: _Result(made.flat(node), made.numbers(node)) for name, node in graph.results().items()}
    caches = (spec.name for spec in graph.inputs.values() if spec.in_place)
    return found | {name: _Result(made.inputs[name].clone()) for name in caches}


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
