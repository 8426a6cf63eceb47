"""A run of a graph in plain torch, node by node, by the references of ops, which define correct results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.ir.row_order import Orders
from dgraph.ops import op_of
from dgraph.types.nodes import args_of


@dataclass(frozen=True)
class Run:
    """The values that a graph computed from some inputs.

    Attributes:
        graph: the graph that ran.
        inputs: as they are after the run; caches among them were written.
        values: by node: of the outputs and of lists of rows, or of all nodes that depend on inputs.
        rows: i64[N], the number of each row of the step, where another run may have others; None: its place.
    """

    graph: Graph
    inputs: Mapping[str, Tensor]
    values: Mapping[Node, Any]
    rows: Tensor | None = None

    def numbers(self, node: Node) -> Tensor | None:
        """i64[K], the number of each row of a value, -1 for padding; None for rows in order, or a value over no rows.

        Rows are numbered by `rows`, else by their place among all rows of the step.
        """
        order = self.orders.of.get(node)
        return None if order is None else self._numbers_of(order)

    @cached_property
    def orders(self) -> Orders:
        """The row orders of the graph."""
        return Orders(self.graph)

    def _numbers_of(self, order: str) -> Tensor | None:
        made = self.orders.lists.get(order)
        if made is None:
            return self.rows
        index: Tensor = self.values[made][0]
        before = self._numbers_of(self.orders.of[args_of(made)[0]])
        return index if before is None else torch.where(index < 0, -1, before[index.clamp(min=0)])

    def flat(self, node: Node) -> Any:
        """The value of a node; rows first, also where the graph computes on a padded batch [b, t, ...]."""
        value, type_ = self.values[node], node.meta["val"]
        if isinstance(value, Tensor) and value.dim() > 1:
            batch = [self.graph.symbols.text(size) for size in type_.shape[:2]] == ["b", "t"]
            return value.flatten(0, 1) if batch else value
        return value


@torch.no_grad()
def run(graph: Graph, inputs: Mapping[str, Tensor], keep: bool = False) -> Run:
    """Run a graph; caches among the inputs are written in place.

    Args:
        graph: verified; on ranks all must run it together.
        inputs: by name, of the declared types.
        keep: keep the value of every node that depends on an input, for `first_parting`; else those of results alone.
    """
    values: dict[Node, Any] = {}
    last = {arg: node for node in graph.nodes for arg in node.all_input_nodes}
    kept = {*Orders(graph).lists.values(), *graph.results().values()}
    freed: dict[Node, list[Node]] = {}
    for arg, node in last.items():
        freed.setdefault(node, []).append(arg)
    fed = fed_nodes(graph) if keep else frozenset()
    for node in graph.nodes:
        if node.op == "placeholder":
            weight = node.meta.get("weight")
            values[node] = inputs[node.meta["input"]] if weight is None else graph.tensors[weight].detach()
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            op = op_of(node.target)
            function: Any = node.target if op is None else op.reference
            values[node] = function(*args, **kwargs)
        for arg in (*freed.get(node, ()), *(() if node in last or node not in values else (node,))):
            if arg not in kept and arg not in fed:
                del values[arg]
    return Run(graph, inputs, values)


def fed_nodes(graph: Graph) -> frozenset[Node]:
    """The run-time inputs of a graph, and all that is computed from them; the rest depends on weights alone."""
    fed: set[Node] = set()
    for node in graph.nodes:
        if "input" in node.meta or any(arg in fed for arg in node.all_input_nodes):
            fed.add(node)
    return frozenset(fed)
