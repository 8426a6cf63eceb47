"""Linear layers of a graph, and the outputs of a layer that make a value.

Nothing is stored beside the graph: each function reads it as it is, after any passes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from dgraph.ir.node_list import NodeList
from dgraph.ir.stored_weights import Stored, stored_of
from dgraph.ops import OPS, op_of
from dgraph.types.nodes import args_of, op_name, viewed

aten = torch.ops.aten

HEADS = ("lm_head", "lm_head_adjusted", "lm_head_measured", "lm_head_part")
"""Ops that are an LM head, as `Graph.find` takes them.

Their first arguments are those of a linear layer. The others are those of dgraph::lm_head and more.
"""


@dataclass(frozen=True)
class Linear:
    """A linear layer, x @ weight.T + bias.

    Attributes:
        node: the call.
        x: its input, [..., inputs].
        weight: [outputs, inputs]: a weight, or a value made of one.
        bias: [outputs], or None.
        kind: "plain"; "counted", whose rows the device counts; "gated", silu(gate) * up of such a one; "head", an LM
            head that keeps no logits.
        count: offsets whose last entry is the number of live rows; None for a plain one.
    """

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    kind: str
    count: Node | None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the weight."""
        rows, columns = self.weight.meta["val"].shape
        return int(rows), int(columns)

    @property
    def source(self) -> Node:
        """Its input before rounding to 8 bits."""
        is_rounded = self.x.target is OPS["round_rows"].overload
        source: Node = args_of(self.x)[0] if is_rounded else self.x
        return source

    @property
    def by_vectors(self) -> bool:
        """True if it reads one vector per row."""
        return bool(self.x.meta["val"].dim() == 2)

    @property
    def stored(self) -> Stored | None:
        """Its weight as it is stored; None if weight or bias are no weights of the model, but computed."""
        return stored_of(self.weight) if self.bias is None or "weight" in self.bias.meta else None

    @property
    def routes(self) -> bool:
        """True if it decides which experts run. Its sums must keep their order, or near ties would be decided anew."""
        return any((op := op_of(user.target)) is not None and op.name == "route" for user in self.node.users)


def linear_of(node: object) -> Linear | None:
    """The linear layer that a node is; None for any other node."""
    if not isinstance(node, Node):
        return None
    x, weight, bias, count = (*args_of(node), None, None, None, None)[:4]
    if node.target is aten.linear.default and not node.kwargs:
        return Linear(node, x, weight, bias, "plain", None)
    op = op_of(node.target)
    if op is OPS["rows_linear"] or op is OPS["rows_glu"]:
        return Linear(node, x, weight, bias, "counted" if op is OPS["rows_linear"] else "gated", count)
    return None


def linears_of(nodes: Iterable[Node], *kinds: str) -> list[Linear]:
    """The linear layers among nodes, in order; of some kinds if given."""
    return [found for n in nodes if (found := linear_of(n)) is not None and (not kinds or found.kind in kinds)]


def split_of(linear: Linear) -> Node | None:
    """The call that splits all outputs of a linear layer; None if something else reads them."""
    users = list(linear.node.users)
    if len(users) != 1 or users[0].target is not aten.split_with_sizes.default:
        return None
    dim = (*args_of(users[0]), 0)[2]
    return users[0] if dim in (-1, linear.node.meta["val"].dim() - 1) else None


@dataclass(frozen=True)
class Projection:
    """Outputs of a linear layer that make one value: all of them, or a part if one product makes several values.

    Attributes:
        linear: the layer.
        begin, end: the outputs, which are rows of the weight and elements of the bias.
    """

    linear: Linear
    begin: int
    end: int


def projection_of(value: Node) -> Projection | str:
    """The projection of a value whose rows were normed, rotated, reshaped or gathered since; or why none is found."""
    node, part, of_each_head = value, None, False
    while (linear := linear_of(node)) is None:
        if node.op != "call_function" or not args_of(node):
            return f"{value.name} is computed from {node.name}, not by a linear layer"
        source = args_of(node)[0]
        if node.target is operator.getitem and source.target is aten.split_with_sizes.default:
            if part is not None:
                return f"{value.name} is a part of a part of a product"
            part = args_of(node)[1]
            whole, sizes, dim = (*args_of(source), 0)[:3]
            of_each_head = dim in (-1, whole.meta["val"].dim() - 1) and whole.meta["val"].dim() > 2
        elif node.target is operator.getitem and source.target is OPS["compact"].overload:
            source = args_of(source)[0][args_of(node)[1]]
        node = source[0] if isinstance(source, (list, tuple)) else source
        if not isinstance(node, Node):
            return f"{value.name} is not computed from a value over rows"
    outputs = linear.shape[0]
    if part is None:
        return Projection(linear, 0, outputs)
    if of_each_head and sum(sizes) != outputs and whole.meta["val"].shape[-2] * sum(sizes) == outputs:
        return f"{value.name} is a part of each head that {linear.node.name} gives, not a run of its outputs"
    each = outputs // sum(sizes)  # a split of heads counts heads
    return Projection(linear, each * sum(sizes[:part]), each * sum(sizes[: part + 1]))


def projections_of(values: Iterable[Node]) -> list[Projection] | str:
    """The projection of each of several values; or why none is found for one of them."""
    found: list[Projection] = []
    for value in values:
        projection = projection_of(value)
        if isinstance(projection, str):
            return projection
        found.append(projection)
    return found


def heads_of(graph: NodeList) -> list[Node]:
    """The LM heads that keep no logits."""
    return [node for name in HEADS for node in graph.find(name)]


def head_of(graph: NodeList) -> Linear | str:
    """The LM head, which gives logits or decides without keeping them; or why it is not found.

    In a sharded graph it has the ids of a rank.
    """
    heads = heads_of(graph)
    if len(heads) == 1:
        x, weight, bias = args_of(heads[0])[:3]
        return Linear(heads[0], x, weight, bias, "head", None)
    if heads:
        return f"{len(heads)} LM heads; expected one"
    if "logits" not in graph.outputs:
        return f"the graph returns {', '.join(graph.outputs) or 'nothing'}, no logits"
    logits = graph.result("logits")
    if graph.sharding is not None and (gather := gathered(logits)) is not None:
        logits = args_of(gather)[0]
    linear = linear_of(logits)
    if linear is None or linear.kind != "plain":
        return f"the logits come from {op_name(logits.target)}, not from a linear LM head"
    return linear


def capped_head(graph: NodeList) -> tuple[Linear, float | None] | str:
    """The linear layer of the logits, and their cap; or why it is not found.

    The cap is c if the logits are c * tanh(z / c) of the layer's results z, else None. In a sharded graph the layer has
    the ids of a rank.
    """
    logits = graph.result("logits")
    gather = gathered(logits)
    node, cap = _before_cast(logits if gather is None else args_of(gather)[0]), None
    if node.target is aten.mul.Tensor and isinstance(args_of(node)[1], float):
        bounded, limit = args_of(node)
        scaled = args_of(bounded)[0] if bounded.target is aten.tanh.default else node
        if scaled.target is aten.div.Tensor and args_of(scaled)[1] == limit:
            node, cap = _before_cast(args_of(scaled)[0]), limit
    linear = linear_of(node)
    if linear is None or linear.kind != "plain":
        return f"the logits come from {op_name(logits.target)}, not from a linear LM head"
    return linear, cap


def _before_cast(value: Node) -> Node:
    return args_of(value)[0] if op_name(value.target) == "to" else value


def gathered(logits: Node) -> Node | None:
    """The call that gathers logits of all ids from those that each rank has; None if they are not gathered."""
    node = args_of(logits)[0] if logits.target is aten.slice.Tensor else logits
    return node if node.target is OPS["all_gather"].overload else None


def embedding_of(graph: NodeList) -> Node | str:
    """The call that looks up the tokens' vectors, embedding(weight, input_ids), or those that a rank has; or why it is
    not one.
    """
    tokens, targets = graph.input("input_ids"), (aten.embedding.default, OPS["embedding_part"].overload)
    found = [n for n in graph.calls if n.target in targets and viewed(args_of(n)[1]) is tokens]
    return found[0] if len(found) == 1 else f"{len(found)} embeddings read input_ids; expected one"


def unit_of(linear: Node) -> Node | str | None:
    """The product silu(gate) * up after a linear layer; why it cannot be told or replaced; None if it is no gate."""
    if _calls(linear.users, aten.silu.default):
        return "its result is a gate alone; run FuseProjections before it, which makes one product of gate and up"
    for split in _calls(linear.users, aten.split_with_sizes.default):
        silus = [silu for part in split.users for silu in _calls(part.users, aten.silu.default)]
        if silus:
            return _product_of_unit(linear, split, silus)
    return None


def _product_of_unit(linear: Node, split: Node, silus: Sequence[Node]) -> Node | str:
    """The product of silu(gate), one of the given calls, and up; or why it is not found."""
    _, sizes, *rest = args_of(split)
    dim = rest[0] if rest else 0
    if len(sizes) != 2 or sizes[0] != sizes[1] or dim not in (1, -1):
        return f"it is split into {list(sizes)} along dimension {dim}, not into gate columns and as many up columns"
    if any(args_of(args_of(silu)[0])[1] != 0 for silu in silus):
        return "silu is of the second half; the columns of the gate must be the first"
    silu, gate = silus[0], args_of(silus[0])[0]
    second = [part for part in split.users if args_of(part)[1] == 1]
    products = [(n, up) for up in second for n in _calls(silu.users, aten.mul.Tensor) if {*args_of(n)} == {silu, up}]
    if not products:
        return "silu of the first half is not multiplied by the second half"
    product, up = products[0]
    for what, value, readers in (
        ("its result", linear, {split}),
        ("the split", split, {gate, up}),
        ("the gate", gate, {silu}),
        ("silu of the gate", silu, {product}),
        ("the second half", up, {product}),
    ):
        others = [user for user in value.users if user not in readers]
        if others:
            return f"{op_name(others[0].target)} reads {what} too, so it must stay"
    return product


def _calls(nodes: Iterable[Node], target: object) -> list[Node]:
    return [node for node in nodes if node.target is target]
