"""Reading a node: its arguments, the name of its op, its place."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from dgraph.torch_private import OpOverload


def args_of(node: Node) -> tuple[Any, ...]:
    """A node's arguments; fx types them as a union too wide to work with."""
    return node.args


def op_name(target: Any) -> str:
    """The name of an op as it reads in a dump: `linear`, `dgraph.importance`, `getitem`."""
    if isinstance(target, OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


def role_of(node: Node) -> str:
    """The module that a node came from, for a message: relative to its layer, where it has one."""
    return node.meta.get("role") or ("the layer" if node.meta.get("layer") is not None else "the model")


def where(node: Node) -> str:
    """A node's place for a message: pass, layer, role and name."""
    layer, role, by = node.meta.get("layer"), node.meta.get("role"), node.meta.get("by")
    place = f"layer {layer}" if layer is not None else "outside the layers"
    return f"{place}{f' ({role})' if role else ''}, node {node.name}{f', made by {by}' if by else ''}"
