"""SlotKV: keys of the rows that exist lie side by side in their pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dgraph.ir.graph import Graph
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of
from dgraph.types.shapes import InputSpec

SLOTS = InputSpec("slots", torch.int64, ("N",))


@dataclass(frozen=True)
class SlotKV(Pass):
    """Write each row's keys and values at its slot (input `slots`), no longer at its position.

    It serves plans whose region hides rows (`Region.seen`). The decode loop numbers the rows that exist, and `limit`
    counts them. So attention sees these rows alone, without a mask and without reading hidden keys. Rotary embeddings
    keep the positions. Run it right after `CacheKV`: passes that come later take the place of a row from there.

    New input: `slots` i64[N].

        before  dgraph.kv_write(%7, %8, k_cache, v_cache, positions, page_table, cu_rows)
        after   dgraph.kv_write(%7, %8, k_cache, v_cache, slots, page_table, cu_rows)

    Exact: where no row is hidden, slots are positions.
    """

    effect: ClassVar[Effect] = Effect.EXACT
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "hidden rows have no place in the KV cache; those that exist lie side by side"
    signature: ClassVar[frozenset[str]] = frozenset({"slots"})

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("packed_attention"):
            report.skip("this attention reads no cache; run CacheKV first", node)
        for write in graph.find("kv_write"):
            positions = args_of(write)[4]
            if positions is not graph.input("positions"):
                report.skip("its rows are a part of those of the step; run this pass right after CacheKV", write)
                continue
            write.replace_input_with(positions, graph.add_input(SLOTS))
            report.did("kv_write at slots", write.meta["layer"])
