"""Sums of the residual stream that the product in front of them adds up in place.

A linear layer whose result is added to the residual stream writes it, and the sum reads it again: two passes over
memory beside those that the sum itself makes. A product of matrices can add to what its result holds already. So where
nothing reads the stream again, its buffer becomes the sum's, and what follows the sum (a norm, mostly) reads one value
instead of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.graph import Graph
from dgraph.nodes import args_of
from dgraph.ops import op_of

aten = torch.ops.aten

_FRESH = (aten.add.Tensor, aten.embedding.default)
"""What makes a stream whose buffer is nobody else's."""


@dataclass(frozen=True)
class Sum:
    """A sum of the residual stream and a linear layer without a bias.

    Attributes:
        stream: [rows, d_out].
        x: [rows, d_in]; what the layer multiplies.
        weight: [d_out, d_in].
        linear: the layer; nothing but the sum reads it.
        total: the sum; it takes over the buffer of the stream.
    """

    stream: Node
    x: Node
    weight: Node
    linear: Node
    total: Node

    @property
    def inputs(self) -> tuple[Node, Node, Node]:
        """What is read: the stream, x and the weight."""
        return self.stream, self.x, self.weight


def add_product(stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """stream += x @ weight.T, rounded once; returns the stream."""
    return stream.addmm_(x, weight.t())


def sums_of(graph: Graph) -> dict[Node, Sum]:
    """The sums of a graph that can be added up in place, by node."""
    results = set(graph.results().values())
    found: dict[Node, Sum] = {}
    for total in graph.calls:
        if total.target is not aten.add.Tensor or total.kwargs or total in results:
            continue
        for stream, linear in (args_of(total), args_of(total)[::-1]):
            if _is_layer(linear, total) and _ends_in(stream, linear, total) and stream not in results:
                x, weight = args_of(linear)
                found[total] = Sum(stream, x, weight, linear, total)
                break
    return found


def _is_layer(linear: object, total: Node) -> bool:
    """Whether it is a linear layer of the sum alone, without a bias, by a weight as the model has it."""
    if not isinstance(linear, Node) or linear.target is not aten.linear.default or set(linear.users) != {total}:
        return False
    x, *rest = args_of(linear)
    return len(rest) == 1 and not linear.kwargs and "weight" in rest[0].meta and x.meta["val"].dim() == 2


def _ends_in(stream: object, linear: Node, total: Node) -> bool:
    """Whether it is a stream that nothing reads behind the sum, and nothing shares the memory of."""
    if not isinstance(stream, Node) or stream.target not in _FRESH:
        return False
    value, result = stream.meta["val"], total.meta["val"]
    if value.shape != result.shape or value.dtype != result.dtype:
        return False
    above = _ancestors(linear, stream)
    return all(user is total or (user in above and not _may_alias(user)) for user in stream.users)


def _may_alias(node: Node) -> bool:
    """Whether a result may be a view of an argument. Ops of ours never give one."""
    schema = getattr(node.target, "_schema", None)
    return op_of(node.target) is None and (schema is None or any(r.alias_info is not None for r in schema.returns))


def _ancestors(node: Node, stop: Node) -> set[Node]:
    """Everything that a node is computed from, down to `stop`."""
    found = {stop}
    queue: list[Node] = [node]
    while queue:
        for above in queue.pop().all_input_nodes:
            if above not in found:
                found.add(above)
                queue.append(above)
    return found
