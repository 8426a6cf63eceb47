"""Runs passes in the order given, verifies the graph after each, and reports what each did.

torch's own pass manager reorders passes and swallows their errors; here nothing is reordered and nothing is hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from dgraph.errors import DgraphError, PassError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.ir.readonly import read_only
from dgraph.ir.verifier import Signature, verify
from dgraph.ops import op_of
from dgraph.passes.base import Pass, Report
from dgraph.types.nodes import ancestors


def run_passes(
    graph: Graph,
    passes: Iterable[Pass],
    optional: frozenset[str] = frozenset(),
    observer: Callable[[Pass, Graph], None] | None = None,
) -> list[Report]:
    """Apply passes to a graph in place.

    Args:
        graph: rewritten in place; the caller keeps a copy if it wants the state before.
        passes: applied in this order.
        optional: names of passes that may apply nowhere.
        observer: called with each pass and the verified graph after it.

    Returns:
        One report per pass, in order.

    Raises:
        PassError: a pass that is not optional applied nowhere; the message lists the near misses. Or it rewrote the
            graph and reported nothing.
        VerifyError: a pass broke a rule, or wrote a weight in place, which holds its own bits again.

        Any other error of a pass is raised with a note that names the pass.
    """
    reports = []
    for step in passes:
        report = Report(step.name, repr(step), step.effect)
        before, written, calls = Signature.of(graph), _computed(graph), graph.calls
        start = time.perf_counter()
        try:
            with read_only(_weights(graph), step.name, ahead=_from_outside(step)):
                step.run(graph, report)
        except DgraphError as error:
            if str(error).startswith(f"{step.name}:"):
                raise
            kind = PassError if isinstance(error, UnknownName) else type(error)  # that one takes no message
            raise kind(f"{step.name}: {error}") from error
        except Exception as error:
            error.add_note(f"It was raised while the pass {step!r} ran.")
            raise
        rewritten = time.perf_counter()
        if not report.applied and _computed(graph) != written:
            raise PassError(_reported_nothing(report))
        if not report.applied and step.name not in optional:
            raise PassError(_applied_nowhere(report))
        graph.history += (repr(step),)
        verify(graph, step.name, before, step.signature, step.changes_weights)
        now = graph.calls
        report.nodes = (len(calls), len(now))
        report.made, report.removed = len(set(now) - set(calls)), len(set(calls) - set(now))
        report.inputs = tuple(spec for name, spec in graph.inputs.items() if spec not in before.inputs)
        report.seconds = (rewritten - start, time.perf_counter() - rewritten)
        reports.append(report)
        if observer is not None:
            observer(step, graph)
    return reports


def _weights(graph: Graph) -> dict[str, Tensor]:
    """Every tensor that a pass finds in a graph, by name; without those that only stand for one."""
    tensors = {**graph.tensors, **graph.own}
    for name, low_rank in () if graph.adapter is None else graph.adapter.weights.items():
        tensors |= {f"{name} of the adapter ({part})": getattr(low_rank, part) for part in ("down", "up")}
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}


def _from_outside(step: Pass) -> bool:
    """Say whether another package brings a pass."""
    return type(step).__module__.partition(".")[0] != __name__.partition(".")[0]


def _computed(graph: Graph) -> list[Any]:
    """The computation of a graph, to be compared within this process; calls that nothing reads are no part of it."""
    writes = [node for node in graph.calls if (op := op_of(node.target)) is not None and op.mutates]
    live = ancestors([*writes, *(node for node in graph.fx.nodes if node.op == "output")])
    return [graph.outputs, *((n, n.target, n.args, n.kwargs) for n in graph.fx.nodes if n in live)]


def _reported_nothing(report: Report) -> str:
    return (
        f"{report.config} changed the graph, but reported nothing. Call report.did(what, layer) at each place where it "
        f"rewrites, and leave the graph as it is where it only calls report.skip."
    )


def _applied_nowhere(report: Report) -> str:
    misses = "".join(f"\n  near miss at {s.node}: {s.reason}" for s in report.skipped)
    return (
        f"{report.config} applied nowhere.{misses or ' Nothing in the graph came close to what it looks for.'}\n"
        f"  Remove it from the recipe, run it after the pass that makes its pattern, or mark it optional."
    )
