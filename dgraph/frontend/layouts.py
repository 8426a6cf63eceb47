"""One form of the views between two computing calls, whichever way a model's author spelled them.

A product of several values (queries, keys and values; gate and up) is split at once, along its outputs, and each part
is then reshaped and permuted:

    before  %2 = linear(%1, attn.qkv.weight)                  f32[b, t, 96]
            %3 = reshape(%2, [%b, %t, 3, 4, 8])               f32[b, t, 3, 4, 8]
            %4 = permute(%3, [2, 0, 3, 1, 4])                 f32[3, b, 4, t, 8]
            %5 = select(%4, 0, 1)                             f32[b, 4, t, 8]
    after   %2 = linear(%1, attn.qkv.weight)                  f32[b, t, 96]
            %3 = split_with_sizes(%2, [32, 32, 32], 2)
            %5 = reshape(%4, [%b, %t, 4, 8])                  f32[b, t, 4, 8]
            %6 = transpose(%5, 1, 2)                          f32[b, 4, t, 8]

Views are not read by their names and arguments: they are run on a tensor that numbers the entries of the value. So
every op that is a view is understood, also one that no rule knows.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.ir.linears import linear_of
from dgraph.private.torch import OpOverload
from dgraph.types.nodes import args_of, is_view, op_name

aten = torch.ops.aten

ROWS = {"b": 2, "t": 3}
"""Sizes for which views are run: any two do, as strides tell dimensions apart."""

_SPLITS = {"chunk", "split", "tensor_split", "hsplit", "vsplit", "dsplit", "unsafe_chunk", "unsafe_split"}
_PLAIN = {"reshape", "transpose", "permute", "unsqueeze", "squeeze", "getitem"}


@dataclass(frozen=True)
class Atom:
    """A run of equally spaced entries along one dimension of a value.

    Attributes:
        dim: the dimension.
        size: number of entries.
        step: distance from one to the next, in entries of the dimension.
    """

    dim: int
    size: int
    step: int


@dataclass(frozen=True)
class Layout:
    """A view of some entries of a value, each dimension made of runs along the value's dimensions.

    Attributes:
        dims: the runs of each dimension of the view, outermost first.
        begins, ends: the entries that it is of, along each dimension of the value; all between these.
    """

    dims: tuple[tuple[Atom, ...], ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def atoms(self) -> list[Atom]:
        """All runs, in order of the view's dimensions."""
        return list(itertools.chain(*self.dims))


def name_views(graph: Graph) -> None:
    """Give each view of several ways to say it one name: split_with_sizes, select, slice, permute."""
    for node in graph.calls:
        name = op_name(node.target)
        if not node.users:
            continue
        if name in _SPLITS:
            _name_split(graph, node)
        elif name == "unbind":
            _name_unbind(graph, node)
        elif name in ("movedim", "moveaxis", "swapaxes", "swapdims", "t", "numpy_T", "mT", "matrix_H", "narrow"):
            _name_move(graph, node)
    graph.sweep()


def _name_split(graph: Graph, node: Node) -> None:
    source, parts = args_of(node)[0], node.meta["val"]
    changed = [i for i in range(source.meta["val"].dim()) if _sizes(parts[0])[i] != _sizes(source.meta["val"])[i]]
    if len(changed) != 1 or not all(isinstance(size, int) for part in parts for size in (part.shape[changed[0]],)):
        return  # one part that is all of it, or parts along tokens
    (dim,) = changed
    sizes = [int(part.shape[dim]) for part in parts]
    if sum(sizes) == source.meta["val"].shape[dim]:
        graph.replace(node, _call(graph, node, aten.split_with_sizes.default, source, sizes, dim))


def _name_unbind(graph: Graph, node: Node) -> None:
    source, dim = (*args_of(node), 0)[:2]
    for part in list(node.users):
        if part.target is operator.getitem:
            graph.replace(part, _call(graph, part, aten.select.int, source, dim, args_of(part)[1]))


def _name_move(graph: Graph, node: Node) -> None:
    """Name a permutation by the sizes that it gives to a probe of unequal sizes, or a narrow as a slice."""
    source, made = args_of(node)[0], node.meta["val"]
    if op_name(node.target) == "narrow":
        _, dim, start, length = args_of(node)
        if isinstance(start, int) and isinstance(length, int):
            graph.replace(node, _call(graph, node, aten.slice.Tensor, source, dim, start, start + length))
        return
    rank = source.meta["val"].dim()
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    target: Any = node.target
    moved = target(probe, *args_of(node)[1:], **node.kwargs)
    if made.dim() == rank:
        order = [size - 2 for size in moved.shape]
        graph.replace(node, _permuted(graph, node, source, order))


def straighten(graph: Graph) -> None:
    """Bring the views of every linear layer's result, and those that mix tokens with something else, into one form."""
    if "input_ids" not in graph.inputs:
        return
    _infer_merged(graph)
    _unmerge_linears(graph)
    for base in [node for node in graph.calls if isinstance(node.meta["val"], Tensor) and not is_view(node)]:
        _Views(graph, base).straighten()
    graph.sweep()


def _infer_merged(graph: Graph) -> None:
    """Replace a computed product of sizes in a reshape, as `b * t`, by -1: no call computes it any more."""
    for node in graph.calls:
        if op_name(node.target) != "reshape":
            continue
        source, shape = args_of(node)
        computed = [s for s in shape if isinstance(s, Node) and not isinstance(s.target, OpOverload)]
        if len(computed) == 1 and -1 not in shape:
            node.args = (source, [-1 if size is computed[0] else size for size in shape])
    graph.sweep()


def _unmerge_linears(graph: Graph) -> None:
    """Let a linear layer over tokens and sequences in one dimension, not in the order of a batch, keep the two."""
    for node in graph.calls:
        linear = linear_of(node)
        if linear is None or op_name(linear.x.target) != "reshape" or linear.x.meta["val"].dim() != 2:
            continue
        rows, source = linear.x.meta["val"].shape[0], args_of(linear.x)[0]
        first = source.meta["val"].shape[:2]
        if source.meta["val"].dim() < 3 or [_row(graph, size) for size in first] != ["t", "b"]:
            continue
        if rows != first[0] * first[1]:
            continue
        sizes = [_size_node(graph, size) for size in first]
        x = _call(graph, node, aten.reshape.default, source, [*sizes, linear.shape[1]])
        made = _call(graph, node, aten.linear.default, x, *args_of(node)[1:])
        merged = args_of(linear.x)[1][0]
        graph.replace(node, _call(graph, node, aten.reshape.default, made, [merged, linear.shape[0]]))


class _Views:
    """The views of one value."""

    def __init__(self, graph: Graph, base: Node):
        self.graph, self.base = graph, base
        self.names = [_row(graph, size) for size in base.meta["val"].shape]
        self.sizes = [ROWS[n] if n else s for n, s in zip(self.names, base.meta["val"].shape, strict=True)]

    def straighten(self) -> None:
        if not all(isinstance(size, int) for size in self.sizes) or {"b", "t"} - set(self.names):
            return
        views = self._views()
        if all(map(self._is_plain, views)):
            return
        layouts = self._layouts(views)
        known = {*layouts, *(node for node in views if node.users and all(user in layouts for user in node.users))}
        wanted = [node for node in layouts if any(user not in known for user in node.users)]
        if not wanted or (split := self._split([layouts[node] for node in wanted])) is None:
            return
        for node in wanted:
            self.graph.replace(node, self._view(node, layouts[node], split))

    def _views(self) -> list[Node]:
        """The calls that are views of the value, each after its own source."""
        found, todo = [], [self.base]
        while todo:
            source = todo.pop()
            views = [user for user in source.users if is_view(user) and args_of(user)[0] is source]
            found += views
            todo += views
        return found

    def _layouts(self, views: Sequence[Node]) -> dict[Node, Layout]:
        """The entries that each view selects, if they are known, in order of the graph."""
        numbers: dict[Node, Any] = {self.base: torch.arange(math.prod(self.sizes)).reshape(self.sizes)}
        for node in views:
            source, *rest = args_of(node)
            arguments = _numbers(self.graph, rest)
            if source in numbers and arguments is not None:
                target: Any = node.target
                numbers[node] = target(numbers[source], *arguments, **node.kwargs)
        found = {node: self._layout(node, numbers[node]) for node in sorted(views) if node in numbers}
        return {node: layout for node, layout in found.items() if layout is not None}

    def _is_plain(self, node: Node) -> bool:
        """Tell if a view is in form by itself.

        Such views are the split of a linear layer's outputs, its parts, and views that keep all entries, with tokens in
        dimensions of their own.
        """
        if node.target is aten.split_with_sizes.default:
            source, _, dim = (*args_of(node), 0)[:3]
            return source is self.base and dim in (-1, len(self.sizes) - 1)
        if any(not isinstance(s, int) and _row(self.graph, s) is None for s in node.meta["val"].shape):
            return False
        return op_name(node.target) in (_PLAIN if linear_of(self.base) is not None else _PLAIN | {"slice", "select"})

    def _layout(self, node: Node, numbers: Any) -> Layout | None:
        """The entries that a view selects; None if they are not one run of the value along each dimension."""
        if not isinstance(numbers, Tensor) or not numbers.numel():
            return None
        first, total = int(numbers.flatten()[0]), torch.zeros_like(numbers)
        dims: list[tuple[Atom, ...]] = []
        for dim, size in enumerate(node.meta["val"].shape):
            along = numbers[tuple(slice(None) if i == dim else 0 for i in range(numbers.dim()))] - first
            atoms = self._atoms(along.tolist())
            name = _row(self.graph, size)
            if atoms is None or (name is None and not isinstance(size, int)):
                return None
            if {self.names[a.dim] for a in atoms} != ({name} if len(along) > 1 else set()):
                return None  # tokens are no tokens any more
            dims.append(tuple(atoms))
            total += along.reshape([-1 if i == dim else 1 for i in range(numbers.dim())])
        if not torch.equal(total + first, numbers):
            return None
        strides = _strides(self.sizes)
        begins = [first // stride % size for stride, size in zip(strides, self.sizes, strict=True)]
        ends = []
        for dim, size in enumerate(self.sizes):
            own = sorted((a for atoms in dims for a in atoms if a.dim == dim), key=lambda a: a.step)
            reached = 1
            for atom in own:
                if atom.step != reached:
                    return None
                reached *= atom.size
            if self.names[dim] and (begins[dim], reached) != (0, size):
                return None
            ends.append(begins[dim] + reached)
        return Layout(tuple(dims), tuple(begins), tuple(ends))

    def _atoms(self, along: list[int]) -> list[Atom] | None:
        """The runs that make one dimension of a view, outermost first; None if it is not made of runs."""
        strides, found = _strides(self.sizes), []
        while len(along) > 1:
            stride = along[1] - along[0]
            count = next((i for i in range(1, len(along)) if along[i] - along[i - 1] != stride), len(along))
            of = next((i for i, s in enumerate(strides) if self.sizes[i] > 1 and 0 < s <= stride), None)
            if of is None or stride % strides[of]:
                return None
            step = stride // strides[of]
            count = min(count, -(-self.sizes[of] // step))
            if len(along) % count:
                return None
            found.append(Atom(of, count, step))
            along = along[::count]
        return found[::-1]

    def _split(self, layouts: Sequence[Layout]) -> dict[tuple[int, int], Node] | None:
        """The parts of the value that views select, by their begin and end along its last dimension; None where they
        are not its parts.
        """
        last = len(self.sizes) - 1
        for layout in layouts:
            if any((a, b) != (0, n) for a, b, n in list(zip(layout.begins, layout.ends, self.sizes, strict=True))[:-1]):
                return None
        spans = {(layout.begins[last], layout.ends[last]) for layout in layouts}
        size = self.sizes[last]
        if spans == {(0, size)}:
            return {(0, size): self.base}
        cuts = sorted({0, size, *itertools.chain(*spans)})
        pieces = list(itertools.pairwise(cuts))
        if linear_of(self.base) is None or not spans <= set(pieces):
            return None
        split = self.graph.call(
            aten.split_with_sizes.default,
            (self.base, [b - a for a, b in pieces], last),
            before=self.base.next,
            by="",
            like=self.base,
            source=self.base.meta.get("source", ""),
        )
        parts = self.graph.parts(split, len(pieces), "")
        for part in parts:
            part.meta["source"] = self.base.meta.get("source", "")
        return dict(zip(pieces, parts, strict=True))

    def _view(self, node: Node, layout: Layout, split: dict[tuple[int, int], Node]) -> Node:
        """Rebuild a view: its part of the value, reshaped, permuted, and reshaped."""
        graph, last = self.graph, len(self.sizes) - 1
        value = split[(layout.begins[last], layout.ends[last])]
        atoms = sorted(layout.atoms, key=lambda a: (a.dim, -a.step))
        shape = [self.base.meta["val"].shape[a.dim] if self.names[a.dim] else a.size for a in atoms]
        value = self._reshaped(node, value, shape)
        value = _permuted(graph, node, value, [atoms.index(a) for a in layout.atoms])
        return self._reshaped(node, value, list(node.meta["val"].shape))

    def _reshaped(self, node: Node, value: Node, shape: Sequence[Any]) -> Node:
        if _sizes(value.meta["val"]) == list(map(_key, shape)):
            return value
        sizes = [_size_node(self.graph, size) for size in shape]
        return _call(self.graph, node, aten.reshape.default, value, sizes)


def _permuted(graph: Graph, node: Node, value: Node, order: Sequence[int]) -> Node:
    moved = [i for i, dim in enumerate(order) if i != dim]
    if not moved:
        return value
    if len(moved) == 2:
        return _call(graph, node, aten.transpose.int, value, *moved)
    return _call(graph, node, aten.permute.default, value, list(order))


def _call(graph: Graph, node: Node, target: Any, *args: Any) -> Node:
    """Add a call in the place of a node."""
    return graph.call(target, args, before=node, by="", like=node, source=node.meta.get("source", ""))


def _size_node(graph: Graph, size: Any) -> Any:
    """A size as an argument of a call: a number, or the node that reads it."""
    if isinstance(size, int):
        return size
    tokens = graph.input("input_ids")
    dim = [_key(s) for s in tokens.meta["val"].shape].index(_key(size))
    for node in tokens.users:
        if node.target is aten.sym_size.int and args_of(node)[1] == dim:
            graph.calls[0].prepend(node)
            return node
    return graph.call(aten.sym_size.int, (tokens, dim), before=graph.calls[0], by="", like=graph.output, source="")


def _numbers(graph: Graph, arguments: Sequence[Any]) -> list[Any] | None:
    """Arguments with numbers for sizes; None if another value is computed among them."""
    known = {graph.symbols.size(name).node.expr: number for name, number in ROWS.items()}

    def number(node: Node) -> Any:
        size = node.meta["val"]
        found = size.node.expr.subs(known) if isinstance(size, torch.SymInt) else size
        return int(found) if not isinstance(found, Tensor) and getattr(found, "is_number", True) else node

    found = [torch.fx.map_arg(argument, number) for argument in arguments]
    left: list[Node] = []
    torch.fx.map_arg(found, left.append)
    return None if left else found


def _row(graph: Graph, size: Any) -> str | None:
    """The name of a size of a batch, "b" or "t"; None for another size."""
    return next((name for name in ROWS if _key(size) == _key(graph.symbols.size(name))), None)


def _key(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _sizes(value: Tensor) -> list[Any]:
    return [_key(size) for size in value.shape]


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
