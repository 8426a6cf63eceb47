"""What a step takes along on a GPU, where every pass over memory counts and a compiled region cannot have it.

Sums of the residual stream: a linear layer whose result is added to the stream writes it, and the sum reads it again,
two passes beside those that the sum itself makes. A product of matrices can add to what its result holds already. So
where nothing reads the stream again, its buffer becomes the sum's, and what follows (a norm, mostly) reads one value
instead of two.

Rotations of queries: attention loads each query once, and can rotate it there. A rotary embedding in front of it is a
pass of its own, unless what makes the queries (a norm of heads) is one anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.graph import Graph
from dgraph.nodes import args_of, op_name
from dgraph.ops import OPS, op_of, rope

aten = torch.ops.aten

_FRESH = (aten.add.Tensor, aten.embedding.default)
"""What makes a stream whose buffer is nobody else's."""
_VIEWS = {"reshape", "slice", "split_with_sizes", "getitem", "unsqueeze"}
"""What gives no new memory to what it is of."""


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

    @property
    def within(self) -> Node:
        """The call that becomes a part of it."""
        return self.linear

    @property
    def made(self) -> Node:
        """The call that it stands for."""
        return self.total


@dataclass(frozen=True)
class Rotation:
    """paged_attention of queries that it rotates itself.

    Attributes:
        q: [rows, heads, head_dim]; not rotated.
        cos, sin: [rows, 1, head_dim].
        rope: the rotary embedding; nothing but the attention reads it.
        attention: the call.
    """

    q: Node
    cos: Node
    sin: Node
    rope: Node
    attention: Node

    @property
    def inputs(self) -> tuple[Node, ...]:
        """What is read: queries, cos, sin, and the other values that the attention reads."""
        others = (arg for arg in args_of(self.attention)[1:] if isinstance(arg, Node))
        return tuple(dict.fromkeys((self.q, self.cos, self.sin, *others)))

    @property
    def within(self) -> Node:
        """The call that becomes a part of it."""
        return self.rope

    @property
    def made(self) -> Node:
        """The call that it stands for."""
        return self.attention


Fused = Sum | Rotation
"""What takes another call along."""


def add_product(stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """stream += x @ weight.T, rounded once; returns the stream."""
    return stream.addmm_(x, weight.t())


def attend_rotated(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
) -> Tensor:
    """dgraph::paged_attention of rope(q, cos, sin)."""
    rest = (k_cache, v_cache, page_table, cu_rows, limit, scale)
    if q.device.type != "cuda":
        turned: Tensor = OPS["paged_attention"].overload(rope.reference(q, cos, sin), *rest)
        return turned
    from dgraph.ops.triton.paged_attention import kernel

    with torch.cuda.device(q.device):
        return kernel(q, *rest, rotation=(cos, sin))


def fused_of(graph: Graph) -> dict[Node, Fused]:
    """Everything in a graph that takes something along, by the node that it stands for."""
    return {**sums_of(graph), **rotations_of(graph)}


def rotations_of(graph: Graph) -> dict[Node, Rotation]:
    """The attentions of a graph that can rotate their queries, by node."""
    found = {}
    for attention in graph.find("paged_attention"):
        turned = args_of(attention)[0]
        op = op_of(turned.target)
        if op is None or op.name != "rope" or set(turned.users) != {attention} or turned in args_of(attention)[1:]:
            continue
        q, cos, sin = args_of(turned)
        value, angles = q.meta["val"], cos.meta["val"]
        heads = value.dim() == 3 and value.dtype in (torch.bfloat16, torch.float16, torch.float32)
        rows = {graph.row_set(node) for node in (q, cos, sin)}
        shaped = angles.shape[1:] == sin.meta["val"].shape[1:] == (1, value.shape[-1])
        if heads and shaped and len(rows) == 1 and turned.meta["val"].dtype == value.dtype and _of_a_layer(q):
            found[attention] = Rotation(q, cos, sin, turned, attention)
    return found


def _of_a_layer(node: Node) -> bool:
    """Whether a value is what a linear layer gives, as it lies in memory."""
    while op_name(node.target) in _VIEWS:
        node = args_of(node)[0]
    return node.target is aten.linear.default


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
