"""BoundRows: norms and rotary embeddings stop at the rows that are live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.ir.row_order import list_of
from dgraph.ops import OPS, op_of
from dgraph.ops.rows.rope import turns_rows
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of, op_name, viewed


@dataclass(frozen=True)
class BoundRows(Pass):
    """Normalise and rotate only the listed rows if only the device knows their number.

    Linear layers over a count leave padding rows out. An RMSNorm or a rotary embedding between them is plain torch over
    all rows of the buffer, of which few may be live. It becomes a call that stops after the listed rows on two
    conditions. Its input was gathered by a list or computed from gathered rows, and its readers look at the listed rows
    alone. A norm of heads before a rotary embedding is part of that call.

        before  %15 = dgraph.rms_norm(%14, self_attn.k_norm.weight, 1e-06)              f32[N, 2, 16]
                %17 = dgraph.rope(%15, %8, %9)                                          f32[N, 2, 16]
                %18 = dgraph.kv_update(%17, %16, k_cache, v_cache, %10, page_table, %h2)
                %28 = dgraph.rms_norm(%26, post_attention_layernorm.weight, 1e-06)      f32[N, 64]
                %29 = dgraph.rows_linear(%28, mlp.gate_proj+up_proj.weight, None, %22)  f32[N, 256]
        after   %16 = dgraph.rows_rope(%14, %8, %9, %h2, self_attn.k_norm.weight, 1e-06)
                %17 = dgraph.kv_update(%16, %15, k_cache, v_cache, %10, page_table, %h2)
                %27 = dgraph.rows_norm(%25, post_attention_layernorm.weight, 1e-06, %21)
                %28 = dgraph.rows_linear(%27, mlp.gate_proj+up_proj.weight, None, %21)  f32[N, 256]

    A norm of the residual stream stays where a sum over all rows is computed before it: the two are one kernel.
    Run it after the passes that list rows (GateFFN, PartialAttention, ReuseRows, CountRows), and after FuseGLU.

    Reassociates: the same values on live rows, but on a GPU another kernel sums the squares in another order.
    """

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "norms and rotary embeddings of listed rows stop after the last of them"

    def run(self, graph: Graph, report: Report) -> None:
        for node in graph.calls:
            if _is(node, "rope"):
                self._rope(graph, node, report)
            elif _is(node, "rms_norm") and not all(_is(user, "rope") for user in node.users):
                self._norm(graph, node, report)

    def _rope(self, graph: Graph, rope: Node, report: Report) -> None:
        x, cos, sin = args_of(rope)
        # A norm without a weight is not one of the kernel's.
        normed = _is(x, "rms_norm") and set(x.users) == {rope} and args_of(x)[1] is not None
        source, weight, eps = args_of(x) if normed else (x, None, 0.0)
        count = _count_of(rope, source)
        values = (node.meta["val"] for node in (source, cos, sin))
        if isinstance(count, Node) and not turns_rows(graph.symbols, *values):
            count = f"it rotates {graph.type_text(source)} by {graph.type_text(cos)}, not heads by angles of their row"
        if isinstance(count, Node):
            _put(graph, "rows_rope", (source, cos, sin, count, weight, eps), rope, report)
            if normed:
                graph.fx.erase_node(x)
        elif count is not None:
            report.skip(count, rope)

    def _norm(self, graph: Graph, norm: Node, report: Report) -> None:
        x, weight, eps = args_of(norm)
        count = _count_of(norm, x)
        if isinstance(count, Node) and x.meta["val"].dim() != 2:
            count = f"it normalises {graph.type_text(x)}, not one vector per row"
        if isinstance(count, Node):
            _put(graph, "rows_norm", (x, weight, eps, count), norm, report)
        elif count is not None:
            report.skip(count, norm)


def _put(graph: Graph, name: str, args: tuple[Any, ...], old: Node, report: Report) -> None:
    new = graph.call(OPS[name], args, before=old, by=report.name)
    new.meta["source"] = old.meta.get("source")
    graph.replace(old, new)
    report.did(f"{name} of {new.meta['role'] or 'the model'}", new.meta["layer"])


def _count_of(node: Node, source: Node) -> Node | str | None:
    """The node that counts the live rows of a call; why it cannot stop after them; None if the host knows them all."""
    counts: dict[Node, None] = {}
    others = []
    for user in node.users:
        op, args = op_of(user.target), args_of(user)
        count = op.counter(args) if op is not None else None
        if count is None or args[0] is not node or node in args[1:]:
            others.append(user)
        else:
            counts[count] = None
    origin, listed = _origin(source)
    if listed is None and not any(list_of(count) for count in counts):
        return None
    if others:
        return f"{op_name(others[0].target)} reads it for every row, listed or not"
    if listed is None:
        return f"{op_name(origin.target)} computes its input for all rows; the two are one kernel"
    if any(list_of(count) is not listed for count in counts):
        return "what reads it counts other rows than those that its input was gathered by"
    return next(iter(counts))


def _origin(source: Node) -> tuple[Node, Node | None]:
    """The call that made a value behind views, and the list of the value's rows, None for all rows."""
    made = viewed(source)
    if _is(made, "compact"):
        return made, list_of(args_of(made)[1])
    op = op_of(made.target)
    count = op.counter(args_of(made)) if op is not None and op.by_row else None
    return made, None if count is None else list_of(count)


def _is(node: Node, name: str) -> bool:
    op = op_of(node.target)
    return op is not None and op.name == name
