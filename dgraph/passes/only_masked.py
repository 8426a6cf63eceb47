"""OnlyMasked: the last layer runs on the rows that need logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.ir.layers import Layer, windowed, without
from dgraph.ir.linears import heads_of
from dgraph.ir.some_rows import cannot_run
from dgraph.ops import op_of
from dgraph.passes.apart import take_apart
from dgraph.passes.base import Effect, Pass, Report
from dgraph.passes.count_rows import count_products
from dgraph.plans.papers import OURS, Paper
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of, op_name

aten = torch.ops.aten


@dataclass(frozen=True)
class OnlyMasked(Pass):
    """Run the last layer on candidate rows alone, from its queries on; keys and values are written for all rows.

    The logits of a row whose token the step cannot commit decide nothing. So nothing after its keys and values of the
    last layer is ever read. In a step over a whole canvas these are nearly all rows. The candidates move to the front
    of a buffer for all rows and their number stays on the device. The LM head is told that its rows are packed. A joint
    projection of queries, keys and values is split, as in PartialAttention; one that cannot be split gives queries of
    all rows.

        before  dgraph.kv_write(%10, %4, k_cache, v_cache, positions, page_table, cu_rows)
                %11 = dgraph.paged_attention(%9, k_cache, v_cache, page_table, cu_rows, limit, 0.25)  f32[N, 4, 16]
                %13 = linear(%12, self_attn.o_proj.weight)                                            f32[N, 64]
                %3 = dgraph.lm_head(%2, lm_head.weight, None, candidate, temperature, seed, 2048, 96)
        after   dgraph.kv_write(%8, %5, k_cache, v_cache, positions, page_table, cu_rows)
                %9, %10 = dgraph.list_kept(candidate, cu_rows)                                        (i64[K], i32[b+1])
                %12, ... = dgraph.compact([%1, limit, ...], %9)                                       (f32[K, 64], ...)
                %17 = dgraph.rows_linear(%12, self_attn.q_proj.weight, None, %10)                     f32[K, 64]
                %20 = dgraph.paged_attention(%19, k_cache, v_cache, page_table, %10, %14, 0.25)       f32[K, 4, 16]
                %3 = dgraph.lm_head(%2, lm_head.weight, None, candidate, temperature, seed, 2048, 96, True)

    Run it after CacheKV, EvictTokens and ChunkLMHead, and before CountRows, GateFFN and PartialAttention. The
    candidates change from block to block, so the last two store nothing of a layer that runs on candidates.

    Reassociates: the same values on candidates, but a product over fewer rows may sum in another order.
    """

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "the last layer, after its keys and values, on masked rows only"
    changes_weights: ClassVar[bool] = True

    @staticmethod
    def obstacle(spec: ModelSpec) -> str:
        """See `Pass.obstacle`."""
        if spec.noise == "uniform":
            return "no row holds a mask: the next step reads what every row predicts"
        return ""

    def run(self, graph: Graph, report: Report) -> None:
        by, layer = report.name, graph.spec.layers - 1
        heads, writes = heads_of(graph), graph.find("kv_write", layer)
        attentions = graph.find("paged_attention", layer)
        if not heads:
            report.skip("no lm_head says which rows need logits; run ChunkLMHead first", graph.output)
            return
        if not writes or not attentions:
            others = [n for n in graph.calls if n.meta["layer"] == layer and _attends(n)]
            for node in others:
                report.skip(f"it is {op_name(node.target)}; only paged_attention is left to some of its rows", node)
            if not others:
                report.skip(f"nothing in layer {layer}, the last one, is known to attend", heads[0])
            return
        (head, *_), (write, *_), (attention, *_) = heads, writes, attentions
        hidden, weight, bias, candidate, *rest = args_of(head)
        if reason := _obstacle(graph, attention, head):
            report.skip(reason, attention)
            return
        queries = self._queries(graph, attention, write, report)
        first = queries[0] if queries else attention
        # Outputs of the program have all rows, and so have results of the LM head.
        rows = graph.keep_rows(candidate, before=first, by=by, like=attention, counted=True, but=(head, graph.output))
        head.args = (hidden, weight, bias, candidate, *rest[:4], True, *rest[5:])
        graph.sweep()
        graph.propagate()
        count_products(graph, {str(graph.row_set(rows.index)): rows}, report)
        report.did(f"{'queries and ' if queries else ''}what follows on masked rows", layer)

    def _queries(self, graph: Graph, attention: Node, write: Node, report: Report) -> list[Node]:
        """The calls that make queries alone, moved after the write of keys and values; empty if others read them.

        A product that cannot be split gives queries of all rows, from which those of candidates are gathered.
        """

        def found() -> tuple[list[Node], list[Node]]:
            layer = Layer(graph, attention)
            return layer.makers(layer.queries), layer.makers(*args_of(write)[:2])

        if reason := take_apart(graph, *found(), report.name):
            report.skip(f"queries are computed for all rows: {reason}", attention)
        alone = without(*found())
        if any(user not in alone and user is not attention for node in alone for user in node.users):
            return []
        place = write
        for node in alone:
            place.append(node)
            place = node
        return alone


def _attends(node: Node) -> bool:
    """True if an opaque call is an attention, known or not: it reads several rows and gives each row as many heads."""
    op, args = op_of(node.target), args_of(node)
    if op is None or op.inline or op.by_row or op.gathers or not args or not isinstance(args[0], Node):
        return False
    value = node.meta["val"]
    given, made = args[0].meta["val"], value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor) or made.dim() < 3:
        return False
    return made.dim() == given.dim() and made.shape[1] == given.shape[1]


def _obstacle(graph: Graph, attention: Node, head: Node) -> str | None:
    """Reason why the last layer cannot run on masked rows alone, or None."""
    if reason := windowed(attention):
        return reason
    hidden, *_ = args_of(head)
    rows = graph.row_set(attention)
    if args_of(head)[8:9] == (True,):
        return "the last layer runs on masked rows already"
    if graph.row_set(hidden) != rows:
        return f"the LM head reads rows {graph.row_set(hidden)}, this attention makes rows {rows}"
    readers: dict[Node, None] = {}
    for node in graph.calls:
        if node is not head and any(arg is attention or arg in readers for arg in node.all_input_nodes):
            readers[node] = None
    for node in readers:
        if graph.output in node.users:
            return f"the program returns {node.name}, of all rows"
    return cannot_run(readers)
