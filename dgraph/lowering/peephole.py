"""Fuse calls on a GPU where a compiled region cannot: every pass over memory counts there.

Sums of the residual stream: a linear layer whose result is added to the stream writes it, and the sum reads it again.
These are two passes beside those of the sum itself. A product of matrices can add to the values that its result holds
already. So where nothing reads the stream again, its buffer becomes the sum's. Then the next op (a norm, mostly) reads
one value instead of two.

Rotations of queries: attention loads each query once, and can rotate it there. A rotary embedding before it is a pass
of its own, unless the op that makes the queries (a norm of heads) is one anyway.

Rounding of attention results: where the keys are divided among programs, the kernel that adds up their shares has whole
rows, and rounds them. Where keys are not divided, or rows are too wide for a program, a kernel reads the live rows
again, and rounds them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.families.quantised import quantised_rows
from dgraph.ir.graph import Graph
from dgraph.ir.linears import linear_of
from dgraph.ir.quantised_operands import inputs_of
from dgraph.ops import OPS, Op, op_of
from dgraph.ops.rows import rope
from dgraph.types.nodes import ancestors, args_of, viewed

aten = torch.ops.aten

_FRESH = (aten.add.Tensor, aten.embedding.default)
"""Ops that make a stream in a buffer of its own."""

_ATTENDED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of queries that kernels of attention take."""


@dataclass(frozen=True)
class Fusion:
    """Calls that run as one.

    Attributes:
        made: the last of them, which gives the result.
        absorbed: those before it, in order; nothing else reads them.
        function: computes all of them.
        args: of the function: nodes and plain values.
        by_row: True if a row of the result depends only on the same row of the arguments.
    """

    made: Node
    absorbed: tuple[Node, ...]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    by_row: bool

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Values that the fused call reads, each once."""
        return tuple(inputs_of(arg for arg in self.args if isinstance(arg, Node)))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in order."""
        return (*self.absorbed, self.made)

    @property
    def results(self) -> tuple[tuple[int | None, Node], ...]:
        """Parts of the result, with the node of each; part None is the result itself."""
        return results_of(self.made)


def results_of(node: Node) -> tuple[tuple[int | None, Node], ...]:
    """Parts of a call's result that are picked, with the node of each; part None is the result itself."""
    parts = [(args_of(user)[1], user) for user in node.users if user.target is operator.getitem]
    return tuple(parts) if parts else ((None, node),)


def add_product(stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """stream [N, d_out] += x [N, d_in] @ weight.T, rounded once; returns the stream."""
    return stream.addmm_(x, weight.t())


@dataclass(frozen=True)
class Attend:
    """Attention that rotates its queries, rounds its results, or both.

    Attributes:
        op: the attention.
        rotated: True if it takes cos and sin [N, 1, D] after the queries [N, Hq, D], and attends with rope(q, cos,
            sin).
        kind: number format of results that are rounded rows: values [N, Hq * D] and scales [N, 1], as
            dgraph::rows_quantise does; None for results as they are, [N, Hq, D].
    """

    op: Op
    rotated: bool = False
    kind: str | None = None

    def __call__(self, q: Tensor, *args: Any) -> Any:
        """Run the attention on its arguments."""
        rotation, rest = (args[:2], args[2:]) if self.rotated else (None, args)
        if q.device.type != "cuda":
            attended = self.op.overload(q if rotation is None else rope.reference(q, *rotation), *rest)
            return attended if self.kind is None else quantised_rows(attended.flatten(1), self.kind)
        options: dict[str, Any] = {} if rotation is None else {"rotation": rotation}
        options |= {} if self.kind is None else {"kind": self.kind}
        with torch.cuda.device(q.device):
            return self.op.on_gpu(q, *rest, **options)


def fusions_of(graph: Graph) -> dict[Node, Fusion]:
    """Every fused call of a graph, by the node that it stands for."""
    return {**sums_of(graph), **attentions_of(graph)}


def attentions_of(graph: Graph) -> dict[Node, Fusion]:
    """The attentions of a graph that can rotate their queries or round their results, by the last node of each."""
    rounded = _rounded_attentions(graph)
    found = {}
    for attention in graph.calls:
        op, turned = op_of(attention.target), _rotated_queries(graph, attention)
        rows, made = rounded.get(attention, ((), attention))
        if op is None or (turned is None and not rows):
            continue
        q, *rest = args_of(attention)
        function = Attend(op, turned is not None, args_of(made)[1] if rows else None)
        absorbed = (*(() if turned is None else (turned,)), *rows)
        args = (*((q,) if turned is None else args_of(turned)), *rest)
        found[made] = Fusion(made, absorbed, function, args, by_row=False)
    return found


def _rotated_queries(graph: Graph, attention: Node) -> Node | None:
    """The rotation of the queries of an attention that can do it itself; None without one."""
    if attention.target is not OPS["paged_attention"].overload:
        return None
    turned, *rest = args_of(attention)
    if turned.target is not OPS["rope"].overload or set(turned.users) != {attention} or turned in rest:
        return None
    values = [node.meta["val"] for node in args_of(turned)]
    made = linear_of(viewed(args_of(turned)[0]))
    of_a_layer = made is not None and made.kind == "plain"  # it lies in memory as the product wrote it
    plain = turned.meta["val"].dtype == values[0].dtype and values[0].dtype in _ATTENDED
    return turned if plain and of_a_layer and rope.turns_rows(graph.symbols, *values) else None


def _rounded_attentions(graph: Graph) -> dict[Node, tuple[tuple[Node, Node], Node]]:
    """The attentions that can round their results, each with its rows and the rounding of these.

    A product reads the rounding, and nothing else reads the attention.
    """
    found = {}
    for made in graph.find("quantise_rows"):
        rows = args_of(made)[0]
        if rows.target is not aten.reshape.default or set(rows.users) != {made}:
            continue
        attention = args_of(rows)[0]
        op = op_of(attention.target)
        if op is None or not op.rounds or set(attention.users) != {rows}:
            continue
        value, flat = attention.meta["val"], rows.meta["val"]
        whole = flat.dim() == 2 and graph.row_set(rows) == graph.row_set(attention) is not None
        if whole and value.dtype in _ATTENDED and not _is_written(attention, made):
            found[attention] = ((attention, rows), made)
    return found


def _is_written(attention: Node, later: Node) -> bool:
    """True if an input of a node is written between the node and a later call, or the program is cut there."""
    node, read = attention.next, set(attention.all_input_nodes)
    while node is not later:
        op = op_of(node.target)
        if op is not None and (op.cut or read.intersection(op.written(args_of(node)))):
            return True
        node = node.next
    return False


def sums_of(graph: Graph) -> dict[Node, Fusion]:
    """The sums of a graph that can be added up in place, by node."""
    results = set(graph.results().values())
    found: dict[Node, Fusion] = {}
    for total in graph.calls:
        if total.target is not aten.add.Tensor or total.kwargs or total in results:
            continue
        for stream, linear in (args_of(total), args_of(total)[::-1]):
            if _is_layer(linear, total) and _ends_in(stream, linear, total) and stream not in results:
                found[total] = Fusion(total, (linear,), add_product, (stream, *args_of(linear)), by_row=True)
                break
    return found


def _is_layer(linear: object, total: Node) -> bool:
    """True if a node is a linear layer without a bias, read by the sum alone, whose weight is one of the model."""
    found = linear_of(linear)
    if found is None or found.kind != "plain" or set(found.node.users) != {total}:
        return False
    return len(args_of(found.node)) == 2 and "weight" in found.weight.meta and found.by_vectors


def _ends_in(stream: object, linear: Node, total: Node) -> bool:
    """True if a node is a stream that can take the sum in place.

    Nothing may read the stream after the sum, or share its memory. Its dtype must be that of the layer's result, since
    products add up in one dtype alone.
    """
    if not isinstance(stream, Node) or stream.target not in _FRESH:
        return False
    value, product, result = (node.meta["val"] for node in (stream, linear, total))
    if value.shape != result.shape or not value.dtype == product.dtype == result.dtype:
        return False
    above = ancestors(args_of(linear)[:1], stop=[stream])
    return all(user is total or (user in above and not _may_alias(user)) for user in stream.users)


def _may_alias(node: Node) -> bool:
    """True if a result may be a view of an argument. Ops of dgraph never return a view."""
    schema = getattr(node.target, "_schema", None)
    return op_of(node.target) is None and (schema is None or any(r.alias_info is not None for r in schema.returns))
