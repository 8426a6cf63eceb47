"""Runs passes in the order given, verifies the graph after each, and reports what each did.

torch's own pass manager reorders passes and swallows their errors; here nothing is reordered and nothing is hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from dgraph.errors import DgraphError, PassError, UnknownName
from dgraph.graph import Graph
from dgraph.passes.base import Pass, Report
from dgraph.verify import Signature, verify


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
        PassError: a pass that is not optional applied nowhere; the message lists the near misses.
        VerifyError: a pass broke a rule.

        What else a pass raises is raised with a note that names it.
    """
    reports = []
    for step in passes:
        report = Report(step.name, repr(step), step.effect)
        before, count, start = Signature.of(graph), len(graph.calls), time.perf_counter()
        try:
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
        if not report.applied and step.name not in optional:
            raise PassError(_applied_nowhere(report))
        graph.history += (repr(step),)
        verify(graph, step.name, before, step.signature, step.changes_weights)
        report.nodes = (count, len(graph.calls))
        report.seconds = (rewritten - start, time.perf_counter() - rewritten)
        reports.append(report)
        if observer is not None:
            observer(step, graph)
    return reports


def _applied_nowhere(report: Report) -> str:
    misses = "".join(f"\n  near miss at {s.node}: {s.reason}" for s in report.skipped)
    return (
        f"{report.config} applied nowhere.{misses or ' Nothing in the graph came close to what it looks for.'}\n"
        f"  Remove it from the recipe, run it after the pass that makes its pattern, or mark it optional."
    )
