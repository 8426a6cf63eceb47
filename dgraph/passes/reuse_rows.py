"""ReuseRows: dLLM-Cache, layers that run on the rows whose values have changed most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.ir.layers import Layer
from dgraph.ir.row_counts import SALIENT
from dgraph.ir.row_flags import FULL
from dgraph.ir.some_rows import RowLayer
from dgraph.passes import salience
from dgraph.passes.apart import take_apart
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import DLLM_CACHE, MASKKV, Paper
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of
from dgraph.types.shapes import InputSpec

ADAPT = InputSpec("adapt", torch.bool, ("N",))


@dataclass(frozen=True)
class ReuseRows(Pass):
    """Run each layer but the first on the rows whose values are least similar to the cached ones (dLLM-Cache).

    The other rows reuse the outputs of attention and feed-forward network from when these last ran on them.

    Values are projected for all rows, compared with those of the cache (by cosine, over all KV heads), and replace
    them. The `share` of each sequence's rows that have changed most get new queries, keys, attention and feed-forward
    network. So do the rows of the input `full` bool[N]. The addends of both networks to the residual stream are stored
    per position, and added for every row to the current stream. The first layer stays as it is. New inputs: `full`, and
    per layer l `a_cache_l` and `f_cache_l` [pages, page, hidden]. New output: `salient` i32[layers - 1], the number of
    rows that each layer after the first ran on. A row whose position has no page in the caches must be full; nothing of
    it is stored.

    With `idle`, a further input `adapt` bool[N] flags the rows that take part. Rows that are neither full nor adapt
    keep their cached values and outputs. This serves MaskKV (arXiv 2510.09309, A.9, algorithm 5), where the prompt
    alone is refreshed.

        before  %13 = linear(%1, self_attn.v_proj.weight)                                       f32[N, 32]
                dgraph.kv_write(%12, %14, k_cache, v_cache, positions, page_table, cu_rows)
                %15 = dgraph.paged_attention(%8, k_cache, v_cache, page_table, cu_rows, limit, 0.25)
                %18 = add(stream, %17)                                                          f32[N, 64]
        after   %4 = dgraph.least_similar(%3, v_cache, full, positions, page_table, cu_rows, 0.25)   bool[N]
                %5, %6 = dgraph.list_kept(%4, cu_rows)                                          (i64[N], i32[b+1])
                %7, %8, %9, %10 = dgraph.compact([%1, %3, positions, limit], %5)
                dgraph.kv_write(%16, %8, k_cache, v_cache, %9, page_table, %6)
                %17 = dgraph.paged_attention(%13, k_cache, v_cache, page_table, %6, %10, 0.25)
                %20 = dgraph.feature_merge(%19, %5, a_cache, positions, page_table, cu_rows)    f32[N, 64]
                %21 = add(stream, %20)                                                          f32[N, 64]

    A joint projection of queries, keys and values is split: queries with keys, and values, each over a view of the
    weight. Run it after CacheKV. Approximate; with a share of 1 every row is recomputed, and the program is the dense
    one.

    Attributes:
        share: of a sequence's rows that adapt, all but the full ones if none is idle, in [0, 1]; rounded down to whole
            rows. 0 reuses all of them.
        idle: True if some rows may neither be recomputed nor adapt.
    """

    share: float = 0.25
    idle: bool = False

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    papers: ClassVar[tuple[Paper, ...]] = (
        DLLM_CACHE.at("adaptive update of the response"),
        MASKKV.at("appendix A.9, algorithm 5"),
    )
    reuses: ClassVar[str] = "outputs of rows whose values have changed least"
    summary: ClassVar[str] = "layers run on the rows whose values have changed most (dLLM-Cache)"
    signature: ClassVar[frozenset[str]] = frozenset({FULL.name, ADAPT.name, SALIENT, "a_cache_*", "f_cache_*"})
    changes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.share) not in (int, float) or not 0 <= self.share <= 1:
            raise InputError(
                f"share must be a number from 0 (reuse all rows) to 1 (recompute all), got {self.share!r}."
            )
        if not isinstance(self.idle, bool):
            raise InputError(f"idle must be True or False, got {self.idle!r}.")

    @staticmethod
    def obstacle(spec: ModelSpec) -> str:
        """See `Pass.obstacle`."""
        if spec.noise == "uniform":
            return (
                "a step finds another canvas than the one before it: tokens are drawn anew, so what was computed for a "
                "row is of another token"
            )
        return ""

    def identity(self) -> ReuseRows:
        """See `Pass.identity`."""
        return replace(self, share=1.0)

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.find("attention") + graph.find("packed_attention"):
            report.skip("this attention reads no cache, so there is nothing to compare values with; run CacheKV", node)
        for node in [n for op in salience.UPDATED for n in graph.find(op)]:
            report.skip("this attention is updated by salient rows already", node)
        counted = []
        for attention in graph.find("paged_attention"):
            if attention.meta["layer"] == 0:
                continue
            found = graph.row_layer(attention)
            if isinstance(found, str):
                report.skip(found, attention)
                continue
            q, k, v = found.queries_keys_values
            layer = Layer(graph, attention)
            if reason := take_apart(graph, layer.makers(q, k), layer.makers(v), report.name):
                report.skip(reason, attention)
                continue
            found = graph.row_layer(attention)  # anew: it reads the split projections
            assert not isinstance(found, str), found
            counted.append(self._reuse(graph, found, report.name))
            report.did("the layer on the rows whose values changed, sums of what is kept", attention.meta["layer"])
        if report.applied:
            graph.count_rows(counted, by=report.name)
            graph.sweep()

    def _reuse(self, graph: Graph, found: RowLayer, by: str) -> Node:
        """The flags of the rows that the layer runs on now."""
        attention, v, scales = found.attention, args_of(found.write)[1], args_of(found.write)[7:]
        graph.add_input(FULL)
        adapt = None
        if self.idle:
            graph.add_input(ADAPT)
            adapt = graph.on_rows_of("adapt", attention, by)
        values = (v, args_of(found.write)[3], *scales[1:])
        flags = graph.least_similar(values, found.place, float(self.share), before=found.write, by=by, adapt=adapt)
        graph.run_rows(found, flags, by=by, given=[v])
        return flags
