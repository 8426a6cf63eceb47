"""CountRows: the number of rows that an eviction keeps stays on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from dgraph.ir.graph import Graph, Listed
from dgraph.ir.linears import linear_of
from dgraph.ir.some_rows import nowhere
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of

aten = torch.ops.aten


@dataclass(frozen=True)
class CountRows(Pass):
    """Remove the host read after an eviction: the kept rows are counted on the device.

    At a cut the host reads the number of kept rows, so that later ops run on that many. Instead, the kept rows move to
    the front, their offsets give their number, and the other rows become padding. Every op over sequences leaves
    padding out already. Each linear layer becomes one that reads the count on the device. Padding goes to no expert of
    a mixture. The program is one stage without a host read, which on a GPU is one CUDA graph per bucket of all rows.

        before  %15 = dgraph.keep_index(%12, cu_rows, -1)          -- stage cut --              (i64[K], i32[b+1])
                %27 = linear(%26, self_attn.o_proj.weight)                                      f32[K, 256]
        after   %15 = dgraph.list_kept(%12, cu_rows)                                            (i64[K], i32[b+1])
                %27 = dgraph.rows_linear(%26, self_attn.o_proj.weight, None, %17)               f32[K, 256]

    K remains a row set of its own, although at run time it has the size of the rows before it: row i of one is
    not row i of the other. Run it after EvictTokens and, since that one looks for the LM head's linear layer, after
    ChunkLMHead.

    Reassociates: on a GPU, another kernel sums the products of a linear layer in another order.
    """

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "counts kept rows on the device: one stage, no host read, linear layers over that count"

    def run(self, graph: Graph, report: Report) -> None:
        lists: dict[str, Listed] = {}
        for cut in graph.find("keep_index"):
            keep, cu_rows, capacity = args_of(cut)
            if capacity >= 0:
                report.skip(f"it keeps room for {capacity} rows, not for all; cut with capacity -1", cut)
                continue
            kept = graph.call(OPS["list_kept"], (keep, cu_rows), before=cut, by=report.name, rows=cut.meta["rows"])
            graph.replace(cut, kept)
            lists[kept.meta["rows"]] = graph.listed(kept, report.name)
            report.did(f"row set {kept.meta['rows']} is counted on the device", kept.meta["layer"])
        count_products(graph, lists, report)
        graph.propagate()


def count_products(graph: Graph, lists: Mapping[str, Listed], report: Report) -> None:
    """Let linear layers and experts on these row sets stop after the rows that each lists, on the device."""
    for node in graph.calls:
        linear = linear_of(node)
        if node.target is not OPS["experts"].overload and (linear is None or linear.kind != "plain"):
            continue
        x, *others = args_of(node)
        rows = graph.row_set(x)
        if rows is None or rows not in lists:  # before the gather, where the host knows the number
            continue
        if node.target is OPS["experts"].overload:
            choice = others[0]
            if choice.target is aten.masked_fill.Scalar:  # fewer rows are listed already
                continue
            node.replace_input_with(choice, nowhere(graph, choice, lists[rows].index, node, node, report.name))
            report.did(f"rows after the count of {rows} go to no expert", node.meta["layer"])
            continue
        assert linear is not None
        if not linear.by_vectors:
            report.skip(f"its input is {graph.type_text(x)}, not one vector per row; it runs on padding as well", node)
            continue
        args = (x, linear.weight, linear.bias, lists[rows].cu_rows)
        counted = graph.call(OPS["rows_linear"], args, before=node, by=report.name)
        counted.meta["source"] = node.meta.get("source")
        graph.replace(node, counted)
        report.did(f"linear over the count of {rows}", counted.meta["layer"])
