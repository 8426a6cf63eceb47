"""Weights that products take as they are stored.

A product by `dgraph::dequantise` of a weight reads what that reads: values, scales and zeros, as one
`dgraph.quantised.QuantisedWeight`. The dequantised weight never lies in memory. A linear layer is then a call of
`dgraph::linear`, and no part of a region; ops that multiply by weights say so (`Op.stored`). Where anything else reads
the dequantised weight, it is computed, like any other value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from dgraph.nodes import args_of
from dgraph.ops import OPS, Op, op_of

LINEAR = torch.ops.aten.linear.default


def is_taken(node: object) -> bool:
    """Whether it dequantises a weight for products alone, each of which takes what is stored."""
    if not isinstance(node, Node) or node.target is not OPS["dequantise"].overload:
        return False
    return bool(node.users) and all(_takes(user, node) for user in node.users)


def _takes(user: Node, weight: Node) -> bool:
    """Whether a call multiplies by a weight, and reads it in no other place."""
    args = args_of(user)
    op = OPS["linear"] if user.target is LINEAR else op_of(user.target)
    if op is None or user.kwargs:
        return False
    return sum(arg is weight for arg in op.values(op.stored, args)) == sum(arg is weight for arg in args) > 0


def run_by(node: Node) -> Op | None:
    """The op of ours that a call is run by; None for calls of torch."""
    op = op_of(node.target)
    if op is None and node.target is LINEAR and is_taken(args_of(node)[1]):
        return OPS["linear"]
    return op


def arguments_of(node: Node, op: Op) -> tuple[object, ...]:
    """The arguments of a call as the op that it is run by takes them."""
    args = args_of(node)
    return args if op is op_of(node.target) else (*args, None)[: len(op.arguments)]


def inputs_of(nodes: Iterable[Node]) -> Sequence[Node]:
    """The values that a call of these arguments reads, each once: in place of a weight what is stored of it."""
    found: dict[Node, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(node.all_input_nodes if is_taken(node) else (node,)))
    return tuple(found)


def readers_of(node: Node) -> list[Node]:
    """The calls that read a value, in place of what dequantises it those that take it."""
    return [reader for user in node.users for reader in (user.users if is_taken(user) else (user,))]
