"""Reading a node: its arguments, the name of its op, its place, the values that it is computed from."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.fx import Node

from dgraph.private.torch import OpOverload


def args_of(node: Node) -> tuple[Any, ...]:
    """A node's arguments; fx types them as a union too wide to work with."""
    return node.args


def op_name(target: Any) -> str:
    """The name of an op as it reads in a dump: `linear`, `dgraph.importance`, `getitem`."""
    if isinstance(target, OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


def is_view(node: Node) -> bool:
    """True if a call allocates nothing: its result lies in the memory of its first argument, or is a part of it.

    The schema of an op says so. Some ops of that schema return their argument if nothing is to be done, and else a copy
    in another dtype or on another device. Such a copy is no view. An op that copies only because of strides (reshape)
    counts as a view.
    """
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or not node.target.is_view:
        return False
    value, made = args_of(node)[0].meta["val"], node.meta["val"]
    return not isinstance(made, Tensor) or (made.dtype, made.device) == (value.dtype, value.device)


def viewed(node: Node) -> Node:
    """The value that a view is of, which lives as long as the view; the node itself if it is no view."""
    while is_view(node):
        node = args_of(node)[0]
    return node


def ancestors(nodes: Iterable[Node], stop: Iterable[Node] = ()) -> set[Node]:
    """Everything that nodes are computed from, themselves included; not past `stop`."""
    found: set[Node] = set()
    ends, todo = set(stop), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [] if node in ends else node.all_input_nodes
    return found


def role_of(node: Node) -> str:
    """The module that a node came from, for a message: relative to its layer, where it has one."""
    return node.meta.get("role") or ("the layer" if node.meta.get("layer") is not None else "the model")


def where(node: Node) -> str:
    """A node's place for a message: pass, layer, role and name."""
    layer, role, by = node.meta.get("layer"), node.meta.get("role"), node.meta.get("by")
    place = f"layer {layer}" if layer is not None else "outside the layers"
    return f"{place}{f' ({role})' if role else ''}, node {node.name}{f', made by {by}' if by else ''}"
