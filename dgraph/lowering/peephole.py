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
from dgraph.ir.matching import Match
from dgraph.ir.pattern import Pattern
from dgraph.ir.quantised_operands import inputs_of
from dgraph.ops import Op, op_of
from dgraph.ops.rows import rope
from dgraph.types.nodes import ancestors, args_of, viewed

aten, ops = torch.ops.aten, torch.ops.dgraph

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
    turned = {match.root: match for match in graph.match(_TURNED)}
    rounded = {match["attended"]: match for match in graph.match(_ROUNDED)}
    found = {}
    for attention in sorted({*turned, *rounded}):
        before, after, op = turned.get(attention), rounded.get(attention), op_of(attention.target)
        assert op is not None
        absorbed = (*(before.nodes[:1] if before else ()), *((attention, after["reshape"]) if after else ()))
        queries = before.values if before else args_of(attention)[:1]
        function = Attend(op, before is not None, after["kind"] if after else None)
        made = after.root if after else attention
        found[made] = Fusion(made, absorbed, function, (*queries, *args_of(attention)[1:]), by_row=False)
    return found


def _no_turn(match: Match) -> str | None:
    """Reason why an attention cannot rotate its queries itself, or None."""
    values = [value.meta["val"] for value in match.values]
    made, turned = linear_of(viewed(match["q"])), match["rope"]
    if made is None or made.kind != "plain" or turned in args_of(match.root)[1:]:
        return "the queries do not lie in memory as a product wrote them, or are read twice"
    fits = turned.meta["val"].dtype == values[0].dtype in _ATTENDED and rope.turns_rows(match.graph.symbols, *values)
    return None if fits else "its kernel does not take their dtype, or they do not turn by their row"


def _no_rounding(match: Match) -> str | None:
    """Reason why an attention cannot round its results, which a product reads rounded; or None."""
    graph, attention, rows = match.graph, match["attended"], match["reshape"]
    op = op_of(attention.target)
    if op is None or not op.rounds or set(attention.users) != {rows}:
        return "the attention cannot round them, or something else reads it"
    whole = rows.meta["val"].dim() == 2 and graph.row_set(rows) == graph.row_set(attention) is not None
    fits = whole and attention.meta["val"].dtype in _ATTENDED and not _is_written(attention, match.root)
    return None if fits else "they are no whole rows, or what the attention reads is written before"


_TURNED = Pattern(lambda q, cos, sin: ops.paged_attention(ops.rope.default(q, cos, sin), ...), _no_turn)
_ROUNDED = Pattern(
    lambda attended, shape, kind: ops.quantise_rows.default(aten.reshape.default(attended, shape), kind), _no_rounding
)


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
    found = graph.match(_SUM)
    return {m.root: Fusion(m.root, m.nodes[:-1], add_product, m.values, by_row=True) for m in found}


def _no_sum(match: Match) -> str | None:
    """Reason why a stream cannot take the sum with a linear layer in place, or None.

    Nothing may read the stream after the sum, or share its memory. Its dtype must be that of the layer's result, since
    products add up in one dtype alone.
    """
    stream, x, weight = match.values
    if "weight" not in weight.meta or x.meta["val"].dim() != 2:
        return "the layer has no weight of the model, or reads more than a vector per row"
    results = {*match.graph.results().values()}
    if not isinstance(stream, Node) or stream.target not in _FRESH or results & {stream, match.root}:
        return "the stream has no buffer of its own"
    value, product, result = (node.meta["val"] for node in (stream, *match.nodes))
    if value.shape != result.shape or not value.dtype == product.dtype == result.dtype:
        return "the stream is of another type than the sum"
    above = ancestors([x], stop=[stream])
    last = all(user is match.root or (user in above and not _may_alias(user)) for user in stream.users)
    return None if last else "the stream is read after the sum, or shares its memory"


_SUM = Pattern(lambda stream, x, weight: aten.add.Tensor(stream, aten.linear.default(x, weight)), _no_sum)


def _may_alias(node: Node) -> bool:
    """True if a result may be a view of an argument. Ops of dgraph never return a view."""
    schema = getattr(node.target, "_schema", None)
    return op_of(node.target) is None and (schema is None or any(r.alias_info is not None for r in schema.returns))
