"""ReuseRows: dLLM-Cache, layers that run on the rows whose values have changed most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.ir.layers import FeedForward, Layer, in_ranges, of_weights, without
from dgraph.ops import OPS
from dgraph.passes import salience
from dgraph.passes.apart import take_apart
from dgraph.passes.base import Effect, Pass, Report
from dgraph.passes.partial_attention import over_rows
from dgraph.plans.papers import DLLM_CACHE, MASKKV, Paper
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of, op_name
from dgraph.types.shapes import InputSpec

aten = torch.ops.aten

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
    signature: ClassVar[frozenset[str]] = frozenset(
        {salience.FULL.name, ADAPT.name, salience.SALIENT, "a_cache_*", "f_cache_*"}
    )
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
        for attention in graph.find("paged_attention"):
            if attention.meta["layer"] == 0:
                continue
            found = _layer(graph, attention)
            if isinstance(found, str):
                report.skip(found, attention)
                continue
            q, k, v = found.queries_keys_values
            layer = Layer(graph, attention)
            of_qk, of_v = layer.makers(q, k), layer.makers(v)
            if reason := take_apart(graph, of_qk, of_v, report.name):
                report.skip(reason, attention)
                continue
            found = _layer(graph, attention)  # anew: it reads the split projections
            assert not isinstance(found, str), found
            self._reuse(graph, found, report)
        if report.applied:
            salience.count_salient(graph, report.name)
            graph.sweep()

    def _reuse(self, graph: Graph, found: _Layer, report: Report) -> None:
        by, attention, write = report.name, found.attention, found.write
        q, k, v = found.queries_keys_values
        k_cache, v_cache, positions, page_table, cu_rows, *scales = args_of(write)[2:]
        limit, scale = args_of(attention)[5:7]
        graph.add_input(salience.FULL)
        full = graph.on_rows_of("full", attention, by)
        adapt = None
        if self.idle:
            graph.add_input(ADAPT)
            adapt = graph.on_rows_of("adapt", attention, by)
        place = (positions, page_table, cu_rows)
        flags = salience.least_similar(
            graph, (v, v_cache, *scales[1:]), full, place, float(self.share), adapt, write, by
        )
        rows = salience.listed(graph, flags, cu_rows, write, by)

        layer = Layer(graph, attention)
        nodes = without(layer.makers(q, k), layer.makers(v))
        read = [a for n in nodes for a in n.all_input_nodes if a not in nodes and not of_weights(a)]
        values = list(dict.fromkeys([*(a for a in read if over_rows(graph, a)), v, positions, limit]))
        gathered = graph.call(OPS["compact"], (values, rows.index), before=write, by=by)
        on_rows = dict(zip(values, graph.parts(gathered, len(values), by), strict=True))
        on_rows = salience.move(graph, nodes, on_rows, rows, write, by)
        at = (on_rows[positions], page_table, rows.cu_rows)
        graph.call(OPS["kv_write"], (on_rows[k], on_rows[v], k_cache, v_cache, *at, *scales), before=write, by=by)
        graph.fx.erase_node(write)
        attend = (on_rows[q], k_cache, v_cache, page_table, rows.cu_rows, on_rows[limit], scale, *scales)
        on_rows[attention] = graph.call(OPS["paged_attention"], attend, before=attention, by=by)

        def keep(kind: str, nodes: Sequence[Node], result: Node, total: Node) -> None:
            """Compute `result` on the rows and cache it; `total`, a sum, reads the cache."""
            moved = salience.move(graph, nodes, on_rows, rows, total, by)
            width, dtype = int(result.meta["val"].shape[1]), result.meta["val"].dtype
            name = f"{kind}_cache_{attention.meta['layer']}"
            cache = graph.add_input(InputSpec(name, dtype, ("pages", "page", width)))
            merge = (moved[result], rows.index, cache, *place)
            total.replace_input_with(result, graph.call(OPS["feature_merge"], merge, before=total, by=by, like=result))

        ffn = found.ffn
        keep("a", found.mixing, found.mixed, ffn.attended)
        if ffn.stream not in on_rows:  # a network parallel to the attention may read its input
            stream = graph.call(
                OPS["compact"], ([ffn.stream], rows.index), before=ffn.residual, by=by, like=ffn.nodes[0]
            )
            (on_rows[ffn.stream],) = graph.parts(stream, 1, by)
        keep("f", ffn.nodes, ffn.result, ffn.residual)
        count = len(nodes) + 1 + len(found.mixing) + len(ffn.nodes)
        report.did(f"{count} calls on the rows whose values changed, sums of what is kept", attention.meta["layer"])


@dataclass(frozen=True)
class _Layer:
    """A layer that can run on some of its rows.

    Attributes:
        attention, write: its attention, and where its keys and values are written.
        mixing: the calls from the attention to its addend to the residual stream, in order.
        mixed: the last of them.
        ffn: its feed-forward network.
    """

    attention: Node
    write: Node
    mixing: tuple[Node, ...]
    mixed: Node
    ffn: FeedForward

    @property
    def queries_keys_values(self) -> tuple[Node, Node, Node]:
        k, v = args_of(self.write)[:2]
        return args_of(self.attention)[0], k, v


def _layer(graph: Graph, attention: Node) -> _Layer | str:
    """The layer of an attention, or why it cannot run on some of its rows."""
    if seen := in_ranges(attention):
        return seen
    layer = Layer(graph, attention)
    ffn, write = layer.feed_forward, layer.write
    if isinstance(ffn, str):
        return ffn
    if reason := salience.obstacle(ffn.nodes):
        return reason
    if isinstance(write, str):
        return write
    k, v = args_of(write)[:2]
    if not graph.row_set(k) == graph.row_set(attention) == graph.row_set(ffn.residual):
        return "rows are evicted in the layer"
    projections = layer.makers(layer.queries, k, v)
    for node in projections:
        for user in node.users:
            if user not in (*projections, *ffn.nodes, ffn.stream, write, attention):
                return f"{op_name(user.target)} also reads {node.name}, for all rows"
    mixing = layer.mixing(ffn.attended)
    if isinstance(mixing, str):
        return mixing
    reason = salience.obstacle([*projections, *mixing.nodes])
    return reason or _Layer(attention, write, mixing.nodes, mixing.result, ffn)
