"""QuantisedOperands: products read rounded rows, and lookups read tables, as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.ir.quantised_operands import is_fused_operand, product_op
from dgraph.ir.row_order import list_of
from dgraph.ir.stored_weights import stored_of
from dgraph.ops import OPS, op_of
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of, op_name

_LOOKUPS = torch.ops.aten.embedding.default, OPS["embedding_part"].overload


@dataclass(frozen=True)
class QuantisedOperands(Pass):
    """Split the rounding of rows into numbers and scales, which products read, and look vectors up in stored tables.

        before  %6 = dgraph.round_rows(%5, 'int8')                                       f32[N, 64]
                %7 = linear(%6, %4)                                                      f32[N, 32]
        after   %6, %7 = dgraph.quantise_rows(%5, 'int8')                                (i8[N, 64], f32[N, 1])
                %8 = dgraph.dequantise_rows(%6, %7, torch.float32)                       f32[N, 64]
                %9 = linear(%8, %4)                                                      f32[N, 32]

    Lowering gives a product the numbers and scales in place of a dequantisation that only products read
    (`dgraph.ir.quantised_operands`). Rounding then fuses into the op that makes the rows, and the rounded values never
    lie in memory. The weight must be stored in numbers of the same kind with a scale for each of its rows.

    A lookup of ids in a quantised table is `dgraph::embedding_stored`, which dequantises the rows that it reads. Rows
    that are gathered are rounded after the gather, which gives a product the same values.

    The compiler runs it after the passes of a recipe (`dgraph.compiler.phases.lowering_passes`).

    Reassociates with `live_rows`: a kernel sums the squares of a norm in another order. All else is exact.

    Attributes:
        live_rows: True if rows that products count by a list on the device are normed and rounded up to that count. A
            fused op runs on as many rows as there is room for; a kernel of a GPU stops after the listed ones.
    """

    live_rows: bool = False

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "products read rounded rows as numbers and scales, lookups read stored tables"

    def run(self, graph: Graph, report: Report) -> None:
        for node in [node for node in graph.calls if node.target in _LOOKUPS]:
            if args_of(node)[0].target is OPS["dequantise"].overload:
                self._look_up(graph, node, report)
        for node in graph.find("round_rows"):
            for gather in [user for user in node.users if user.target is OPS["compact"].overload]:
                _round_after(graph, node, gather, report)
        graph.sweep()
        for node in graph.find("round_rows"):
            if (reason := _obstacle(node)) is not None:
                report.skip(reason, node)
            else:
                self._quantise(graph, node, report)
        graph.sweep()

    @staticmethod
    def _look_up(graph: Graph, node: Node, report: Report) -> None:
        """Dequantise the vectors that a lookup reads, not the table."""
        table, ids, *part = args_of(node)
        *stored, block, dtype = args_of(table)
        first = part[0] if node.target is OPS["embedding_part"].overload else None
        args = (*stored, ids, first, block, dtype)
        graph.replace(node, graph.call(OPS["embedding_stored"], args, before=node, by=report.name))
        report.did("vectors of a stored table", node.meta["layer"])

    def _quantise(self, graph: Graph, node: Node, report: Report) -> None:
        """Make numbers and scales in place of rounded values."""
        kind, count = args_of(node)[1], _count_of(node) if self.live_rows else None
        if count is None:
            made = graph.call(OPS["quantise_rows"], args_of(node), before=node, by=report.name)
        else:
            _bound_norm(graph, node, count, report.name)
            made = graph.call(OPS["rows_quantise"], (*args_of(node), count), before=node, by=report.name)
        args = (*graph.parts(made, 2, report.name), node.meta["val"].dtype)
        graph.replace(node, graph.call(OPS["dequantise_rows"], args, before=node, by=report.name))
        report.did(f"{'rows' if count is None else 'listed rows'} as {kind}", node.meta["layer"])


def _round_after(graph: Graph, rounded: Node, gather: Node, report: Report) -> None:
    """Move a rounding behind a gather: gather the rows before they are rounded, and round the gathered rows."""
    (values, index), (x, kind) = args_of(gather), args_of(rounded)
    for part in list(gather.users):
        if values[args_of(part)[1]] is rounded:
            again = graph.call(OPS["round_rows"], (part, kind), before=part.next, by=report.name)
            graph.redirect(part, again, after=again)
    gather.args = ([x if value is rounded else value for value in values], index)
    report.did("rounding after a gather", rounded.meta["layer"])


def _obstacle(rounded: Node) -> str | None:
    """Reason why readers of rounded rows cannot take them quantised, or None."""
    kind = args_of(rounded)[1]
    for user in rounded.users:
        args, op = args_of(user), product_op(user)
        if op is None or user.kwargs or rounded not in op.values(op.rounded, args):
            return f"{op_name(user.target)} reads the rounded rows, and multiplies by none that are quantised"
        if sum(arg is rounded for arg in args) > 1:
            return f"{op_name(user.target)} reads the rounded rows twice"
        for weight in op.values(op.stored, args):
            stored = stored_of(weight)
            if stored is None or not stored.quantised:
                return f"{op_name(user.target)} multiplies the rounded rows by a weight that is not quantised"
            if stored.row_kind != kind:
                return f"{stored.name} is not stored as {kind} with one scale for each of its rows"
            if not is_fused_operand(weight):
                return f"{stored.name} is dequantised, since not only products read it"
    return None


def _count_of(rounded: Node) -> Node | None:
    """Node that counts rounded rows [N, d] for all their readers; None if they are not listed on the device."""
    ops = [(op_of(user.target), args_of(user)) for user in rounded.users]
    counts = {None if op is None else op.counter(args) for op, args in ops}
    count = counts.pop() if len(counts) == 1 and rounded.meta["val"].dim() == 2 else None
    return count if count is not None and list_of(count) is not None else None


def _bound_norm(graph: Graph, rounded: Node, count: Node, by: str) -> None:
    """Let a norm of rows that only the rounding reads stop after the counted rows."""
    norm = args_of(rounded)[0]
    if norm.target is OPS["rms_norm"].overload and len(norm.users) == 1:
        graph.replace(norm, graph.call(OPS["rows_norm"], (*args_of(norm), count), before=norm, by=by))
