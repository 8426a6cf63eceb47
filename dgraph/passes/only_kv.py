"""OnlyKV: a forward that is run for its caches alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dgraph.ir.graph import Graph
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper


@dataclass(frozen=True)
class OnlyKV(Pass):
    """Drop the logits and all calls that only they need; the rest fills the KV cache (prefill).

        before  ... dgraph.kv_write(...)  %70 = dgraph.paged_attention(...)  ... %88 = linear(%87, lm_head.weight)
                return logits=%88
        after   ... dgraph.kv_write(...)
                return

    The last layer's attention, its feed-forward network, the final norm and the LM head go; from a model of one layer,
    the input `limit` goes too. Exact.
    """

    effect: ClassVar[Effect] = Effect.EXACT
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "drops everything after the last KV write (prefill)"
    signature: ClassVar[frozenset[str]] = frozenset({"logits", "limit"})
    changes_weights: ClassVar[bool] = True

    def run(self, graph: Graph, report: Report) -> None:
        writes = graph.find("kv_write")
        if not writes:
            report.skip("no kv_write in the graph; run CacheKV first", graph.output)
            return
        graph.set_outputs({})
        removed = graph.sweep()
        report.did(f"{removed} calls removed after the KV write of layer {writes[-1].meta['layer']}")
