"""Correspondence of dimensions: which dimension of a result each dimension of an argument becomes, entry by entry.

A dimension passes entry by entry if entry i of the result depends on entry i of the argument alone.
All other dimensions are worked along: summed, sorted, shifted, looked up in, merged or split.
`dgraph.ir.aten_kinds` says it of each kind of ops, `dgraph.ir.aten_rules` of which kind an op is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.private.torch import OpOverload
from dgraph.types.nodes import args_of

Dims = tuple[int | None, ...]
"""Per dimension of an argument, the dimension of each result that it becomes; None if the op works along it."""


@dataclass(frozen=True)
class Passage:
    """The images of one tensor argument's dimensions in the results.

    Attributes:
        name: name of the argument in the schema.
        node: the tensor; of a list of tensors each has a passage of its own.
        dims: by dimension of the tensor.
    """

    name: str
    node: Node
    dims: Dims


@dataclass(frozen=True)
class Axes:
    """The images of all dimensions of a call's arguments; all results are alike in that.

    Attributes:
        passages: of each tensor whose values the call reads, in order.
        repeated: dimensions of the results along which all entries are equal, unless an argument passes there.
    """

    passages: tuple[Passage, ...]
    repeated: frozenset[int] = frozenset()


class Call:
    """A call's arguments by the names of its schema, and the types of what it reads and makes.

    Args:
        node: the call of an overload, or of `operator.getitem`.
        type_of: the type of a node; default what its meta says.
    """

    def __init__(self, node: Node, type_of: Callable[[Node], Any] = lambda node: node.meta["val"]):
        self.node, self._type_of = node, type_of
        self.values: dict[str, Any] = {}
        if isinstance(node.target, OpOverload):
            for argument, value in zip(node.target._schema.arguments, args_of(node), strict=False):
                self.values[argument.name] = value
            self.values |= node.kwargs
        elif node.target is operator.getitem:
            self.values = dict(zip(("self", "index"), args_of(node), strict=True))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an argument, that of the schema where it is left out, or `default` where it has none."""
        if name in self.values:
            return self.values[name]
        if isinstance(self.node.target, OpOverload):
            for argument in self.node.target._schema.arguments:
                if argument.name == name and argument.has_default_value():
                    return argument.default_value
        return default

    def has(self, name: str) -> bool:
        """True if the schema has an argument of that name."""
        schema = getattr(self.node.target, "_schema", None)
        return name in self.values or any(a.name == name for a in (schema.arguments if schema is not None else ()))

    def nodes(self, name: str) -> list[Node]:
        """The nodes in an argument that are tensors, or tuples of them."""
        value = self.values.get(name)
        found = value if isinstance(value, (list, tuple)) else (value,)
        return [node for node in found if isinstance(node, Node) and not isinstance(self._type_of(node), _SIZES)]

    @property
    def tensors(self) -> list[tuple[str, Node]]:
        """Every tensor among the arguments, with the argument's name, in order."""
        return [(name, node) for name in self.values for node in self.nodes(name)]

    def type(self, node: Node) -> Any:
        """The type of a node."""
        return self._type_of(node)

    def shape(self, node: Node) -> tuple[Any, ...]:
        """Sizes of a value; of the first of several."""
        return sizes_of(self._type_of(node))

    def rank(self, node: Node) -> int:
        """Number of dimensions of a value."""
        return len(self.shape(node))

    @property
    def out(self) -> tuple[Any, ...]:
        """Sizes of the first result."""
        return self.shape(self.node)

    @property
    def draws(self) -> bool:
        """True if it draws numbers from a generator, which counts all draws before it; dropout may be idle."""
        idle = self.get("train") is False or 0 in (self.get("p"), self.get("dropout_p"))
        return torch.Tag.nondeterministic_seeded in getattr(self.node.target, "tags", ()) and not idle

    def dim(self, name: str, rank: int, default: int = 0) -> int:
        """A dimension that an argument numbers, counted from the first of `rank`."""
        value = self.get(name, default)
        return int(value) % max(rank, 1)

    def dims(self, name: str, rank: int) -> frozenset[int]:
        """Dimensions that an argument numbers; all of them for None and an empty list."""
        value = self.get(name)
        if isinstance(value, int):
            value = [value]
        return frozenset(int(d) % max(rank, 1) for d in value) if value else frozenset(range(rank))


_SIZES = (int, float, bool, torch.SymInt)


def sizes_of(value: Any) -> tuple[Any, ...]:
    """Sizes of a type; of the first tensor in a tuple of them, () without a tensor."""
    if isinstance(value, (tuple, list)):
        value = next((part for part in value if isinstance(part, Tensor)), None)
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def expression(size: Any) -> Any:
    """A size as something that compares without deciding anything about symbols."""
    return size if isinstance(size, int) else size.node.expr


def product(sizes: Iterable[Any]) -> Any:
    """The product of sizes, some of which may be symbolic."""
    total: Any = 1
    for size in sizes:
        total = total * expression(size)
    return total


def same(left: Any, right: Any) -> bool:
    """True if two sizes are one expression."""
    return bool(expression(left) == expression(right))
