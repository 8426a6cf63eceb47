"""Nodes of two graphs that stand for the same value, by the structure of the graphs."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass

from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.numerics.run import fed_nodes
from dgraph.ops import op_of
from dgraph.text.listing import Line, Ref, listing
from dgraph.types.nodes import ancestors, args_of


@dataclass(frozen=True)
class Named:
    """A value of a graph as dumps name it.

    Attributes:
        ref: layer and name.
        line: the call that makes it.
    """

    ref: Ref
    line: Line

    def __str__(self) -> str:
        layer = "" if self.ref.layer is None else f"layers[{self.ref.layer}]."
        role = f" ({self.line.role})" if self.line.role else ""
        return f"{layer}{self.ref.name} {self.line.op}{role}"


class Pairing:
    """The nodes of a second graph with the nodes of a first one that they stand for.

    A call with weights stands for the call with the same weights in the same layer. Any other call stands for the call
    of the same op in the same layer whose first run-time argument is the same value. Gathered rows count as the rows
    that they were gathered from. So captures in two dtypes pair, as do weights in two formats, and two recipes.

    Attributes:
        named: by node of the second graph, its name.
    """

    def __init__(self, before: Graph, after: Graph):
        self.named = names_of(after)
        self._same: dict[Node, Node] = {}
        if before is after:
            self._same = {node: node for node in after.calls}
            return
        fed_before, fed_after = fed_nodes(before), fed_nodes(after)
        waiting: dict[Hashable, list[Node]] = {}
        for node in before.calls:
            if node in fed_before:
                waiting.setdefault(_key(node, fed_before, {}), []).append(node)
        for node in after.calls:
            found = waiting.get(_key(node, fed_after, self._same)) if node in fed_after else None
            if found:
                self._same[node] = found.pop(0)

    def same(self, node: Node) -> Node | None:
        """See `dgraph.numerics.parting.Same`."""
        return self._same.get(node)


def names_of(graph: Graph) -> dict[Node, Named]:
    """The values of a graph by their nodes."""
    return {
        node: Named(Ref("value", name, section.layer), line)
        for section in listing(graph).sections
        for line in section.lines
        for node, name in zip(line.nodes, line.results, strict=True)
        if node is not None and name is not None
    }


def _key(node: Node, fed: frozenset[Node], same: dict[Node, Node]) -> Hashable:
    """Key that a node shares with the node that it stands for.

    same: nodes of the other graph that earlier nodes stand for; empty for the graph whose nodes these are.
    """
    layer, role = node.meta["layer"], node.meta.get("role", "")
    weights = _weights(node, fed)
    if weights:
        return layer, role, weights
    first = _origin(next(arg for arg in node.all_input_nodes if arg in fed))
    made_of = first.meta.get("input") or same.get(first, first)
    part = args_of(node)[1] if node.target is operator.getitem else None
    return layer, node.target, made_of, part


def _weights(node: Node, fed: frozenset[Node]) -> frozenset[str]:
    """Names of the weights that a node multiplies by, without what tells the parts of a quantised one apart."""
    stored = ancestors(arg for arg in node.all_input_nodes if arg not in fed)
    return frozenset(each.meta["weight"].partition(".weight")[0] for each in stored if "weight" in each.meta)


def _origin(node: Node) -> Node:
    """The value that a value was gathered from, or the value itself."""
    while node.target is operator.getitem:
        made, part = args_of(node)
        op = op_of(made.target)
        if op is None or op.name != "compact":
            break
        node = args_of(made)[0][part]
    return node
