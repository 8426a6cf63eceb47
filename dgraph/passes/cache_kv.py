"""CacheKV: attention reads a paged cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dgraph.errors import PassError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.ops.kv.scales import KV_DTYPES
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of, where
from dgraph.types.shapes import PAGE_TABLE as PAGE_TABLE
from dgraph.types.shapes import InputSpec, of_window, page_table


@dataclass(frozen=True)
class CacheKV(Pass):
    """Write each layer's keys (after RoPE) and values to a paged cache, and let attention read the cache.

    New inputs: `page_table` i32[b, P] and, per layer l, `k_cache_l` and `v_cache_l` [pages, page, KV heads, head_dim].

        before  %9 = dgraph.packed_attention(%6, %7, %8, positions, cu_rows, limit, 0.18)      f32[N, 8, 32]
        after   dgraph.kv_write(%7, %8, k_cache, v_cache, positions, page_table, cu_rows)
                %9 = dgraph.paged_attention(%6, k_cache, v_cache, page_table, cu_rows, limit, 0.18)

    A step that holds every row whose keys changed computes the same values as before. All rows are written before any
    is read, so a row sees the same keys. Rows that are no longer recomputed are seen as they were last written.

    With a `dtype`, keys and values are stored in that format, each vector of a position and a KV head over its scale.
    The scales lie in pools beside the caches: new inputs `k_scale_l` and `v_scale_l` f32[pages, page, KV heads]. Passes
    that come later take them along; the verifier refuses an op that cannot read this format.

        after   dgraph.kv_write(%7, %8, k_cache, v_cache, positions, page_table, cu_rows, k_scale, v_scale)
                %9 = dgraph.paged_attention(%6, k_cache, v_cache, page_table, cu_rows, limit, 0.18, k_scale, v_scale)

    Layers whose rows see a window of W positions keep their keys in pages of their own, of which a sequence has a few
    that its positions take in turn: inputs `page_table_W` i32[b, P_W] and caches [pages_W, page, KV heads, head_dim].

        after   dgraph.kv_write(%7, %8, k_cache, v_cache, positions, page_table_1024, cu_rows)
                %9 = dgraph.paged_attention(%6, k_cache, v_cache, page_table_1024, cu_rows, limit, 1.0, ..., 1024)

    Reassociates: attention over pages may sum its keys in another order. A dtype also rounds each vector, by what is in
    it alone.

    Attributes:
        dtype: "fp8" for float8_e4m3fn: about half of the memory of bf16, and of the bytes that attention reads. None
            for the dtype of the model.
        rings: True if keys behind a window give their place to later ones; False: they stay.
    """

    dtype: str | None = None
    rings: bool = True

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "attention reads a paged KV cache; only uncached rows are recomputed"
    signature: ClassVar[frozenset[str]] = frozenset(
        {"page_table", "page_table_*", "k_cache_*", "v_cache_*", "k_scale_*", "v_scale_*"}
    )

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in KV_DTYPES:
            raise UnknownName("dtype of keys and values", str(self.dtype), KV_DTYPES)

    def __repr__(self) -> str:
        said = [f"dtype={self.dtype!r}"] if self.dtype else []
        return f"CacheKV({', '.join(said + ([] if self.rings else ['rings=False']))})"

    def identity(self) -> CacheKV:
        """Without a dtype, which rounds."""
        return replace(self, dtype=None)

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
            q, k, v, positions, cu_rows, limit, scale, *window = args_of(node)
            heads, dim = (int(s) for s in k.meta["val"].shape[1:])
            of = window[-1] if window and self.rings else 0
            shape = (of_window("pages", of), "page", heads, dim)
            table = graph.add_input(page_table(of))
            dtype = KV_DTYPES[self.dtype] if self.dtype else k.meta["val"].dtype
            k_cache, v_cache = (graph.add_input(InputSpec(f"{n}_cache_{layer}", dtype, shape)) for n in "kv")
            scales = [
                graph.add_input(InputSpec(f"{n}_scale_{layer}", torch.float32, shape[:3], by_head=True))
                for n in "kv"
                if self.dtype
            ]
            write = (k, v, k_cache, v_cache, positions, table, cu_rows, *scales)
            graph.call(OPS["kv_write"], write, before=node, by=report.name)
            read = (q, k_cache, v_cache, table, cu_rows, limit, scale, *(scales or (None,) * len(window)), *window)
            graph.replace(node, graph.call(OPS["paged_attention"], read, before=node, by=report.name))
            report.did("packed_attention -> kv_write, paged_attention", layer)
