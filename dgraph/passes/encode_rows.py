"""EncodeRows: a program all of whose rows are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dgraph.ir.graph import Graph
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import viewed


def chosen_by_row(flags: Any, chosen: Any, other: Any) -> Any:
    """The pattern of what flags choose."""
    return torch.ops.aten.where.self(flags, chosen, other)


@dataclass(frozen=True)
class EncodeRows(Pass):
    """Keep only the computation of encoded rows, in a model whose input `encoded` bool[N] flags them.

    All rows of a prompt are encoded. So nothing is chosen by row, and the computation of denoised rows is left out.

        before  %4 = dgraph.rms_norm(%3, None, 1e-06)                  f32[N, 2816]
                %5 = where(%encoded_column, %2, %4)                    f32[N, 2816]
        after   (every reader of %5 reads %2)

    Exact for encoded rows. Inputs without readers are removed, `encoded` among them.
    """

    effect: ClassVar[Effect] = Effect.EXACT
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "all rows are encoded: what denoised rows do is left out (prefill)"
    signature: ClassVar[frozenset[str]] = frozenset({"encoded", "soft"})
    changes_weights: ClassVar[bool] = True

    def run(self, graph: Graph, report: Report) -> None:
        if "encoded" not in graph.inputs:
            report.skip("no row of this model says whether it is encoded", graph.output)
            return
        mode = graph.input("encoded")
        for match in report.matched(graph.match(chosen_by_row)):
            if viewed(match["flags"]) is not mode:
                report.skip(f"it chooses by {match['flags'].name}, not by which rows are encoded", match.root)
                continue
            report.did("where -> what encoded rows take", match.layer)
            match.replace(match["chosen"])
        graph.sweep()
        graph.propagate()
