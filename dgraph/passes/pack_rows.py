"""PackRows: from a padded batch [b, t, ...] to packed rows [N, ...]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from dgraph.errors import PassError
from dgraph.ir import aten_kinds as kinds
from dgraph.ir.aten_rules import Rule, rule_of
from dgraph.ir.axes import Axes, Call
from dgraph.ir.graph import Graph
from dgraph.ops import OPS, Op, op_of
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of, op_name, role_of, where
from dgraph.types.shapes import InputSpec

aten = torch.ops.aten

CU_ROWS = InputSpec("cu_rows", torch.int32, ("b+1",))
LIMIT = InputSpec("limit", torch.int32, ("N",))
ORIGIN = InputSpec("origin", torch.int32, ("N",))


@dataclass(frozen=True)
class PackRows(Pass):
    """Pack all tokens of a step as rows, so that only attention reads sequence boundaries.

    Every value is brought into one layout: rows first, then its other dimensions in their order. A transpose between
    tokens and heads therefore vanishes, and so does every read of a batch or sequence size. Attention becomes
    `packed_attention`, which takes the sequence boundaries `cu_rows` i32[b+1] and, for each row, the `limit` i32[N]
    of key positions that it sees. An attention with a window also takes the `origin` i32[N] from which it counts back:
    where the row stands, or where its block begins.

        before  %4 = linear(%3, self_attn.q_proj.weight)    f32[b, t, 256]
                %5 = reshape(%4, [%b, %t, -1, 32])          f32[b, t, 8, 32]
                %6 = transpose(%5, 1, 2)                    f32[b, 8, t, 32]
        after   %4 = linear(%3, self_attn.q_proj.weight)    f32[N, 256]
                %5 = reshape(%4, [-1, 8, 32])               f32[N, 8, 32]

    Exact: each row goes through the same operations. A row attends to the keys before its `limit`, which for a whole
    sequence are those of the captured bidirectional attention.

    Raises:
        PassError: an op for which no row layout is known; the message names op, module and line. A package adds one
            with `dgraph.ir.aten_rules.register`.
    """

    effect: ClassVar[Effect] = Effect.EXACT
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "packs all tokens of a step as rows [N, ...]"
    signature: ClassVar[frozenset[str]] = frozenset({"*"})  # inputs per token become inputs per row

    def run(self, graph: Graph, report: Report) -> None:
        if not graph.find("attention"):
            report.skip("no dgraph.attention over [b, heads, t, head_dim]", graph.output)
            return
        _Packer(graph, report).run()


class _Packer:
    """Rewrites in place, front to back: `self.old` keeps the type that each value had before."""

    def __init__(self, graph: Graph, report: Report):
        self.graph, self.report = graph, report
        self.old = {node: node.meta["val"] for node in graph.nodes}
        self.new: dict[Node, Node] = {}

    def run(self) -> None:
        graph = self.graph
        if "positions" not in graph.inputs:  # a model without rotary embedding reads none, but attention does
            graph.add_input(InputSpec("positions", torch.int64, ("N",)))
        for name, old in list(graph.inputs.items()):
            if old.shape[:2] == ("b", "t"):
                graph.inputs[name] = spec = InputSpec(name, old.dtype, ("N", *old.shape[2:]))
                graph.input(name).meta["val"] = graph.symbols.shared(spec.shape, spec.dtype, graph.device)
        self.cu_rows, self.limit = graph.add_input(CU_ROWS), graph.add_input(LIMIT)
        for node in graph.calls:
            if isinstance(self.old[node], (int, torch.SymInt)):
                continue  # a size of the old layout; nothing reads it when all are packed
            self.new[node] = self._pack(node)
        (logits,) = args_of(graph.output)[0]
        graph.set_outputs({"logits": self._of(logits)})
        for node in reversed(graph.calls):
            if node in self.old and not node.users:
                graph.fx.erase_node(node)
        graph.sweep()
        graph.propagate()

    # -- layout --------------------------------------------------------------------------------------------------

    def _type(self, node: Node) -> torch.Tensor:
        """A value's type before packing; that of its first part for a split."""
        value = self.old[node]
        return value[0] if isinstance(value, (tuple, list)) else value

    def _row_dims(self, node: Node) -> list[int]:
        """Dimensions of a value's old type that run over sequences or tokens."""
        names = self.graph.symbols.names_in
        return [i for i, s in enumerate(self._type(node).shape) if names(s) & {"b", "t"}]

    def _inner(self, node: Node) -> dict[int, int]:
        """The dimensions along which a token has entries, in order, and how many it has there.

        Dimension i + 1 of the packed value is the i-th of them. A dimension of 4 * b has 4 entries for each sequence.
        """
        b, t = (self.graph.symbols.size(name).node.expr for name in ("b", "t"))
        found: dict[int, int] = {}
        for i, size in enumerate(self._type(node).shape):
            each = size if isinstance(size, int) else int(size.node.expr.subs({b: 1, t: 1}))
            if each != 1 or isinstance(size, int):
                found[i] = each
        return found

    def _others(self, node: Node) -> list[int]:
        """The dimensions of `_inner`."""
        return list(self._inner(node))

    def _sizes(self, node: Node) -> list[int]:
        """The sizes of `_inner`."""
        return list(self._inner(node).values())

    def _is_rows(self, node: Node) -> bool:
        """True if the old value has one entry per token (and not merely per sequence)."""
        names = self.graph.symbols.names_in
        return any("t" in names(s) for s in self._type(node).shape)

    def _dim(self, node: Node, dim: int, reader: Node | None = None) -> int:
        """The packed dimension of an old dimension that is not over rows; an error is about the reader of `node`."""
        dim %= self._type(node).dim()
        if dim in self._row_dims(node):
            raise self._unknown(reader or node, f"it works along dimension {dim}, which runs over tokens")
        offset = 1 if self._is_rows(node) else 0
        return offset + self._others(node).index(dim)

    def _of(self, node: Node) -> Node:
        return self.new.get(node, node)

    def _unknown(self, node: Node, why: str) -> PassError:
        return PassError(
            f"PackRows: op {op_name(node.target)} in module {role_of(node)} "
            f"({where(node)}) at {node.meta.get('source') or 'unknown line'} has no row layout: {why}."
        )

    def _call(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
        new = self.graph.call(target, args, kwargs, before=node, by=self.report.name, like=node)
        new.meta["source"] = node.meta.get("source", "")
        if target is node.target and _constants(args) == _constants(args_of(node)):
            new.meta["by"] = node.meta["by"]  # the same op on packed values: not this pass's making
        return new

    # -- rules ---------------------------------------------------------------------------------------------------

    def _pack(self, node: Node) -> Node:
        sources = [a for a in node.all_input_nodes if not isinstance(self.old[a], (int, torch.SymInt))]
        if not any(map(self._row_dims, [*sources, node])):
            return node  # computed from weights alone
        if self._is_rows(node) and not any(map(self._is_rows, sources)):
            raise self._unknown(node, "it makes values along tokens out of values that have none")
        op = op_of(node.target)
        special = _BY_OP.get(op_name(node.target))
        if special is not None:
            return special(self, node)
        rule = rule_of(node.target)
        if rule is not None:
            return self._by_rule(node, rule)
        if op is not None and op.inline and not op.in_bounds:
            return self._pointwise(node)
        if op is not None and op.by_row:
            return self._by_row(node, op)
        raise self._unknown(
            node,
            "no rule is known for it. Add one with dgraph.ir.aten_rules.register in a module of the entry-point group "
            "'dgraph.ops', or write the forward with other ops",
        )

    def _by_rule(self, node: Node, rule: Rule) -> Node:
        """By the kind of an op, or the same op with its dimensions numbered anew."""
        call = Call(node, self.old.__getitem__)
        if rule.axes in _BY_KIND and not rule.dims:
            return _BY_KIND[rule.axes](self, node)
        if rule.axes in _PLACED:
            raise self._unknown(node, "its arguments say by their places which dimensions are meant")
        self._keep_tokens(node, rule.axes(call))
        numbered = node if rule.of_result else call.tensors[0][1]
        dims = {name: self._numbered(numbered, call.get(name), node) for name in rule.dims}
        given = list(call.values)[: len(args_of(node))]
        args = tuple(dims.pop(name) if name in dims else self._packed(call.values[name]) for name in given)
        left_out = {name: dim for name, dim in dims.items() if dim is not None}
        return self._call(node, node.target, args, {**node.kwargs, **left_out})

    def _packed(self, value: Any) -> Any:
        return torch.fx.map_arg(value, self._of)

    def _numbered(self, node: Node, dims: Any, reader: Node) -> Any:
        """Dimensions of an old value as those of the packed one; None, which stands for all, as it is."""
        if isinstance(dims, (list, tuple)):
            return [self._dim(node, d, reader) for d in dims]
        return None if dims is None else self._dim(node, dims, reader)

    def _keep_tokens(self, node: Node, axes: Axes) -> None:
        """The dimensions of sequences and tokens of each argument become those of the result.

        Raises:
            PassError: one is worked along, or tokens meet other tokens.
        """
        rows = self._row_dims(node)
        for passage in axes.passages:
            mine = self._row_dims(passage.node)
            for dim in mine:
                if passage.dims[dim] is None:
                    raise self._unknown(node, f"it works along dimension {dim}, which runs over tokens")
            if self._is_rows(passage.node) and sorted(d for i in mine if (d := passage.dims[i]) is not None) != rows:
                got, made = self._old_text(passage.node), self._old_text(node)
                raise self._unknown(node, f"tokens of {passage.node.name} {got} meet others in {made}")

    def _by_row(self, node: Node, op: Op) -> Node:
        """Ops that say that they act row by row, whose rows come first."""
        args = dict(zip(op.arguments, args_of(node), strict=False))
        for name, value in args.items():
            if not isinstance(value, Node) or not self._row_dims(value):
                continue
            if name not in op.by_row:
                raise self._unknown(node, f"it looks at all tokens of {name}")
            if self._row_dims(value) != list(range(len(self._row_dims(value)))):
                raise self._unknown(node, f"tokens do not come first in {name} {self._old_text(value)}")
        return self._of_rows(node)

    def _pointwise(self, node: Node) -> Node:
        """Same op; operands without rows lose the dimensions that stood at the place of rows."""
        self._keep_tokens(node, kinds.pointwise(Call(node, self.old.__getitem__)))
        rank, rows = self.old[node].dim(), self._row_dims(node)
        args = []
        for arg in args_of(node):
            if not isinstance(arg, Node) or self._is_rows(arg):
                args.append(self._of(arg) if isinstance(arg, Node) else arg)
                continue
            # Right-aligned broadcasting: dimension i of the operand meets dimension i + rank - operand rank.
            shift = rank - self.old[arg].dim()
            at_rows = [r - shift for r in rows if r >= shift]
            packed = self._of(arg)
            if any(self.old[arg].shape[i] != 1 for i in at_rows if not self._row_dims(arg)):
                raise self._unknown(node, f"operand {arg.name} has its own values along tokens but no rows")
            if at_rows and not self._row_dims(arg):
                keep = [int(s) for i, s in enumerate(self.old[arg].shape) if i not in at_rows]
                packed = self._call(node, aten.reshape.default, (packed, keep))
            args.append(packed)
        return self._call(node, node.target, tuple(args), node.kwargs)

    def _embedding(self, node: Node) -> Node:
        """Pack an embedding, without the arguments that matter to gradients alone."""
        weight, ids = args_of(node)[:2]
        return self._call(node, node.target, (weight, self._of(ids)))

    def _reshape(self, node: Node) -> Node:
        source = args_of(node)[0]
        if not self._is_rows(node):
            raise self._unknown(node, "its result has no rows")
        if self._strides(source) != self._strides(node):
            raise self._unknown(node, f"it turns {self._old_text(source)} into {self._old_text(node)}, across tokens")
        if self._sizes(source) == self._sizes(node):
            return self._of(source)
        return self._call(node, aten.reshape.default, (self._of(source), [-1, *self._sizes(node)]))

    def _strides(self, node: Node) -> list[Any]:
        """Values between two sequences, and between two tokens of one, in a contiguous value of the old type."""
        b, t = (self.graph.symbols.size(name).node.expr for name in ("b", "t"))
        found: dict[Any, Any] = {}
        inner: Any = 1
        for size in reversed(self._type(node).shape):
            expression = size if isinstance(size, int) else size.node.expr
            if not isinstance(size, int):
                if t in expression.free_symbols:
                    found[t] = expression.subs({b: 1, t: 1}) * inner
                if b in expression.free_symbols:
                    found[b] = expression.subs({b: 1}) * inner
            inner = inner * expression
        return [found.get(b), found.get(t)]

    def _old_text(self, node: Node) -> str:
        return self.graph.symbols.type_text(self.old[node])

    def _permute(self, node: Node) -> Node:
        """Rows stay first; only an exchange among the other dimensions remains."""
        source = args_of(node)[0]
        order = kinds.order_of(Call(node, self.old.__getitem__))
        others = [d for d in order if d in self._others(source)]
        if others == sorted(others):
            return self._of(source)
        packed = [0, *(1 + self._others(source).index(d) for d in others)]
        return self._call(node, aten.permute.default, (self._of(source), packed))

    def _expand(self, node: Node) -> Node:
        """A constant repeated for every sequence (packed, it is the constant), or values repeated within their rows."""
        source = args_of(node)[0]
        if self._is_rows(source) and self._sizes(source) == self._sizes(node):
            return self._of(source)
        if self._is_rows(source) and self._row_dims(source) == self._row_dims(node):
            return self._call(node, aten.expand.default, (self._of(source), [-1, *self._sizes(node)]))
        if self._is_rows(node) or self._row_dims(source):
            raise self._unknown(node, "it repeats values along tokens")
        keep = [int(s) for i, s in enumerate(self.old[source].shape) if i in self._others(node)]
        return self._call(node, aten.reshape.default, (self._of(source), keep))

    def _matmul(self, node: Node) -> Node:
        """Rows times a constant matrix, or [b, m, k] (equal for all sequences) @ [b, k, t].

        The second is the rotary table of some versions of transformers.
        """
        left, right = args_of(node)[:2]
        if self._is_rows(left) and not self._row_dims(right) and self.old[right].dim() <= 2:
            self._dim(left, -1, node)
            return self._of_rows(node)
        rows_last = self._is_rows(right) and self._row_dims(right)[-1] == self.old[right].dim() - 1
        if self._is_rows(left) or not rows_last or len(self._sizes(left)) != 2:
            raise self._unknown(node, "only rows and a constant matrix, or one times columns of tokens, are supported")
        return self._call(node, aten.linear.default, (self._of(right), self._of(left)))

    def _einsum(self, node: Node) -> Node:
        """One letter for rows, in front; those of sequences and tokens are left out."""
        call = Call(node, self.old.__getitem__)
        self._keep_tokens(node, kinds.summed_by_letters(call))
        (terms, result), operands = kinds.letters_of(call), call.nodes("tensors")
        if any(self._row_dims(value) and not self._is_rows(value) for value in operands):
            raise self._unknown(node, "it reads a value of each sequence")
        row = result[self._row_dims(node)[-1]]

        def packed(letters: str, value: Node) -> str:
            inner = "".join(letters[i] for i in self._others(value))
            return row + inner if self._is_rows(value) else letters

        written = ",".join(map(packed, terms, operands)) + "->" + packed(result, node)
        return self._call(node, node.target, (written, [self._of(value) for value in operands]))

    def _of_rows(self, node: Node) -> Node:
        """Ops of rows, and of weights that have none."""
        return self._call(node, node.target, tuple(self._packed(a) for a in args_of(node)), node.kwargs)

    def _block_experts(self, node: Node) -> Node:
        self._dim(args_of(node)[0], -1, node)
        return self._of_rows(node)

    def _block_numbers(self, node: Node) -> Node:
        positions, _, block = args_of(node)
        return self._call(node, node.target, (self._of(positions), self.cu_rows, block))

    def _attention(self, node: Node) -> Node:
        q, k, v, scale, *window = args_of(node)
        positions = self.graph.input("positions")
        more = (self.graph.add_input(ORIGIN), *window) if any(window) else ()
        args = (*(self._of(x) for x in (q, k, v)), positions, self.cu_rows, self.limit, scale, *more)
        new = self._call(node, OPS["packed_attention"], args)
        self.report.did("attention -> packed_attention", node.meta["layer"])
        return new


def _constants(args: tuple[Any, ...]) -> list[Any]:
    """The arguments that are not computed."""
    return [a for a in args if not isinstance(a, Node)]


_BY_OP: dict[str, Callable[[_Packer, Node], Node]] = {
    "dgraph.attention": _Packer._attention,
    "dgraph.block_experts": _Packer._block_experts,
    "dgraph.block_numbers": _Packer._block_numbers,
}
"""Ops that look at several tokens of a sequence."""

_BY_KIND: dict[Callable[[Call], Axes], Callable[[_Packer, Node], Node]] = {
    kinds.pointwise: _Packer._pointwise,
    kinds.chosen: _Packer._pointwise,
    kinds.summed_by_letters: _Packer._einsum,
    kinds.rearranged: _Packer._reshape,
    kinds.permuted: _Packer._permute,
    kinds.expanded: _Packer._expand,
    kinds.multiplied: _Packer._matmul,
    kinds.looked_up: _Packer._embedding,
}
"""Kinds of ops whose call changes with its layout."""

_PLACED = {kinds.indexed, kinds.padded, kinds.tiled, kinds.convolved, kinds.attended}
_PLACED |= {kinds.by_group, kinds.triangular, kinds.picked, kinds.outer}
"""Kinds of ops whose call would have to be written anew."""
