"""Anatomy of a transformer layer, read from its graph: the parts that passes, lowering and measurements need.

Nothing is stored beside the graph: a view computes each part when it is asked for. So it holds after every rewrite
(fused projections, attention over a cache, rows that the device counts). If a part is missing, the answer is a sentence
that says why, which a pass reports as a near miss.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from dgraph.ir.linears import Linear, Projection, linear_of, linears_of, projections_of
from dgraph.ir.node_list import NodeList
from dgraph.ops import OPS, op_of
from dgraph.types.nodes import ancestors, args_of, viewed

aten = torch.ops.aten

ATTENTIONS = (
    "attention",
    "packed_attention",
    "paged_attention",
    "partial_attention",
    "partial_context",
    "sparse_attention",
)
"""Ops that attend, as `Graph.find` takes them."""


@dataclass(frozen=True)
class Projections:
    """The linear layers of an attention.

    Attributes:
        q, k, v: layers of its queries, keys and values; parts of one layer if they are one product.
        o: layer of its output.
    """

    q: Projection
    k: Projection
    v: Projection
    o: Linear


@dataclass(frozen=True)
class GatedUnit:
    """The linear layers of a feed-forward network, down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate.

    Attributes:
        gate, up: parts of one layer if they are one product; gate is `None` for a network without a gate.
        down: layer that reads their product.
    """

    gate: Projection | None
    up: Projection
    down: Linear


@dataclass(frozen=True)
class FeedForward:
    """The network that a layer adds to its residual stream after its attention, or in parallel to it.

    Attributes:
        stream: its input: the residual stream, or the norm that it shares with its attention.
        nodes: its calls, in order; norm, router and experts among them, without calls that its attention shares.
        result: the last of them.
        residual: the sum that adds it to the stream.
        attended: the sum that adds the attention's result, or that contains it already.
    """

    stream: Node
    nodes: tuple[Node, ...]
    result: Node
    residual: Node
    attended: Node


@dataclass(frozen=True)
class Mixing:
    """First addend of a layer to its residual stream: the output projection of its attention.

    Attributes:
        nodes: the calls from the attention to what is added, in order.
        result: the last of them.
        residual: the sum that adds it to the stream.
    """

    nodes: tuple[Node, ...]
    result: Node
    residual: Node


@dataclass(frozen=True)
class Layer:
    """One layer of a graph, by its attention.

    Attributes:
        graph: the graph of the layer.
        attention: the call that attends.
    """

    graph: NodeList
    attention: Node

    @property
    def index(self) -> int | None:
        """Its number; None for an attention outside the layers."""
        index: int | None = self.attention.meta["layer"]
        return index

    @property
    def nodes(self) -> list[Node]:
        """Its calls, in order."""
        return [n for n in self.graph.calls if n.meta["layer"] == self.index]

    @property
    def linears(self) -> list[Linear]:
        """Its linear layers, in order."""
        return linears_of(self.nodes)

    @property
    def norms(self) -> list[Node]:
        """Its norms, in order."""
        return self._calls(OPS["rms_norm"].overload, OPS["rows_norm"].overload, aten.layer_norm.default)

    @property
    def experts(self) -> list[Node]:
        """Its mixtures of experts."""
        return self._calls(OPS["experts"].overload)

    @property
    def router(self) -> Linear | None:
        """The projection that decides which experts run; None without experts."""
        return next((linear for linear in self.linears if linear.routes), None)

    @property
    def write(self) -> Node | str:
        """The call that writes its keys and values to the cache, or why there is not exactly one."""
        writes = self.graph.find("kv_write", self.index) if self.index is not None else []
        if len(writes) != 1:
            return f"{len(writes)} writes of keys and values in the layer of this attention; expected one"
        return writes[0]

    @property
    def queries(self) -> Node:
        """[rows, heads, head_dim], as attention reads them."""
        queries: Node = args_of(self.attention)[0]
        return queries

    @property
    def keys_values(self) -> tuple[Node, Node] | str:
        """Keys and values as attention reads them or the cache is given them, [rows, KV heads, head_dim] each.

        Returns the reason instead if there is not one of each.

        In a captured graph, which is not packed yet, they are [b, heads, t, head_dim], as are its queries.
        """
        if self.attention.target in (OPS["attention"].overload, OPS["packed_attention"].overload):
            _, k, v = args_of(self.attention)[:3]
            return k, v
        updates = self.graph.find("kv_update", self.index) if self.index is not None else []
        write = updates[0] if len(updates) == 1 else self.write
        if isinstance(write, str):
            return write
        k, v = args_of(write)[:2]
        return k, v

    @property
    def attends_to(self) -> list[Node]:
        """The calls of the layer that make its queries, keys and values, in order."""
        given = self.keys_values
        return self.makers(self.queries, *(() if isinstance(given, str) else given))

    @property
    def projections(self) -> Projections | str:
        """The projections of queries, keys, values and of the output, by role; or why one is not found."""
        if isinstance(keys_values := self.keys_values, str):
            return keys_values
        found = projections_of([self.queries, *keys_values])
        if isinstance(found, str):
            return found
        outputs = [linear for linear in self.linears if viewed(linear.source) is self.attention]
        if len(outputs) != 1:
            return f"{len(outputs)} linear layers read the attention; expected one"
        q, k, v = found
        return Projections(q, k, v, outputs[0])

    @property
    def gated_unit(self) -> GatedUnit | str | None:
        """The linear layers of the feed-forward network, or of the expert that all rows share, by role; None where
        there are experts alone; or why they are not found.
        """
        of_attention = self.projections
        if isinstance(of_attention, str):
            return of_attention
        others = {p.linear.node for p in (of_attention.q, of_attention.k, of_attention.v)} | {of_attention.o.node}
        mine = [linear for linear in self.linears if linear.node not in others and not linear.routes]
        if not mine:
            return None if self.experts else "the layer has no linear layers beside those of its attention"
        *_, down = mine
        found = _unit_before(down)
        if isinstance(found, str):
            return found
        used = {p.linear.node for p in (found.gate, found.up) if p is not None} | {down.node}
        if beside := [linear.node.name for linear in mine if linear.node not in used]:
            return f"the layer also has the linear layers {', '.join(beside)}"
        return found

    def makers(self, *values: Node) -> list[Node]:
        """The calls of the layer that values are computed by, in order."""
        others = [n for n in self.graph.nodes if n.meta["layer"] != self.index or n.op != "call_function"]
        found = ancestors(values, stop=others) - set(others)
        return [n for n in self.graph.calls if n in found]

    @property
    def feed_forward(self) -> FeedForward | str:
        """The feed-forward network after the attention, or why there is no such network."""
        graph, layer = self.graph, self.index
        if layer is None:
            return "an attention outside the layers has no feed-forward network"
        if graph.find("feature_take", layer) or graph.find("feature_merge", layer):
            return "the layer is gated already"
        ends = [
            n
            for n in self.nodes
            if n.target is aten.add.Tensor
            and graph.row_set(n) is not None
            and any(u.meta["layer"] != layer for u in n.users)
        ]
        if len(ends) != 1:
            return f"{len(ends)} sums leave the layer; expected one, of residual stream and feed-forward network"
        residual = ends[0]
        if _terms(residual) is None:
            return f"the layer ends in {residual.name}, which is not a plain sum of two values"
        for stream, result in (args_of(residual), args_of(residual)[::-1]):
            above = ancestors([result], stop=[stream])
            if stream in above and stream is not result and self.attention in ancestors([stream]):
                break
        else:
            return self._parallel_to_attention(residual)
        nodes = self._between(stream, above)
        if (beside := _beside(stream, nodes)) is not None:
            return f"the feed-forward network also reads {beside.name}, beside the residual stream"
        return FeedForward(stream, tuple(nodes), result, residual, stream)

    def _parallel_to_attention(self, end: Node) -> FeedForward | str:
        """The feed-forward network of a layer that ends in a sum of the stream, the attention and that network."""
        added = self._added(end)
        before = ancestors([self.attention])
        by_attention = [term for term in added if self.attention in ancestors([term])]
        if not by_attention:
            return "what the layer adds last does not read its attention"
        own = [term for term in added if term not in by_attention and term not in before and term in self.nodes]
        if len(by_attention) != 1 or len(own) != 1:
            return (
                f"the layer ends in a sum of {len(added)} values, of which {len(by_attention)} are computed from the "
                f"attention and {len(own)} beside it; expected one of each"
            )
        (result,) = own
        above = ancestors([result])
        nodes = without([n for n in self.nodes if n in above and not of_weights(n)], before)
        read = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in nodes and not of_weights(a))
        if len(read) != 1:
            return f"the feed-forward network reads {', '.join(node.name for node in read)}; expected one value"
        (stream,) = read
        return FeedForward(stream, tuple(nodes), result, added[result], added[by_attention[0]])

    def _added(self, end: Node) -> dict[Node, Node]:
        """The terms of a sum, through sums of the layer that nothing else reads; and the sum that adds each."""
        found, todo = {}, [end]
        while todo:
            total = todo.pop()
            for term in _terms(total) or ():
                if _terms(term) is not None and term in self.nodes and len(term.users) == 1:
                    todo.append(term)
                else:
                    found[term] = total
        return found

    def mixing(self, stream: Node) -> Mixing | str:
        """From the attention to a sum of the residual stream, `FeedForward.attended`, or why there is no such way."""
        terms = _terms(stream)
        if terms is None:
            return f"what the attention gives goes into {stream.name}, which is not a plain sum of two values"
        by_attention = [t for t in terms if self.attention in ancestors([t])]
        if len(by_attention) != 1:
            return f"{len(by_attention)} terms of {stream.name} are computed from the attention; expected one"
        (mixed,) = by_attention
        nodes = self._between(self.attention, ancestors([mixed], stop=[self.attention]))
        if (beside := _beside(self.attention, nodes)) is not None:
            return f"the output projection also reads {beside.name}, beside the attention"
        if any(user not in nodes for user in self.attention.users):
            return "the attention is read by more than its output projection"
        return Mixing(tuple(nodes), mixed, stream)

    def _between(self, start: Node, above: Collection[Node]) -> list[Node]:
        """The calls among `above` that are computed from a value, in order; the value itself left out."""
        found: dict[Node, None] = {}
        for node in self.graph.calls:
            if node in above and node is not start and any(a is start or a in found for a in node.all_input_nodes):
                found[node] = None
        return list(found)

    def _calls(self, *targets: object) -> list[Node]:
        return [n for n in self.nodes if n.target in targets]


def layers_of(graph: NodeList) -> list[Layer]:
    """The layers of a graph, in order: one for each call that attends."""
    return [Layer(graph, n) for n in sorted(n for op in ATTENTIONS for n in graph.find(op))]


def without(mine: Sequence[Node], others: Collection[Node]) -> list[Node]:
    """The calls of `mine` that are none of `others`, in order. Parts of a result that both read stay with it: rows are
    gathered of tensors, not of a tuple.
    """
    return [n for n in mine if n not in others and not (n.target is operator.getitem and args_of(n)[0] in others)]


def windowed(attention: Node) -> str:
    """Reason why rows do not see all keys before a limit, which some passes assume; "" if they see them all."""
    op = op_of(attention.target)
    window = op.values("window", args_of(attention)) if op is not None and "window" in op.arguments else []
    return f"rows see a window of {window[0]} positions, not all keys before them" if any(window) else ""


def with_added(attention: Node) -> str:
    """Reason why a row is no other at its position, which passes that keep values by position assume; "" if it is."""
    op = op_of(attention.target)
    own = op.values(op.added, args_of(attention)) if op is not None else []
    given = any(value is not None for value in own)
    return "some rows are added, and stand at the positions of others; leave AddRows out" if given else ""


def in_ranges(attention: Node) -> str:
    """Reason of `windowed` or of `with_added`; "" if neither has one."""
    return windowed(attention) or with_added(attention)


def of_weights(node: Node) -> bool:
    """True if a value is computed from weights alone."""
    return all("input" not in n.meta for n in ancestors([node]))


def _unit_before(down: Linear) -> GatedUnit | str:
    """The projections that a down projection reads, or why they are not found."""
    unit = viewed(down.source)
    if (linear := linear_of(unit)) is not None and linear.kind == "gated":
        outputs = linear.shape[0]
        return GatedUnit(Projection(linear, 0, outputs // 2), Projection(linear, outputs // 2, outputs), down)
    factors = [factor for factor in unit.all_input_nodes if unit.target is aten.mul.Tensor]
    if len(factors) != 2:
        factors = [unit]
    factors.sort(key=lambda factor: linear_of(viewed(factor)) is not None)  # a factor without activation is no gate
    found = projections_of(factors)
    if isinstance(found, str):
        return found
    *gates, up = found
    return GatedUnit(gates[0] if gates else None, up, down)


def _terms(total: Node) -> tuple[Node, Node] | None:
    """The two values that a plain sum adds; None if it is no such sum."""
    args = args_of(total)
    if total.target is not aten.add.Tensor or total.kwargs or not all(isinstance(arg, Node) for arg in args):
        return None
    return args[0], args[1]


def _beside(start: Node, nodes: Sequence[Node]) -> Node | None:
    """First value that calls read besides a start, each other and values of weights alone; None without one."""
    read = (arg for node in nodes for arg in node.all_input_nodes)
    return next((a for a in read if a is not start and a not in nodes and not of_weights(a)), None)
