"""Operands that products read quantised: the dequantisations that a program never computes.

A product by `dgraph::dequantise` of a weight reads the inputs of the dequantisation: values, scales and zeros, as one
`dgraph.families.quantised.QuantisedWeight`. The dequantised weight never lies in memory. A linear layer is then a call
of `dgraph::linear`, and no part of a region; ops that multiply by weights declare the argument (`Op.stored`). If any
other op reads the dequantised weight, it is computed, like any other value.

A product by `dgraph::dequantise_rows` reads numbers and scales likewise, as one
`dgraph.families.quantised.QuantisedRows` (`Op.rounded`). The pass `QuantisedOperands` gives products such operands.

A graph is only read here. Lowering groups a dequantisation with each product that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from dgraph.ops import OPS, Op, op_of
from dgraph.types.nodes import args_of

_LINEAR = torch.ops.aten.linear.default
_WEIGHTS, _ROWS = OPS["dequantise"].overload, OPS["dequantise_rows"].overload


def is_fused_operand(node: object) -> bool:
    """True if a node dequantises a weight, or rows, and is read only by products that take the quantised form."""
    if not isinstance(node, Node) or node.target not in (_WEIGHTS, _ROWS):
        return False
    return bool(node.users) and all(_takes(user, node) for user in node.users)


def _takes(user: Node, value: Node) -> bool:
    """True if a call multiplies by a weight, or by rounded rows, and reads them in no other place."""
    args, op = args_of(user), product_op(user)
    if op is None or user.kwargs:
        return False
    names = op.stored if value.target is _WEIGHTS else op.rounded
    return sum(arg is value for arg in op.values(names, args)) == sum(arg is value for arg in args) > 0


def product_op(node: Node) -> Op | None:
    """The op of dgraph that can run a call with quantised operands; None for calls of torch but linear layers."""
    return OPS["linear"] if node.target is _LINEAR else op_of(node.target)


def executing_op(node: Node) -> Op | None:
    """The op of dgraph that runs a call; None for calls of torch."""
    if node.target is _LINEAR:
        return OPS["linear"] if is_fused_operand(args_of(node)[1]) else None
    return op_of(node.target)


def arguments_of(node: Node, op: Op) -> tuple[object, ...]:
    """Arguments of a call in the form that the op which runs it takes."""
    args = args_of(node)
    return args if op is op_of(node.target) else (*args, None)[: len(op.arguments)]


def inputs_of(nodes: Iterable[Node]) -> Sequence[Node]:
    """Values that a call of these arguments reads, each once; a fused operand counts by its parts."""
    found: dict[Node, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(node.all_input_nodes if is_fused_operand(node) else (node,)))
    return tuple(found)


def readers_of(node: Node) -> list[Node]:
    """Calls that read a value; a fused operand counts as its own readers."""
    return [reader for user in node.users for reader in (user.users if is_fused_operand(user) else (user,))]
