"""Partial sums of a sharded graph: values of which each rank has a share, until all_reduce adds the shares."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from dgraph.ir.aten_rules import is_linear
from dgraph.ir.graph import Graph
from dgraph.ir.linears import linear_of
from dgraph.ir.stored_weights import stored_of
from dgraph.ops import OPS
from dgraph.types.nodes import args_of, is_view, op_name, where

_SUMS_IN = tuple(OPS[name].overload for name in ("experts", "embedding_part", "embedding_stored"))
"""Ops whose results are partial sums if their weights are divided."""


def broken_sums(graph: Graph) -> Iterator[str]:
    """Violations of a rule: only linear calls read partial sums.

    Linear calls are views, sums of partial sums, products with a number, and gathers.

    A partial sum is the result of a weight that is divided by inputs, of experts, or of an embedding that is divided by
    ids.
    """
    if graph.sharding is None:
        return
    made: dict[Node, str] = {}
    for node in graph.calls:
        read = [arg for arg in node.all_input_nodes if arg in made]
        if (weight := _maker(graph, node)) is not None:
            made[node] = weight
        if not read or node.target is OPS["all_reduce"].overload:
            continue
        if not _is_linear(node, read):
            yield _message(f"{where(node)} ({op_name(node.target)})", read[0], made)
        elif _has_some(node, made):
            made[node] = made[read[0]]
    for name, value in graph.results().items():
        if value in made:
            yield _message(f"output {name}", value, made)


def _message(reader: str, value: Node, made: dict[Node, str]) -> str:
    return (
        f"{reader} reads {value.name}, of which each rank has a share only (by weight {made[value]}); expected its "
        f"sum; let it read Graph.over_ranks({value.name})"
    )


def _maker(graph: Graph, node: Node) -> str | None:
    """The weight by which a call makes a partial sum; None if it makes none."""
    if node.target in _SUMS_IN:
        return next((name for arg in node.all_input_nodes if (name := _divided(graph, arg)) is not None), None)
    linear = linear_of(node)
    name = None if linear is None else _divided(graph, linear.weight)
    return name if name is not None and graph.divided[name].kind == "row" else None


def _divided(graph: Graph, value: Any) -> str | None:
    """The divided weight that a value is, or is made of alone."""
    node: Node = value
    while (stored := stored_of(node)) is None and node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return stored.name if stored is not None and stored.name in graph.divided else None


def _is_linear(node: Node, read: list[Node]) -> bool:
    """True if a call on partial sums is the partial sum of the call on their sums."""
    if is_view(node) or node.target is OPS["compact"].overload:
        return True
    if node.target is OPS["low_rank"].overload:  # the addend of a share is made of the same inputs: a share, too
        return read == node.all_input_nodes[:1]
    return read == node.all_input_nodes and is_linear(node)


def _has_some(node: Node, made: dict[Node, str]) -> bool:
    """True if a result of a call is a partial sum; values that are gathered together stay what they were."""
    source = args_of(node)[0]
    if node.target is operator.getitem and source.target is OPS["compact"].overload:
        return args_of(source)[0][args_of(node)[1]] in made
    return True
