"""AddRows: a step may have rows beside those of its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dgraph.ir.graph import ADDED, GAP, Graph
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import WINO, Paper


@dataclass(frozen=True)
class AddRows(Pass):
    """Let steps have rows beside those of their sequences: they see what is said, and no other row sees them.

    It serves plans that add rows (`RowPlan.added`), such as the shadow block of WINO. Run it after `CacheKV`, and
    before passes that leave out rows. See `Graph.add_rows`, which a pass of another method may call itself.

    New inputs: `added` bool[N] and `gap` i32[N, 2].

        before  dgraph.kv_write(%7, %8, k_cache, v_cache, positions, page_table, cu_rows)
                %9 = dgraph.paged_attention(%6, k_cache, v_cache, page_table, cu_rows, limit, 0.18)
        after   dgraph.kv_write(%7, %8, k_cache, v_cache, positions, page_table, cu_rows, None, None, added)
                %9 = dgraph.paged_attention(%6, ..., limit, 0.18, None, None, None, 0, gap, added, %7, %8)

    Reassociates: attention may sum its keys in another order. Rows of a sequence see what they saw before.
    """

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = (WINO,)
    summary: ClassVar[str] = "rows beside those of a sequence, which no other row sees (shadow blocks)"
    signature: ClassVar[frozenset[str]] = frozenset({ADDED.name, GAP.name})

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("attention"):
            report.skip("attention over a padded batch; run PackRows first", node)
        if not graph.find("attention"):
            for node in graph.add_rows(by=report.name):
                report.did("attention of added rows", node.meta["layer"])
