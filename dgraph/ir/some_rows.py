"""Calls that run on some rows of a row set, and their results kept for the other rows.

`Graph.run_rows` runs a layer, or its feed-forward network, on flagged rows. `SomeRows` has its parts: a list of the
rows, gathered values, the calls again on these, and a paged cache for each result.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from dgraph.ir.layers import FeedForward, Layer, of_weights, windowed, with_added, without
from dgraph.ir.linears import linear_of
from dgraph.ir.listed import Listed
from dgraph.ops import OPS, op_of
from dgraph.types.nodes import args_of, op_name
from dgraph.types.shapes import OWN, Dim, InputSpec, of_window, page_table

if TYPE_CHECKING:
    from dgraph.ir.graph import Graph

aten = torch.ops.aten


@dataclass(frozen=True)
class Place:
    """Place of the rows of a row set in paged caches.

    Attributes:
        positions: i64[N].
        page_table: i32[b, P].
        cu_rows: i32[b+1].
    """

    positions: Node
    page_table: Node
    cu_rows: Node

    @property
    def nodes(self) -> tuple[Node, Node, Node]:
        """The three of them, in the order in which ops take them."""
        return self.positions, self.page_table, self.cu_rows


@dataclass(frozen=True)
class RowLayer:
    """A layer that can run on some of its rows.

    Attributes:
        attention, write: its attention, and the call that writes its keys and values.
        mixing: the calls from the attention to its addend to the residual stream, in order.
        mixed: the last of them.
        ffn: its feed-forward network.
    """

    attention: Node
    write: Node
    mixing: tuple[Node, ...]
    mixed: Node
    ffn: FeedForward

    @property
    def queries_keys_values(self) -> tuple[Node, Node, Node]:
        """[rows, heads, head_dim] each, as the attention and the cache are given them."""
        k, v = args_of(self.write)[:2]
        return args_of(self.attention)[0], k, v

    @property
    def place(self) -> Place:
        """Place of its rows in its caches of keys and values."""
        return Place(*args_of(self.write)[4:7])


class SomeRows:
    """Some rows of a row set, and the calls that run on these alone.

    A value on them is a buffer for all rows. Its row i belongs to the i-th listed row, and rows after the last are
    padding.

    Attributes:
        graph: the graph of the rows.
        rows: the list.
        new: a value on these rows, by the value on all rows.
        by: the pass.
    """

    def __init__(self, graph: Graph, rows: Listed, by: str):
        self.graph, self.rows, self.by = graph, rows, by
        self.new: dict[Node, Node] = {}

    def take(self, values: Iterable[Node], before: Node, like: Node | None = None) -> None:
        """Gather values that are there for all rows, unless they are in `new`."""
        wanted = [value for value in dict.fromkeys(values) if value not in self.new]
        if wanted:
            gathered = self.graph.call(OPS["compact"], (wanted, self.rows.index), before=before, by=self.by, like=like)
            self.new.update(zip(wanted, self.graph.parts(gathered, len(wanted), self.by), strict=True))

    def on(self, value: Node) -> Node:
        """A value over all rows on these rows alone, gathered as early as possible; padding rows hold anything."""
        self.take([value], max(self.rows.cu_rows, value).next)
        return self.new[value]

    def run(self, nodes: Sequence[Node], before: Node, also: Sequence[Node] = (), like: Node | None = None) -> None:
        """The calls `nodes` again, in order, on these rows, before a node; what they read is gathered.

        Linear layers run on as many rows as are listed. A row after them is routed to no expert. The projection that
        decides which experts run stays as it is: its sums keep their order, or near ties would be decided anew.

        Args:
            nodes: calls of which `cannot_run` says nothing.
            before: the node that the new calls come before.
            also: further values to gather.
            like: the node that gives layer and role of the gathering call; `before` if None.
        """
        read = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in nodes and not of_weights(a))
        self.take([*(a for a in read if _over_rows(self.graph, a)), *also], before, like)
        for node in nodes:
            self.new[node] = self._again(node, before)

    def _again(self, node: Node, before: Node) -> Node:
        args: tuple[Any, ...] = torch.fx.map_arg(args_of(node), lambda n: self.new.get(n, n))
        target: Any = node.target
        made_by = node.meta["by"]
        linear = linear_of(node)
        if linear is not None and linear.kind == "plain" and linear.by_vectors and not linear.routes:
            target, made_by = OPS["rows_linear"], self.by
            weights = (linear.x, linear.weight, linear.bias)
            args = (*torch.fx.map_arg(weights, lambda n: self.new.get(n, n)), self.rows.cu_rows)
        elif target is OPS["experts"].overload:
            args = (args[0], nowhere(self.graph, args[1], self.rows.index, node, before, self.by), *args[2:])
        call = self.graph.call(target, args, node.kwargs, before=before, by=made_by, like=node)
        call.meta["source"] = node.meta.get("source", "")
        return call

    def merged(self, name: str, result: Node, place: Place, before: Node) -> Node:
        """A result for all rows: on these as it is now, on the others as it was when they last ran.

        It is kept by position in the cache `<name>_cache_<layer>`. A row without a page is given 0 unless it is listed.
        """
        kept = kept_by(self.graph, name, result, self._window(place))
        args = (self.new[result], self.rows.index, kept, *place.nodes)
        return self.graph.call(OPS["feature_merge"], args, before=before, by=self.by, like=result)

    def taken(self, name: str, result: Node, place: Place, before: Node) -> Node:
        """As `merged`, of rows that all have pages. The cache is read where the result is read, by the same kernel.

        `new` must have the positions.
        """
        kept = kept_by(self.graph, name, result, self._window(place))
        new, positions = self.new[result], self.new[place.positions]
        write = (new, kept, positions, place.page_table, self.rows.cu_rows)
        self.graph.call(OPS["feature_write"], write, before=before, by=self.by, like=result)
        read = (kept, _slots(self.graph, kept, place, self.by))
        return self.graph.call(OPS["feature_take"], read, before=before, by=self.by, like=result)

    def _window(self, place: Place) -> int:
        return self.graph.inputs[place.page_table.meta["input"]].window


def kept_by(graph: Graph, name: str, value: Node, window: int) -> Node:
    """The cache `<name>_cache_<layer>` of a value that has a row for each position, of the value's sizes and dtype.

    window: of the cache's page table; 0 for the table of all positions.
    """
    kept = value.meta["val"]
    shape: tuple[Dim, ...] = (of_window("pages", window), "page", *map(int, kept.shape[1:]))
    return graph.add_input(InputSpec(f"{name}_cache_{value.meta['layer']}", kept.dtype, shape))


def own_table(graph: Graph) -> InputSpec:
    """The page table of caches from which each row reads what was kept for its own position; see `Graph.cache_of`."""
    return page_table(OWN if graph.spec.attention == "block_causal" else 0)


def listed(graph: Graph, flags: Node, cu_rows: Node, before: Node, by: str, like: Node | None = None) -> Listed:
    """The list of flagged rows: the one that is there, or a new one before a node."""
    for user in flags.users:
        if (op := op_of(user.target)) is not None and op.name == "list_kept":
            return graph.listed(user, by)
    kept = graph.call(OPS["list_kept"], (flags, cu_rows), before=before, by=by, like=like)
    return graph.listed(kept, by)


def cannot_run(nodes: Iterable[Node]) -> str | None:
    """Reason why calls cannot run on some of their rows, or None."""
    for node in nodes:
        op = op_of(node.target)
        # A count counts all rows, so its op cannot run on some; values of weights have no rows.
        if op is not None and (not op.by_row or op.count is not None) and not of_weights(node):
            return f"{op_name(node.target)} is not known to act row by row"
    return None


def row_network(graph: Graph, attention: Node) -> FeedForward | str:
    """See `Graph.row_network`."""
    if reason := with_added(attention):
        return reason
    found = Layer(graph, attention).feed_forward
    return found if isinstance(found, str) else cannot_run(found.nodes) or found


def row_layer(graph: Graph, attention: Node) -> RowLayer | str:
    """See `Graph.row_layer`."""
    if seen := windowed(attention):
        return seen
    layer = Layer(graph, attention)
    ffn, write = row_network(graph, attention), layer.write
    if isinstance(ffn, str):
        return ffn
    if isinstance(write, str):
        return write
    k, v = args_of(write)[:2]
    if not graph.row_set(k) == graph.row_set(attention) == graph.row_set(ffn.residual):
        return "rows are evicted in the layer"
    projections = layer.makers(layer.queries, k, v)
    for node in projections:
        for user in node.users:
            if user not in (*projections, *ffn.nodes, ffn.stream, write, attention):
                return f"{op_name(user.target)} also reads {node.name}, for all rows"
    mixing = layer.mixing(ffn.attended)
    if isinstance(mixing, str):
        return mixing
    reason = cannot_run([*projections, *mixing.nodes])
    return reason or RowLayer(attention, write, mixing.nodes, mixing.result, ffn)


def run_network(graph: Graph, network: FeedForward, flags: Node, place: Place, by: str) -> SomeRows:
    """See `Graph.run_rows`."""
    some = SomeRows(graph, listed(graph, flags, place.cu_rows, flags.next, by), by)
    some.run(network.nodes, network.residual, [place.positions], network.nodes[0])
    kept = some.taken("f", network.result, place, network.residual)
    network.residual.replace_input_with(network.result, kept)
    return some


def run_layer(graph: Graph, layer: RowLayer, flags: Node, given: Sequence[Node], by: str) -> SomeRows:
    """See `Graph.run_rows`."""
    attention, write, ffn, place = layer.attention, layer.write, layer.ffn, layer.place
    q, k, v = layer.queries_keys_values
    some = SomeRows(graph, listed(graph, flags, place.cu_rows, write, by), by)
    parts = Layer(graph, attention)
    of_rows = [a for a in attention.all_input_nodes if a is not q and _over_rows(graph, a)]
    nodes = without(parts.makers(q, k, v), parts.makers(*given))
    some.run(nodes, write, [*given, place.positions, *of_rows])
    on_rows = {**some.new, place.cu_rows: some.rows.cu_rows}
    for node in (write, attention):
        args = torch.fx.map_arg(args_of(node), lambda n: on_rows.get(n, n))
        some.new[node] = graph.call(node.target, args, node.kwargs, before=node, by=by)
    graph.fx.erase_node(write)
    for name, made, result, total in (
        ("a", layer.mixing, layer.mixed, ffn.attended),
        ("f", ffn.nodes, ffn.result, ffn.residual),
    ):
        some.run(made, total, like=made[0])
        total.replace_input_with(result, some.merged(name, result, place, total))
    return some


def nowhere(graph: Graph, choice: Node, index: Node, like: Node, before: Node, by: str) -> Node:
    """`choice`, with expert -1 for the rows after the listed ones."""
    unused = graph.call(aten.lt.Scalar, (index, 0), before=before, by=by, like=like)
    unused = graph.call(aten.unsqueeze.default, (unused, 1), before=before, by=by, like=like)
    return graph.call(aten.masked_fill.Scalar, (choice, unused, -1), before=before, by=by, like=like)


def _over_rows(graph: Graph, node: Node) -> bool:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return graph.symbols.row_set(first) is not None


def _slots(graph: Graph, cache: Node, place: Place, by: str) -> Node:
    """Slots of the rows, the same in all caches of a table: an existing call, or a new one as early as possible."""
    for node in graph.find("row_slots"):
        if args_of(node)[:3] == place.nodes:
            return node
    args = (*place.nodes, cache)
    made = [node for node in graph.calls if node in place.nodes]
    if not made:  # before the layers, so that the first reads like the others
        return graph.call(OPS["row_slots"], args, before=graph.calls[0], by=by, like=graph.output)
    following = made[-1].next
    while following.target is operator.getitem:
        following = following.next
    return graph.call(OPS["row_slots"], args, before=following, by=by, like=made[-1])
