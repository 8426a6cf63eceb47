"""Weights of a graph as they are stored: as products read them, or quantised, which `dgraph::dequantise` reads.

    as it is     %4 = linear(%3, q_proj.weight)
    quantised    %4 = dgraph.dequantise(q_proj.weight, q_proj.weight_scale, None, [1, -1], torch.bfloat16)
                 %5 = linear(%3, %4)

A pass that changes which rows of a weight a product reads (stacked, taken apart) asks here what is stored, and changes
that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.families.quantised import KINDS, PARTS, ROW_KINDS, WHOLE, Format, sizes_of
from dgraph.families.weights import Source, WeightSource, hollow
from dgraph.ir.node_list import NodeList
from dgraph.ops import OPS
from dgraph.ranks.sharding import Part
from dgraph.types.nodes import args_of


@dataclass(frozen=True)
class Stored:
    """A weight of the model.

    Attributes:
        node: as products read it: the weight's own node, or the call that dequantises it.
        parts: the nodes of what is stored: the weight itself, or its values, scales, and zeros if it has some.
    """

    node: Node
    parts: tuple[Node, ...]

    @property
    def name(self) -> str:
        """The weight's name, which is that of its values."""
        name: str = self.parts[0].meta["weight"]
        return name

    @property
    def quantised(self) -> bool:
        """True if the weight is quantised."""
        return len(self.parts) > 1

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale; of a weight that is not quantised, every element is by itself."""
        if not self.quantised:
            return (1, 1)
        high, wide = args_of(self.node)[3]
        return high, wide

    @property
    def row_kind(self) -> str | None:
        """Kind of numbers to round rows to, so that the weight's numbers multiply theirs.

        It is the kind in which the weight is stored, if that has 8 bits, one scale for each row and no zeros; else
        None.
        """
        if len(self.parts) != 2 or _length(self.parts[1], -1) != 1:
            return None
        return next((k for k in ROW_KINDS if KINDS[k].dtype == self.parts[0].meta["val"].dtype), None)

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties that weights must share to be stored as one."""
        return tuple(p.meta["val"].dtype for p in self.parts), self.block, self.node.meta["val"].dtype

    def cut(self, begin: int, end: int) -> list[slice] | str:
        """Rows begin..end of the weight as slices of each part; or why they cannot be taken by themselves."""
        rows, high = int(self.node.meta["val"].shape[-2]), self.block[0]
        if high == WHOLE:
            return [slice(begin, end), *(slice(None) for _ in self.parts[1:])]
        if begin % high or (end % high and end != rows):
            return f"rows {begin}..{end} of {self.name} are no whole blocks of {high}, which have a scale in common"
        return [slice(begin, end), *(slice(begin // high, -(-end // high)) for _ in self.parts[1:])]

    def read(
        self, graph: NodeList, parts: Sequence[Node], before: Node, by: str, block: tuple[int, int] | None = None
    ) -> Node:
        """Another weight as products read it, stored as this one is; in other blocks if they are given."""
        if not self.quantised:
            return parts[0]
        values, scales, zeros = (*parts, None)[:3]
        args = (values, scales, zeros, list(block or self.block), args_of(self.node)[4])
        return graph.call(OPS["dequantise"], args, before=before, by=by)


def stored_of(weight: object) -> Stored | None:
    """The stored parts of a weight that a product reads; None if the weight is computed from something else."""
    if not isinstance(weight, Node):
        return None
    if "weight" in weight.meta:
        return Stored(weight, (weight,))
    if weight.target is not OPS["dequantise"].overload:
        return None
    parts = tuple(part for part in args_of(weight)[:3] if part is not None)
    return Stored(weight, parts) if all("weight" in part.meta for part in parts) else None


def tensors_of(graph: NodeList, stored: Stored) -> list[Tensor]:
    """The tensors of what is stored, in the order of `Stored.parts`."""
    return [graph.tensors[part.meta["weight"]] for part in stored.parts]


def rows_of(graph: NodeList, stored: Stored, begin: int, end: int, name: str, before: Node, by: str) -> Node:
    """Some rows of a weight, as a product reads them; what is stored of them are views of what is there.

    Args:
        begin, end: the rows, of which `Stored.cut` says that they can be taken.
        name: of the new weight.
        before: the product.
    """
    slices = stored.cut(begin, end)
    assert not isinstance(slices, str), slices
    with torch.no_grad():
        views = [tensor.detach()[rows] for tensor, rows in zip(tensors_of(graph, stored), slices, strict=True)]
    suffixes = [part.meta["weight"].removeprefix(stored.name) for part in stored.parts]
    names = [f"{name}{suffix}" for suffix in suffixes]
    nodes = [  # several layers may read one weight
        graph.weight(part) if part in graph.tensors else graph.add_weight(part, view)
        for part, view in zip(names, views, strict=True)
    ]
    return stored.read(graph, nodes, before, by)


def quantised_as(graph: NodeList, weight: Node, format: Format, by: str) -> Node:
    """Let all readers of a weight read its dequantised form; the tensors only stand for the stored ones.

    Args:
        weight: [..., rows, columns], floating.
        format: format of the stored numbers.

    Returns:
        The call that dequantises it, before the first reader. The weight itself is no longer in the graph.
    """
    name, readers = weight.meta["weight"], list(weight.users)
    first, like = min(readers), weight.meta["val"]
    shape = tuple(int(size) for size in like.shape)
    device = graph.tensors.pop(name).device
    weight.meta["weight"] = ""  # its name is that of the values
    nodes = [
        graph.add_weight(f"{name}{part}", hollow(size, dtype, device), weight)
        for part, (size, dtype) in zip(PARTS, sizes_of(shape, format), strict=False)
    ]
    values, scale, zero = (*nodes, None)[:3]
    assert format.block is not None  # filled in by the format
    args = (values, scale, zero, list(format.block), like.dtype)
    made = graph.call(OPS["dequantise"], args, before=first, by=by)
    weight.replace_all_uses_with(made, propagate_meta=False)
    graph.fx.erase_node(weight)
    return made


def as_stored(graph: NodeList, source: WeightSource) -> None:
    """Let a captured graph read the weights that a checkpoint stores quantised as they are stored.

    Args:
        source: of these weights. If it has others too, which none has read, its tensors only stand for what is stored.
    """
    for name, node in graph.weight_nodes().items():
        if name in source.formats:
            quantised_as(graph, node, source.formats[name], "")
    if source.all_quantised:
        take_weights(graph, source, {})


def formats_of(graph: NodeList) -> dict[str, Format]:
    """Formats of the quantised weights of a graph, by name."""
    kinds = {kind.dtype: name for name, kind in KINDS.items()}
    found = {}
    for node in graph.find("dequantise"):
        stored = stored_of(node)
        if stored is not None:
            dtype = stored.parts[0].meta["val"].dtype
            found[stored.name] = Format(kinds[dtype], stored.block, len(stored.parts) > 2)
    return found


def take_weights(graph: NodeList, source: Source | None, parts: Mapping[str, Part]) -> None:
    """Replace weights of a graph by a source's tensors, and by parts of them; a shared tensor stays shared.

    Args:
        source: source of weights that the graph's tensors only stand for; None: there are no such weights.
        parts: by name, the part of a weight to take.
    """
    taken: dict[tuple[int, Part | None], Tensor] = {}
    for name, node in graph.weight_nodes().items():
        part, tensor = parts.get(name), graph.tensors[name]
        stored = source is not None and name in source
        if part is None and not stored:
            continue
        key = id(tensor), part
        if key in taken:
            pass
        elif source is not None and stored:
            taken[key] = source.take(name, tensor, part)
        elif part is not None:
            taken[key] = part.take(tensor)
        graph.tensors[name] = taken[key]
        if part is not None:
            graph.divided[name] = part
        node.meta["val"] = graph.symbols.of(taken[key])


def parts_of(stored: Stored, part: Part) -> list[Part | None]:
    """Parts that a rank has of values, scales and zeros of a weight; None for all of one.

    Args:
        part: of the weight.

    Raises:
        InputError: a rank would have a piece of a block.
    """
    if not stored.quantised:
        return [part]
    values, scales, *zeros = stored.parts
    shape = stored.node.meta["val"].shape
    each = shape[part.dim] // _length(values, part.dim)
    found: list[Part | None] = [_every(stored, part, each, f"{each} numbers lie in a byte")]
    at = part.dim - (len(shape) - 2)  # 0 is rows, 1 columns
    if _length(scales, part.dim) == 1:
        own = None if at >= 0 else part
    else:
        n = stored.block[at] if at >= 0 else 1
        own = _every(stored, part, n, f"{n} {'rows' if at == 0 else 'columns'} share a scale")
    return [*found, own, *(own for _ in zeros)]


def _every(stored: Stored, part: Part, n: int, why: str) -> Part:
    """A part of what there is one of for n entries of a weight."""
    length = _length(stored.node, part.dim)
    if any(begin % n or (end % n and end != length) for begin, end in part.ranges):
        got = ", ".join(f"{begin}..{end}" for begin, end in part.ranges)
        raise InputError(
            f"a rank would have {got} of {length} entries of weight {stored.name!r} along dimension {part.dim}, of "
            f"which {why}. Choose another block or number of ranks, or leave the weight as it is (but=)."
        )
    return Part(
        part.kind, part.dim, tuple((begin // n, -(-end // n)) for begin, end in part.ranges), -(-part.padded // n)
    )


def _length(node: Node, dim: int) -> int:
    return int(node.meta["val"].shape[dim])
