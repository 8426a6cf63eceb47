"""Plan of the part that each rank has of each weight of a captured graph, by the view of its layers and by hints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.fx import Node

from dgraph.errors import InputError, PassError
from dgraph.ir.graph import Graph
from dgraph.ir.layers import Layer, layers_of
from dgraph.ir.linears import Linear, Projection, capped_head, embedding_of
from dgraph.ir.shard_propagation import Division, partial
from dgraph.ir.stored_weights import Stored, parts_of, stored_of
from dgraph.ranks.sharding import Part
from dgraph.types.nodes import args_of


@dataclass(frozen=True)
class Segment:
    """Neighbouring entries of a weight that are divided among themselves.

    Attributes:
        begin, end: their range.
        units: number of pieces that stay whole (heads, or single outputs).
        shared: True if several ranks may have the same piece, if there are fewer pieces than ranks.
    """

    begin: int
    end: int
    units: int
    shared: bool = False


@dataclass(frozen=True)
class Role:
    """Division of a weight.

    Attributes:
        kind: one of `dgraph.ranks.sharding.KINDS`.
        dim: along which dimension; -1 for a bias that one rank alone adds.
        segments: segments of that dimension, in order; together they cover it.
    """

    kind: str
    dim: int = 0
    segments: tuple[Segment, ...] = ()


WHOLE = Role("replicated")


class Plan:
    """The part that one rank has of every weight.

    Args:
        graph: as captured.
        world, rank: number of ranks, and the index of this one.
        experts: "split" or "parallel".
        hints: pairs of a pattern of names and a kind, which override the view.

    Attributes:
        roles: role of each weight by name.
        parts: part of each divided weight by name.
        divisions: the same as `dgraph.ir.shard_propagation` takes it.

    Raises:
        InputError: sizes that ranks do not divide.
        PassError: a weight whose role neither the view of the layers nor a hint declares.
    """

    def __init__(self, graph: Graph, world: int, rank: int, experts: str, hints: Sequence[tuple[str, str]]):
        self.graph, self.world, self.rank, self.experts = graph, world, rank, experts
        self.weights = _stored_in(graph)
        self.roles: dict[str, Role] = {}
        self.reasons: dict[int | None, str] = {}
        self._outside()
        for layer in layers_of(graph):
            if layer.index is None:
                self.reasons.setdefault(
                    None, f"{layer.attention.name} is in no layer: no module of the layers calls it"
                )
                continue
            self._attention(layer)
            self._feed_forward(layer)
        self._hinted(hints)
        self._complete()
        self.parts: dict[str, Part] = {}
        self.divisions: dict[str, Division] = {}
        for name, role in self.roles.items():
            if role.segments:
                part, division = self._part(name, role)
                for node, own in zip(self.weights[name].parts, parts_of(self.weights[name], part), strict=True):
                    if own is not None:
                        self.parts[node.meta["weight"]] = own
                self.divisions[name] = _in_values(self.weights[name], division)

    def kind(self, weight: Node) -> str:
        """Kind of a weight that a call reads, one of `dgraph.ranks.sharding.KINDS`."""
        role = self.roles.get(_name(weight) or "")
        return "replicated" if role is None else role.kind

    # -- the view ------------------------------------------------------------------------------------------------

    def _outside(self) -> None:
        embedding, found = embedding_of(self.graph), capped_head(self.graph)
        if isinstance(embedding, str):
            self.reasons[None] = embedding
        else:
            self._by_ids(args_of(embedding)[0])
        if isinstance(found, str):
            self.reasons[None] = found
        else:
            head, _ = found
            for weight in (head.weight, head.bias):
                if weight is not None:
                    self._by_ids(weight)

    def _by_ids(self, weight: Node) -> None:
        if name := _name(weight):
            self.roles[name] = self._ids(weight)

    def _ids(self, weight: Node) -> Role:
        length, vocab = _length(weight, 0), self.graph.spec.vocab
        if length != vocab:
            raise PassError(f"weight {_name(weight)!r} is of {length} ids, and the model has {vocab}.")
        return Role("vocabulary", 0, _even(length))

    def _attention(self, layer: Layer) -> None:
        found = layer.projections
        if isinstance(found, str):
            self.reasons[layer.index] = found
            return
        size = int(layer.queries.meta["val"].shape[-1])
        self._by_outputs(layer, "per head", [found.q, found.k, found.v], size)
        self._by_inputs(layer, found.o, found.o.shape[1] // size)

    def _feed_forward(self, layer: Layer) -> None:
        if (router := layer.router) is not None:
            for arg in router.node.all_input_nodes[1:]:
                if name := _name(arg):
                    self.roles[name] = WHOLE
        for node in layer.experts:
            for arg, dim, halves in ((args_of(node)[3], 1, 2), (args_of(node)[4], 2, 1)):
                if name := _name(arg):
                    self.roles[name] = self._of_experts(arg, dim, halves)
        found = layer.gated_unit
        if isinstance(found, str):
            self.reasons.setdefault(layer.index, found)
        elif found is not None:
            self._by_outputs(layer, "column", [p for p in (found.gate, found.up) if p is not None], 1)
            self._by_inputs(layer, found.down, found.down.shape[1])

    def _of_experts(self, weight: Node, dim: int, halves: int) -> Role:
        if self.experts == "parallel":
            return Role("experts", 0, _even(_length(weight, 0)))
        half = _length(weight, dim) // halves
        return Role("experts", dim, tuple(Segment(i * half, (i + 1) * half, half) for i in range(halves)))

    def _by_outputs(self, layer: Layer, kind: str, projections: Sequence[Projection], size: int) -> None:
        """Projections of one or several linear layers; `size` of their outputs stay together."""
        for linear in dict.fromkeys(p.linear for p in projections):
            mine = sorted((p.begin, p.end) for p in projections if p.linear == linear)
            segments = tuple(Segment(a, b, (b - a) // size, kind == "per head") for a, b in dict.fromkeys(mine))
            ends = [0, *(s.end for s in segments)]
            if [s.begin for s in segments] != ends[:-1] or ends[-1] != linear.shape[0] or linear.stored is None:
                self.reasons.setdefault(
                    layer.index, f"{linear.node.name} has other outputs than those of its projections, or is computed"
                )
                continue
            for weight in (linear.weight, linear.bias):
                if weight is not None and (name := _name(weight)):
                    self.roles[name] = Role(kind, 0, segments)

    def _by_inputs(self, layer: Layer, linear: Linear, units: int) -> None:
        if linear.stored is None:
            self.reasons.setdefault(layer.index, f"the weight of {linear.node.name} is computed")
            return
        self.roles[linear.stored.name] = Role("row", 1, (Segment(0, linear.shape[1], units),))
        if linear.bias is not None:
            self.roles[linear.bias.meta["weight"]] = Role("row", -1, _even(linear.shape[0]))

    # -- hints, and what is left ---------------------------------------------------------------------------------

    def _hinted(self, hints: Sequence[tuple[str, str]]) -> None:
        nodes = {name: stored.node for name, stored in self.weights.items()}
        for pattern, kind in hints:
            matching = [name for name in nodes if fnmatchcase(name, pattern)]
            if not matching:
                raise InputError(
                    f"the hint {pattern!r}: {kind!r} is of no weight; names are those of the captured graph, such as "
                    f"{', '.join(list(nodes)[:3])}."
                )
            for name in matching:
                self.roles[name] = self._hint(name, nodes[name], kind)

    def _hint(self, name: str, weight: Node, kind: str) -> Role:
        known = self.roles.get(name)
        if known is not None and known.kind == kind:
            return known
        if kind == "replicated":
            return WHOLE
        if kind == "vocabulary":
            return self._ids(weight)
        if kind == "row" and weight.meta["val"].dim() == 1:
            return Role("row", -1, _even(_length(weight, 0)))
        if kind == "row":
            return Role("row", 1, _even(_length(weight, 1)))
        if kind == "experts":
            raise InputError(
                f"{name!r} is hinted to be of experts, which are the weights that dgraph.experts "
                f"reads; it is read by {', '.join(user.name for user in weight.users)}."
            )
        size = self.graph.spec.head_dim if kind == "per head" else 1
        length = _length(weight, 0)
        return Role(kind, 0, (Segment(0, length, length // size, kind == "per head"),))

    def _complete(self) -> None:
        """Refuse a matrix without a declared role; vectors are whole, and values that they meet are checked later."""
        for name, stored in self.weights.items():
            weight = stored.node
            if name in self.roles or weight.meta["val"].dim() < 2:
                continue
            layer = next((user.meta["layer"] for user in weight.users), None)
            place = "outside the layers" if layer is None else f"in layer {layer}"
            expected = (
                "the embedding of input_ids or the LM head"
                if layer is None
                else "a projection of its queries, keys, values or outputs, gate, up or down, a router or experts"
            )
            why = self.reasons.get(layer) or self.reasons.get(None, "it is none of these")
            raise PassError(
                f"weight {name!r} {self.graph.type_text(weight)} {place}, read by "
                f"{', '.join(user.name for user in weight.users)}: expected {expected}; {why}. Say what it is in a "
                f"hint of the family or the pass: hints=(({name!r}, 'replicated'),). A pattern may stand for several."
            )

    # -- parts ---------------------------------------------------------------------------------------------------

    def _part(self, name: str, role: Role) -> tuple[Part, Division]:
        if role.dim < 0:  # a bias: one rank alone adds it
            length = role.segments[-1].end
            return Part.of(role.kind, 0, [(0, length if self.rank == 0 else 0)], length), partial(name)
        if role.kind == "vocabulary":
            length = role.segments[-1].end
            each = -(-length // self.world)
            begin, end = (min(length, (self.rank + i) * each) for i in (0, 1))
            return Part.of(role.kind, 0, [(begin, end)], each), Division(0, ((length, each),), name)
        ranges = [self._share(name, role, segment) for segment in role.segments]
        whole = [segment.end - segment.begin for segment in role.segments]
        own = [end - begin for begin, end in ranges]
        return Part.of(role.kind, role.dim, ranges), Division(role.dim, tuple(zip(whole, own, strict=True)), name)

    def _share(self, name: str, role: Role, segment: Segment) -> tuple[int, int]:
        """The (begin, end) that this rank has of a segment."""
        size = (segment.end - segment.begin) // max(1, segment.units)
        if segment.units % self.world == 0:
            count = segment.units // self.world
            at = self.rank * count
        elif segment.shared and segment.units and self.world % segment.units == 0:
            count, at = 1, self.rank // (self.world // segment.units)
        else:
            what = {"per head": "heads", "experts": "experts" if role.dim == 0 else "columns of each expert"}
            raise InputError(
                f"{segment.units} {what.get(role.kind, 'inputs' if role.kind == 'row' else 'outputs')} of weight "
                f"{name!r} cannot be divided over {self.world} ranks. Choose a number of ranks that divides them."
            )
        return segment.begin + at * size, segment.begin + (at + count) * size


def _even(length: int) -> tuple[Segment, ...]:
    return (Segment(0, length, length),)


def _length(weight: Node, dim: int) -> int:
    return int(weight.meta["val"].shape[dim])


def _name(node: Node) -> str | None:
    """The name of the weight that a value is, or is converted from; None if it is computed otherwise."""
    found = node
    while (stored := stored_of(found)) is None and found.op == "call_function" and len(found.all_input_nodes) == 1:
        found = found.all_input_nodes[0]
    return None if stored is None else stored.name


def _stored_in(graph: Graph) -> dict[str, Stored]:
    """The weights of a graph by name; values, scales and zeros are of one."""
    quantised = [stored for node in graph.find("dequantise") if (stored := stored_of(node)) is not None]
    of = {part: stored for stored in quantised for part in stored.parts}
    every = [of.get(node) or Stored(node, (node,)) for node in graph.weight_nodes().values()]
    return {stored.name: stored for stored in every}


def _in_values(stored: Stored, division: Division) -> Division:
    """The division of a weight as one of its values."""
    if division.is_partial:
        return division
    each = _length(stored.node, division.dim) // _length(stored.parts[0], division.dim)
    return division.at(division.dim, [(whole // each, own // each) for whole, own in division.parts])
