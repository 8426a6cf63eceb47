"""MeasureRows: the LM head computes the statistics of each row's distribution that a decoding rule reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from dgraph.errors import PassError
from dgraph.ir.graph import ADDED, Graph
from dgraph.ops import OPS
from dgraph.ops.statistics import CURRENT, Statistic, declare, kept_rows
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of
from dgraph.types.shapes import PAGE_TABLE, InputSpec

aten = torch.ops.aten

MEASURED = "measured"
STANDING = InputSpec("current", torch.int64, ("N",))
"""The token that stands at the position that a row predicts; see `dgraph.ops.statistics.RowLogits`."""


@dataclass(frozen=True)
class MeasureRows(Pass):
    """Let the chunked LM head also compute statistics of the rows whose logits it has.

    The graph's new output `measured` f32[K, S] has a column for each statistic. A statistic may store W numbers of a
    row from one step to the next. They lie in a paged cache `statistics_W` f32[pages, page, W], at the row's position
    (see `dgraph.ops.statistics.kept_rows`).

        before  %3 = dgraph.lm_head(%2, lm_head.weight, None, candidate, temperature, seed, 2048, 3)
                return token=%4, confidence=%5, margin=%6, entropy=%7
        after   %1 = dgraph.row_slots(positions, page_table, cu_rows, statistics_129)
                %3 = dgraph.lm_head_measured(%2, lm_head.weight, None, candidate, temperature, seed, 2048, 3, False,
                                             %1, current, statistics_129, 'KL(top=64)')
                return token=%4, confidence=%5, margin=%6, entropy=%7, measured=%8

    On ranks, each of which has the logits of its ids alone, `CURRENT` is the one statistic that dgraph::lm_head_part
    and dgraph::lm_head_combine give.

    It must be the last pass. `CompiledModel.generate` runs it where a policy asks for more than dgraph::lm_head gives.

    Attributes:
        statistics: in the order of the columns.
    """

    statistics: tuple[Statistic, ...] = ()

    effect: ClassVar[Effect] = Effect.EXACT
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "statistics of each row's distribution that a decoding rule asks for, without logits"
    signature: ClassVar[frozenset[str]] = frozenset({"page_table", "statistics_*", "current", MEASURED})

    def run(self, graph: Graph, report: Report) -> None:
        heads = graph.find("lm_head")
        if shares := graph.find("lm_head_part"):
            self._of_ranks(graph, shares[0], report)
            return
        if not heads:
            report.skip("no lm_head has the logits of a chunk; run ChunkLMHead first", graph.output)
            return
        head = heads[0]
        _, weight, _, candidate, *rest = args_of(head)
        state = graph.add_input(kept_rows(self.statistics, weight.meta["val"].shape[0]))
        rows = graph.input("positions"), graph.add_input(PAGE_TABLE), graph.input("cu_rows")
        # Before the layers, where the rows of the step are all there.
        slots = graph.call(OPS["row_slots"], (*rows, state), before=graph.calls[0], by=report.name, like=graph.output)
        if ADDED.name in graph.inputs:  # its position is another row's
            hidden = (slots, graph.input(ADDED.name), -1)
            slots = graph.call(aten.masked_fill.Scalar, hidden, before=slots.next, by=report.name, like=graph.output)
        slot = graph.on_rows_of(slots, candidate, report.name)
        graph.add_input(STANDING)
        standing = graph.on_rows_of(STANDING.name, candidate, report.name)
        packed = rest[4] if len(rest) > 4 else False
        args = (*args_of(head)[:8], packed, slot, standing, state, declare(self.statistics))
        measured = graph.call(OPS["lm_head_measured"], args, before=head, by=report.name, like=head)
        *old, new = graph.parts(measured, 5, report.name)
        for part in list(head.users):
            graph.replace(part, old[args_of(part)[1]])
        graph.set_outputs({**graph.results(), MEASURED: new})
        graph.sweep()
        report.did(", ".join(s.name for s in self.statistics))

    def _of_ranks(self, graph: Graph, share: Node, report: Report) -> None:
        """The same on ranks, each of which has the logits of its ids alone.

        Raises:
            PassError: another statistic than `CURRENT`.
        """
        if others := [s.name for s in self.statistics if s != CURRENT]:
            raise PassError(
                f"{', '.join(others)}: no rank of a sharded model has whole logits, which these statistics are "
                f"computed from. Decode by a rule that reads confidence, margin, entropy or current, or without tensor "
                f"parallelism."
            )
        graph.add_input(STANDING)
        args = args_of(share)[:11]
        share.args = (*args, graph.on_rows_of(STANDING.name, args[3], report.name))
        head = graph.find("lm_head_combine")[0]
        graph.set_outputs({**graph.results(), MEASURED: graph.parts(head, 5, report.name)[4]})
        report.did(CURRENT.name)

    def to_json(self) -> dict[str, Any]:
        """See `Pass.to_json`; a statistic stands there as its repr."""
        return {"pass": self.name, "statistics": [repr(s) for s in self.statistics]}
