"""CacheKV: attention reads a paged cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dgraph.errors import PassError
from dgraph.graph import Graph
from dgraph.nodes import args_of, where
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.shapes import InputSpec

PAGE_TABLE = InputSpec("page_table", torch.int32, ("b", "P"))


@dataclass(frozen=True)
class CacheKV(Pass):
    """Write each layer's keys (after RoPE) and values to a paged cache, and let attention read the cache.

    New inputs: `page_table` i32[b, P] and, per layer l, `k_cache_l` and `v_cache_l` [pages, page, KV heads, head_dim].

        before  %9 = dgraph.packed_attention(%6, %7, %8, positions, cu_rows, limit, 0.18)      f32[N, 8, 32]
        after   dgraph.kv_write(%7, %8, k_cache, v_cache, positions, page_table, cu_rows)
                %9 = dgraph.paged_attention(%6, k_cache, v_cache, page_table, cu_rows, limit, 0.18)

    A step that holds every row whose keys changed computes what it computed before: all rows are written before any is
    read, so a row sees what it saw, and rows that are no longer recomputed are seen as they were last written.

    Reassociates: attention over pages may sum its keys in another order.
    """

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    summary: ClassVar[str] = "attention reads a paged KV cache; only uncached rows are recomputed"
    signature: ClassVar[frozenset[str]] = frozenset({"page_table", "k_cache_*", "v_cache_*"})

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("attention"):
            report.skip("attention over a padded batch; run PackRows first", node)
        for node in graph.find("packed_attention"):
            layer = node.meta["layer"]
            if layer is None:
                report.skip("an attention outside the layers has no cache", node)
                continue
            if f"k_cache_{layer}" in graph.inputs:
                raise PassError(f"{where(node)}: a second attention in the layer; it cannot share the other's cache.")
            q, k, v, positions, cu_rows, limit, scale = args_of(node)
            heads, dim = (int(s) for s in k.meta["val"].shape[1:])
            shape = ("pages", "page", heads, dim)
            table = graph.add_input(PAGE_TABLE)
            dtype = k.meta["val"].dtype
            k_cache, v_cache = (graph.add_input(InputSpec(f"{n}_cache_{layer}", dtype, shape)) for n in "kv")
            write = (k, v, k_cache, v_cache, positions, table, cu_rows)
            graph.call(OPS["kv_write"], write, before=node, by=report.name)
            read = (q, k_cache, v_cache, table, cu_rows, limit, scale)
            graph.replace(node, graph.call(OPS["paged_attention"], read, before=node, by=report.name))
            report.did("packed_attention -> kv_write, paged_attention", layer)
