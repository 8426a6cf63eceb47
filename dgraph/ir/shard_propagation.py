"""Propagation of divisions: the part that each rank has of every value, if it has parts of some weights.

Calls are visited in order, from the weights on. A value is whole (the same on all ranks), divided along one dimension
(some heads, some outputs, some ids), or a partial sum. The sum of a partial sum over ranks is the value. An op passes a
division on by a rule of its own; one without a rule may read whole values alone. Arguments that count the divided
dimension (the sizes of a split, of a reshape) are changed to a rank's share.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dgraph.errors import PassError
from dgraph.ir import aten_kinds as kinds
from dgraph.ir.aten_rules import POINTWISE, Rule, is_linear, rule_of
from dgraph.ir.axes import Axes, Call, product
from dgraph.ir.graph import Graph
from dgraph.types.nodes import args_of, is_view, op_name, where

aten = torch.ops.aten

HINT = (
    "Divide no weight that leads here, {{{pattern!r}: 'replicated'}}, or let the family say in its hints what each "
    "weight is (dgraph.ranks.sharding.KINDS)"
)


@dataclass(frozen=True)
class Division:
    """Division of a value over ranks.

    Attributes:
        dim: the dimension that is divided; -1 for a partial sum, which has the value's own shape.
        parts: for each of the parts that lie there one after the other, its whole length and a rank's share of it.
        of: the weight by which it became so.
    """

    dim: int
    parts: tuple[tuple[int, int], ...]
    of: str

    @property
    def is_partial(self) -> bool:
        """True for a partial sum."""
        return self.dim < 0

    @property
    def own(self) -> int:
        """Length of a rank's share along the dimension."""
        return sum(part[1] for part in self.parts)

    def text(self) -> str:
        """For a message."""
        if self.is_partial:
            return f"a partial sum (by {self.of})"
        whole = sum(part[0] for part in self.parts)
        return f"divided along dimension {self.dim}, {self.own} of {whole} (by {self.of})"

    def at(self, dim: int, parts: Sequence[tuple[int, int]] | None = None) -> Division:
        """The same along another dimension, or in other parts."""
        return Division(dim, self.parts if parts is None else tuple(parts), self.of)


def partial(of: str) -> Division:
    """A partial sum that a weight makes."""
    return Division(-1, (), of)


class Divided:
    """Follower of divisions through a captured graph, which changes the arguments that count a divided dimension.

    Args:
        graph: its types are those before the division; `propagate` it afterwards.
        weights: the divisions of its weights, by name.
        by: the pass.

    Attributes:
        of: by node, its division; whole values are not in it.
    """

    def __init__(self, graph: Graph, weights: Mapping[str, Division], by: str):
        self.graph, self.by = graph, by
        self.of: dict[Node, Any] = {}
        for name, node in graph.weight_nodes().items():
            if name in weights:
                self.of[node] = weights[name]

    def run(self) -> None:
        """Look at every call, and sum partial sums over ranks before the first call that needs the sum.

        Raises:
            PassError: a call reads what is divided and has no rule for it; the message names it.
        """
        for node in self.graph.calls:
            read = [arg for arg in node.all_input_nodes if self.of.get(arg) is not None]
            partial_sums = [arg for arg in read if self._is_partial(arg) and "weight" not in arg.meta]
            if partial_sums and not self._takes_partial(node, partial_sums):
                for arg in partial_sums:
                    self.sum(arg)
                read = [arg for arg in read if arg not in partial_sums]
            elif partial_sums:
                self.of[node] = self.of[partial_sums[0]]
                continue
            if not read:
                continue
            if node.target is operator.getitem:
                found = self.of[args_of(node)[0]]
                self.of[node] = found[args_of(node)[1]] if isinstance(found, list) else found
                continue
            self.of[node] = self._divided(node, read)

        for value in args_of(self.graph.output)[0]:
            if self._is_partial(value):
                self.sum(value)

    def _divided(self, node: Node, read: Sequence[Node]) -> Any:
        if (special := _BY_OP.get(op_name(node.target))) is not None:
            return special(self, node)
        if (rule := rule_of(node.target)) is None:
            raise self.error(node, read[0], "expected a whole value; nothing is known of this op's parts")
        return _BY_KIND[rule.axes](self, node) if rule.axes in _BY_KIND else self._by_axes(node, rule)

    def sum(self, value: Node) -> Node:
        """The sum over ranks of a partial sum, which all that read it read from now on."""
        total = self.graph.over_ranks(value, self.by)
        self.graph.redirect(value, total, after=total)
        return total

    def _is_partial(self, node: Node) -> bool:
        found = self.of.get(node)
        return isinstance(found, Division) and found.is_partial

    def _takes_partial(self, node: Node, read: Sequence[Node]) -> bool:
        """True if a call on partial sums gives one and is their only reader: one sum over ranks serves all."""
        if any(len(arg.users) > 1 for arg in read) or not is_linear(node):
            return False
        if node.target is aten.add.Tensor and not node.kwargs:
            return len(read) == len(node.args) == 2
        return is_view(node) and product(self._shape(node)) == product(self._shape(read[0]))

    def error(self, node: Node, read: Node, why: str) -> PassError:
        """A message about a call and what it reads."""
        found = self.of.get(read)
        got = found.text() if isinstance(found, Division) else "whole"
        name = read.meta.get("weight")
        what = f"weight {name!r} {self.graph.type_text(read)}" if name else f"{read.name} {self.graph.type_text(read)}"
        by = found.of if isinstance(found, Division) else name or ""
        return PassError(
            f"{where(node)} at {node.meta.get('source') or 'unknown line'}: {op_name(node.target)} reads {what}, which "
            f"is {got}; {why}. {HINT.format(pattern=by)}."
        )

    # -- rules ---------------------------------------------------------------------------------------------------

    def _shape(self, node: Node) -> Sequence[Any]:
        value = node.meta["val"]
        return (value[0] if isinstance(value, (tuple, list)) else value).shape

    def _dims(self, node: Node) -> int:
        return len(self._shape(node))

    def _by_axes(self, node: Node, rule: Rule) -> Division:
        """Division of the result, by the table of axes; values that meet the divided one are divided alike, or have one
        entry.
        """
        passages = rule.axes(Call(node)).passages
        known = [(p, found) for p in passages if (found := self.of.get(p.node)) is not None]
        if not known:
            raise self.error(node, node.all_input_nodes[0], "expected an op that is not told how many there are")
        arg, first = known[0]
        to = arg.dims[first.dim]
        if to is None:
            raise self.error(node, arg.node, f"{op_name(node.target)} works along that dimension; expected it whole")
        for passage in passages:
            found = self.of.get(passage.node)
            mine = next((dim for dim, at in enumerate(passage.dims) if at == to), None)
            alike = mine is None or self._shape(passage.node)[mine] == 1
            if found is not None:
                alike = found.dim == mine and found.parts == first.parts
            if not alike:
                raise self.error(node, passage.node, f"expected as {arg.node.name} is, {first.text()}")
        return first.at(to)

    def _linear(self, node: Node) -> Division | None:
        x, weight, bias = (*args_of(node), None)[:3]
        of_x, of_w, of_b = (self.of.get(arg) if isinstance(arg, Node) else None for arg in (x, weight, bias))
        last = self._dims(x) - 1
        if of_w is None:
            if of_x is not None and of_x.dim == last:
                raise self.error(node, weight, f"expected to be divided by its inputs, as {x.name} is: {of_x.text()}")
            return of_x
        if of_w.dim == 0:
            if of_x is not None:
                raise self.error(node, x, f"expected whole, since weight {of_w.of!r} is divided by its outputs")
            if bias is not None and (of_b is None or (of_b.dim, of_b.parts) != (of_w.dim, of_w.parts)):
                raise self.error(node, bias, f"expected to be divided as weight {of_w.of!r} is")
            return of_w.at(last)
        if of_x is None or of_x.dim != last or of_x.parts != of_w.parts:
            raise self.error(node, x, f"expected to be divided along its last dimension, as weight is: {of_w.text()}")
        if bias is not None and (of_b is None or not of_b.is_partial):
            raise self.error(node, bias, "expected on one rank alone, or it would be added by each")
        return partial(of_w.of)

    def _norm(self, node: Node) -> Division:
        x, *others = [arg for arg in args_of(node) if isinstance(arg, Node)]
        found = self.of.get(x)
        shape = args_of(node)[1]
        over = len(shape) if isinstance(shape, (list, tuple)) else 1
        if found is None or any(other in self.of for other in others):
            raise self.error(node, next(a for a in (x, *others) if a in self.of), "expected as the normed value is")
        if found.dim >= self._dims(x) - over:
            named = ", ".join(
                f"weight {o.meta['weight']!r} {self.graph.type_text(o)}" for o in others if "weight" in o.meta
            )
            why = f"{named or 'it'} norms all of that dimension at once; expected a norm of each head by itself"
            raise self.error(node, x, why)
        return found

    def _rope(self, node: Node) -> Division:
        x, cos, sin = args_of(node)
        found = self.of.get(x)
        if found is None or found.dim == self._dims(x) - 1:
            raise self.error(
                node, next(a for a in (x, cos, sin) if a in self.of), "expected whole heads of queries or keys"
            )
        return self._by_axes(node, POINTWISE)

    def _attention(self, node: Node) -> Division:
        found: list[Division] = []
        for arg in args_of(node)[:3]:
            of = self.of.get(arg)
            if of is None or of.dim != 1 or len(of.parts) != 1:
                raise self.error(node, arg, "expected some heads of queries, keys and values each")
            found.append(of)
        of_q, of_k, of_v = found
        if of_k.parts != of_v.parts or of_q.own % of_k.own:
            raise self.error(node, args_of(node)[1], f"expected heads that {of_q.own} heads of queries share")
        return of_q

    def _experts(self, node: Node) -> Division:
        *rows, gate_up, down = args_of(node)[:5]
        for arg in rows:
            if arg in self.of:
                raise self.error(node, arg, "expected whole, as its experts are given rows")
        of_g, of_d = self.of.get(gate_up), self.of.get(down)
        if of_g is None or of_d is None or (of_g.dim, of_d.dim) not in ((0, 0), (1, 2)) or of_g.own % of_d.own:
            raise self.error(node, gate_up if of_g is None else down, "expected gate, up and down divided alike")
        return partial(of_d.of)

    def _dequantise(self, node: Node) -> Division | None:
        values, *others = [arg for arg in args_of(node)[:3] if arg is not None]
        found = self.of.get(values)
        if found is None:
            for other in others:
                if other in self.of:
                    raise self.error(node, other, f"expected whole, as {values.name} is")
            return None
        each = int(self._shape(node)[found.dim]) // int(self._shape(values)[found.dim])  # two 4-bit numbers are one
        return found.at(found.dim, [(whole * each, own * each) for whole, own in found.parts])

    def _embedding(self, node: Node) -> Division:
        return partial(self.of[args_of(node)[0]].of)

    def _view(self, node: Node) -> Division:
        """Reshapes: the dimension whose elements begin where those of the divided one do."""
        source = args_of(node)[0]
        found = self.of[source]
        old, new = self._shape(source), self._shape(node)
        span = product(old[found.dim :])
        dims = [i for i in range(len(new) - 1, -1, -1) if product(new[i:]) == span]
        if not dims:
            raise self.error(node, source, f"expected a reshape that keeps its parts, got {self.graph.type_text(node)}")
        inner = product(old[found.dim + 1 :])
        # The last fitting dimension: of [1, head_dim] on every rank it is the head.
        for at in reversed(dims):
            outer = product(new[at + 1 :])
            parts = [(whole * inner / outer, own * inner / outer) for whole, own in found.parts]
            if all(value == int(value) for part in parts for value in part):
                break
        else:
            raise self.error(node, source, f"expected whole entries of {self.graph.type_text(node)} on each rank")
        result = found.at(at, [(int(whole), int(own)) for whole, own in parts])
        if op_name(node.target) in ("reshape", "view", "expand", "_unsafe_view"):
            self._resize(node, at, result.own)
        elif op_name(node.target) == "unflatten":
            _, dim, sizes = args_of(node)
            at_size = at - dim % len(old)
            if 0 <= at_size < len(sizes) and sizes[at_size] != -1:
                new_sizes = [result.own if i == at_size else s for i, s in enumerate(sizes)]
                node.args = (source, dim, new_sizes)
        return result

    def _expand(self, node: Node) -> Division:
        source = args_of(node)[0]
        found = self.of[source]
        result = found.at(found.dim + self._dims(node) - self._dims(source))
        self._resize(node, result.dim, result.own)
        return result

    def _resize(self, node: Node, at: int, own: int) -> None:
        """Let the size that a call is given of a dimension be a rank's own."""
        source, sizes, *rest = args_of(node)
        if isinstance(sizes[at], int) and sizes[at] != -1:
            node.args = (source, [own if i == at else s for i, s in enumerate(sizes)], *rest)

    def _same(self, node: Node) -> Division:
        return self.of[args_of(node)[0]]

    def _split(self, node: Node) -> list[Division]:
        source, _, *rest = args_of(node)
        found, dim = self.of[source], (rest[0] if rest else 0) % self._dims(source)
        count = len(node.meta["val"])
        if dim != found.dim:
            return [found] * count
        at, groups = 0, []
        for piece in node.meta["val"]:
            groups.append(self._within(node, source, at, at + int(piece.shape[dim])))
            at += int(piece.shape[dim])
        own = [group.own for group in groups]
        if op_name(node.target) == "split_with_sizes":
            node.args = (source, own, *rest)
        elif len(set(own)) > 1:
            raise self.error(node, source, "expected pieces of one length on a rank")
        elif op_name(node.target) == "split":
            node.args = (source, own[0], *rest)
        return groups

    def _slice(self, node: Node) -> Division:
        source, dim, begin, end, *step = (*args_of(node), *(0, 0, None)[len(args_of(node)) - 1 :])[:5]
        found = self.of[source]
        if dim % self._dims(source) != found.dim:
            return found
        whole = int(self._shape(source)[found.dim])
        begin, end = (
            value + whole if value < 0 else min(value, whole) for value in (begin or 0, whole if end is None else end)
        )
        if step and step[0] != 1:
            raise self.error(node, source, "expected neighbouring entries")
        result, before = self._within(node, source, begin, end), self._within(node, source, 0, begin)
        node.args = (source, dim, before.own, before.own + result.own)
        return result

    def _within(self, node: Node, source: Node, begin: int, end: int) -> Division:
        """The parts between two places of a divided value."""
        found, at, inside = self.of[source], 0, []
        for whole, own in found.parts:
            if at >= end or at + whole <= begin:
                pass
            elif at >= begin and at + whole <= end:
                inside.append((whole, own))
            else:
                raise self.error(node, source, f"{begin}..{end} is a piece of a part of it; expected whole parts")
            at += whole
        return found.at(found.dim, inside)

    def _cat(self, node: Node) -> Division:
        values, dim = args_of(node)[0], (args_of(node)[1] if len(args_of(node)) > 1 else 0)
        first = next(self.of[value] for value in values if value in self.of)
        found: list[Division] = []
        for value in values:
            of = self.of.get(value)
            if of is None or of.dim != first.dim:
                raise self.error(node, value, f"expected as the others, {first.text()}")
            found.append(of)
        if dim % self._dims(node) == first.dim:
            return first.at(first.dim, [part for of in found for part in of.parts])
        if any(of.parts != first.parts for of in found):
            raise self.error(node, values[0], "expected parts as the others have them")
        return first


_BY_OP: dict[str, Callable[[Divided, Node], Any]] = {
    "dgraph.embedding_part": Divided._embedding,
    "dgraph.dequantise": Divided._dequantise,
    "dgraph.round_rows": Divided._same,  # a rank scales its share of a row
    "dgraph.rms_norm": Divided._norm,
    "dgraph.rope": Divided._rope,
    "dgraph.attention": Divided._attention,
    "dgraph.experts": Divided._experts,
}
"""Ops of dgraph that pass a division on."""

_BY_KIND: dict[Callable[[Call], Axes], Callable[[Divided, Node], Any]] = {
    kinds.linear: Divided._linear,
    kinds.normed: Divided._norm,
    kinds.rearranged: Divided._view,
    kinds.expanded: Divided._expand,
    kinds.split: Divided._split,
    kinds.sliced: Divided._slice,
    kinds.joined: Divided._cat,
}
"""Kinds of ops that divide along the dimension itself, or whose arguments count the divided dimension."""
