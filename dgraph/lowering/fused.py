"""What a step takes along on a GPU, where every pass over memory counts and a compiled region cannot have it.

Sums of the residual stream: a linear layer whose result is added to the stream writes it, and the sum reads it again,
two passes beside those that the sum itself makes. A product of matrices can add to what its result holds already. So
where nothing reads the stream again, its buffer becomes the sum's, and what follows (a norm, mostly) reads one value
instead of two.

Rotations of queries: attention loads each query once, and can rotate it there. A rotary embedding before it is a
pass of its own, unless what makes the queries (a norm of heads) is one anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.graph import Graph
from dgraph.linears import linear_of
from dgraph.lowering.taken import inputs_of
from dgraph.nodes import ancestors, args_of, viewed
from dgraph.ops import OPS, op_of, rope

aten = torch.ops.aten

_FRESH = (aten.add.Tensor, aten.embedding.default)
"""What makes a stream whose buffer is nobody else's."""


@dataclass(frozen=True)
class Fused:
    """A call that takes the one before it along.

    Attributes:
        made: the call; its node stands for the result.
        within: what it takes along; nothing else reads that.
        function: computes both.
        args: of the function: nodes and plain values.
        by_row: whether a row of the result depends on the same row of the arguments only.
    """

    made: Node
    within: Node
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    by_row: bool

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The values that it reads, each once."""
        return tuple(inputs_of(arg for arg in self.args if isinstance(arg, Node)))


def add_product(stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """stream [N, d_out] += x [N, d_in] @ weight.T, rounded once; returns the stream."""
    return stream.addmm_(x, weight.t())


def attend_rotated(q: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Tensor:
    """dgraph::paged_attention of rope(q, cos, sin), with its other arguments: q [N, Hq, D], cos and sin [N, 1, D]."""
    if q.device.type != "cuda":
        turned: Tensor = OPS["paged_attention"].overload(rope.reference(q, cos, sin), *rest)
        return turned
    with torch.cuda.device(q.device):
        attended: Tensor = OPS["paged_attention"].on_gpu(q, *rest, rotation=(cos, sin))
        return attended


def fused_of(graph: Graph) -> dict[Node, Fused]:
    """Everything in a graph that takes something along, by the node that it stands for."""
    return {**sums_of(graph), **rotations_of(graph)}


def rotations_of(graph: Graph) -> dict[Node, Fused]:
    """The attentions of a graph that can rotate their queries, by node."""
    found = {}
    for attention in graph.find("paged_attention"):
        turned, *rest = args_of(attention)
        op = op_of(turned.target)
        if op is None or op.name != "rope" or set(turned.users) != {attention} or turned in rest:
            continue
        values = [node.meta["val"] for node in args_of(turned)]
        dtype = turned.meta["val"].dtype
        plain = dtype == values[0].dtype and dtype in (torch.bfloat16, torch.float16, torch.float32)
        made = linear_of(viewed(args_of(turned)[0]))
        of_a_layer = made is not None and made.kind == "plain"  # it lies in memory as the product wrote it
        if plain and of_a_layer and rope.turns_rows(graph.symbols, *values):
            found[attention] = Fused(attention, turned, attend_rotated, (*args_of(turned), *rest), by_row=False)
    return found


def sums_of(graph: Graph) -> dict[Node, Fused]:
    """The sums of a graph that can be added up in place, by node."""
    results = set(graph.results().values())
    found: dict[Node, Fused] = {}
    for total in graph.calls:
        if total.target is not aten.add.Tensor or total.kwargs or total in results:
            continue
        for stream, linear in (args_of(total), args_of(total)[::-1]):
            if _is_layer(linear, total) and _ends_in(stream, linear, total) and stream not in results:
                found[total] = Fused(total, linear, add_product, (stream, *args_of(linear)), by_row=True)
                break
    return found


def _is_layer(linear: object, total: Node) -> bool:
    """Whether it is a linear layer of the sum alone, without a bias, by a weight as the model has it."""
    found = linear_of(linear)
    if found is None or found.kind != "plain" or set(found.node.users) != {total}:
        return False
    return len(args_of(found.node)) == 2 and "weight" in found.weight.meta and found.by_vectors


def _ends_in(stream: object, linear: Node, total: Node) -> bool:
    """Whether it is a stream that nothing reads after the sum, and nothing shares the memory of; of the dtype that the
    layer gives, since products add up in one dtype alone."""
    if not isinstance(stream, Node) or stream.target not in _FRESH:
        return False
    value, product, result = (node.meta["val"] for node in (stream, linear, total))
    if value.shape != result.shape or not value.dtype == product.dtype == result.dtype:
        return False
    above = ancestors(args_of(linear)[:1], stop=[stream])
    return all(user is total or (user in above and not _may_alias(user)) for user in stream.users)


def _may_alias(node: Node) -> bool:
    """Whether a result may be a view of an argument. Ops of ours never give one."""
    schema = getattr(node.target, "_schema", None)
    return op_of(node.target) is None and (schema is None or any(r.alias_info is not None for r in schema.returns))
