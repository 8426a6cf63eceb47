"""QuantizeWeights: the weights of a captured graph in 8 or 4 bits, and the rows that they meet in 8."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.families.quantised import KINDS, ROW_KINDS, WHOLE, Format
from dgraph.families.weights import Quantising, Shapes, WeightSource
from dgraph.ir.graph import Graph
from dgraph.ir.linears import embedding_of, head_of, linears_of
from dgraph.ir.stored_weights import Stored, formats_of, quantised_as, stored_of, take_weights
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper
from dgraph.types.nodes import args_of, op_name

aten = torch.ops.aten


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """Store the weights of linear layers, experts and embeddings in 8 or 4 bits, with a scale for each block of them.

        before  %4 = linear(%3, q_proj.weight)                                                       f32[b, t, 64]
        after   %4 = dgraph.dequantise(q_proj.weight, q_proj.weight_scale, None, [1, -1], f32)       f32[64, 64]
                %5 = linear(%3, %4)                                                                  f32[b, t, 64]

    Weights are rounded to the nearest numbers (`dgraph.families.quantised`). A product that reads such a weight
    multiplies by the stored numbers, and no dequantised weight lies in memory (`dgraph.ir.quantised_operands`). Any
    other reader dequantises it.

    Rows are rounded within the norm or the activation that makes them. Between the products of experts they are rounded
    within the gate. On a GPU they are rounded within the sum over the shares of an attention's keys
    (`dgraph.lowering.peephole`). A kernel reads the rows again if keys are not divided or a row is too wide for a
    program. It also does so after a gated unit within its product (FuseGLU). There a program has some heads, or a tile,
    of a row, and the scale is of the whole row. To round within the activation would leave gate and up in memory, which
    takes longer.

    It runs on a captured graph, before any other pass, so that all phases share the stored tensors. Ranks divide
    weights that were quantised whole: a sharded model has the scales of the whole one.

    Approximate, unless the weights are numbers of the format times scales already.

    Attributes:
        format: "fp8", "int8" or "int4"; see `dgraph.families.quantised.Format`. None leaves all weights as they are.
        block: rows and columns of a weight that share a scale, -1 for all; None for the format's own.
        zeros: True if each block also stores the number that stands for 0.
        which: patterns of the names of weights (`"*.mlp.*"`, `"model.layers.3.*"`), of which one must match.
        but: patterns of names of which none may match.
        lm_head: True if the LM head is among them.
        embeddings: True if the embeddings are among them; a step reads and dequantises only the vectors that it needs.
            If they are the LM head's weight too (tied), they are stored once, if both are chosen. If only one of the
            two is chosen, neither is quantised, since that would make two weights.
        router: True if the projections that decide which experts run are among them.
        activations: True if products by these weights also read their rows in the format's numbers. The format must
            then have 8 bits and one scale for each row of a weight. Without a format: products by weights that a
            checkpoint stores so.
        weights: source of the weights, if the graph's tensors only stand for them; no part of the configuration.
            `Shapes`: the tensors stay stand-ins, since the pass that divides the graph reads them.

    Raises:
        UnknownName: another format.
        InputError: an invalid block, a pattern that no weight matches, or activations in a format that products cannot
            take.
    """

    format: str | None = "fp8"
    block: tuple[int, int] | None = None
    zeros: bool = False
    which: tuple[str, ...] = ("*",)
    but: tuple[str, ...] = ()
    lm_head: bool = False
    embeddings: bool = False
    router: bool = False
    activations: bool = False
    weights: WeightSource | Shapes | None = field(default=None, repr=False, compare=False)

    effect: ClassVar[Effect] = Effect.APPROXIMATE
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "weights in 8 or 4 bits, with a scale for each block of them"
    changes_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("which", "but"):
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)) or not all(isinstance(pattern, str) for pattern in given):
                raise InputError(f"{name} must be patterns of names of weights, as ({str(given)!r},), got {given!r}.")
            object.__setattr__(self, name, tuple(given))
        for name in ("zeros", "lm_head", "embeddings", "router", "activations"):
            if type(getattr(self, name)) is not bool:
                raise InputError(f"{name} is true or false, got {getattr(self, name)!r}.")
        format = self._format()
        given = [name for name in ("block", "zeros", "lm_head", "embeddings", "router") if getattr(self, name)]
        if format is None and given:
            raise InputError(f"without a format no weight is stored: leave {', '.join(given)} out, or name a format.")
        if format is not None and self.block is not None:
            object.__setattr__(self, "block", format.block)
        if not self.activations or format is None:
            return
        assert format.block is not None  # filled in by the format
        if format.kind not in ROW_KINDS or format.block[1] != WHOLE or format.zeros:
            raise InputError(
                f"activations are rounded to {' or '.join(ROW_KINDS)}, for weights with one scale for each row and no "
                f"zeros; got {format}. Leave activations, block and zeros out, or choose another format."
            )

    def _format(self) -> Format | None:
        return None if self.format is None else Format(self.format, self.block, self.zeros)

    def identity(self) -> QuantizeWeights:
        """Without a format, weights stay as they are."""
        return QuantizeWeights(format=None, weights=self.weights)

    def run(self, graph: Graph, report: Report) -> None:
        if graph.history:
            report.skip("it is no graph as captured; quantise it before any other pass", graph.output)
            return
        format, whole = self._format(), dict(graph.tensors)
        if format is not None and graph.find("dequantise"):
            raise InputError(
                "the weights of this model are quantised already, and what is rounded twice is worse: leave weights= "
                "(--weights) out, or load the checkpoint that it was made from."
            )
        if format is not None:
            self._store(graph, format, report)
        elif not self.activations:
            report.did("weights stay as they are")
        if not isinstance(self.weights, Shapes):
            quantised = {} if format is None else formats_of(graph)
            take_weights(graph, Quantising(self.weights, whole, quantised), {})
        if self.activations:
            self._round(graph, report)

    def _store(self, graph: Graph, format: Format, report: Report) -> None:
        """Weights in the format."""
        if self.router and not any(linear.routes for linear in linears_of(graph.calls, "plain")):
            report.skip("no projection chooses experts, so there is no router", graph.output)
        readers = {reader for reader, _ in self._known(graph)}
        for weight, layer in self._chosen(graph).items():
            if (reason := _obstacle(graph, weight, format, readers)) is not None:
                report.skip(f"{weight.meta['weight']}: {reason}", min(weight.users))
                continue
            name = weight.meta["weight"]
            quantised_as(graph, weight, format, report.name)
            report.did(f"{name} as {self.format}", layer)

    def _round(self, graph: Graph, report: Report) -> None:
        """Rows in the numbers of the weights that they meet."""
        rounded: dict[tuple[Node, str], Node] = {}
        if self.format is None:
            weights = [w for call in graph.find("experts") for w in args_of(call)[3:5]]
            stored = [*(linear.stored for linear in linears_of(graph.calls, "plain")), *map(stored_of, weights)]
            self._check_patterns([found.name for found in stored if found is not None])

        def once(x: Node, kind: str, before: Node) -> Node:
            """Round the same rows once in any shape: experts read [b * t, d], and linear layers [b, t, d]."""
            width, source = x.meta["val"].shape[-1], x
            while source.target is aten.reshape.default and args_of(source)[0].meta["val"].shape[-1] == width:
                source = args_of(source)[0]
            if (source, kind) not in rounded:
                rounded[source, kind] = graph.call(OPS["round_rows"], (source, kind), before=before, by=report.name)
            made, by = rounded[source, kind], report.name
            return made if x is source else graph.call(x.target, (made, args_of(x)[1]), before=before, by=by, like=x)

        for node in graph.calls:
            for linear in linears_of([node], "plain"):
                if (kind := self._kind_of_rows(linear.stored, node, report)) is not None:
                    node.args = (once(linear.x, kind, node), *args_of(node)[1:])
            if node.target is OPS["experts"].overload:
                x, choice, weight, gate_up, down, *rest = args_of(node)
                kind, inner = (self._kind_of_rows(stored_of(w), node, report) for w in (gate_up, down))
                x = x if kind is None else once(x, kind, node)
                if kind or inner:
                    node.args = (x, choice, weight, gate_up, down, *(rest or ["silu"]), inner)

    def _kind_of_rows(self, stored: Stored | None, node: Node, report: Report) -> str | None:
        """Kind of numbers to which a call rounds the rows that meet a weight; None if they stay as they are."""
        if stored is None or not self._matches(stored.name):
            return None
        if not stored.quantised:
            if self.format is None:  # else the pass has said so of the weight
                report.skip(f"{stored.name} is stored as it is, and so are the rows that it meets", node)
            return None
        kind = stored.row_kind
        if kind is None:
            why = f"rows meet numbers of {' or '.join(ROW_KINDS)}, with one scale for each row of a weight"
            report.skip(f"{stored.name} in blocks of {list(stored.block)}: {why}", node)
        else:
            report.did(f"rows of {stored.name} as {kind}", node.meta["layer"])
        return kind

    def _matches(self, name: str) -> bool:
        """True if the name of a weight is chosen."""
        return any(fnmatchcase(name, p) for p in self.which) and not any(fnmatchcase(name, p) for p in self.but)

    def _chosen(self, graph: Graph) -> dict[Node, int | None]:
        """The weights that are chosen, in order, and the layer of each.

        Raises:
            InputError: a pattern that matches the name of no weight that could be.
        """
        found = {weight: reader.meta["layer"] for reader, weight in self._known(graph)}
        self._check_patterns([node.meta["weight"] for node in found])
        return {node: layer for node, layer in found.items() if self._matches(node.meta["weight"])}

    def _check_patterns(self, names: Sequence[str]) -> None:
        """Raises `InputError` for a pattern that matches none of the names of weights that could be chosen."""
        for pattern in (*self.which, *self.but):
            if names and not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"no weight of a linear layer or of experts is called {pattern!r}; names are those of the captured "
                    f"graph, such as {', '.join(names[:3])}."
                )

    def _known(self, graph: Graph) -> Iterator[tuple[Node, Node]]:
        """Calls that read weights of layers, and those that read embeddings, LM head and routers if these are wanted;
        and the weights.
        """
        head, embedding = head_of(graph), embedding_of(graph) if self.embeddings else None
        for node in graph.calls:
            layer, weights = node.meta["layer"], []
            if node is embedding:
                weights.append(args_of(node)[0])
            for linear in linears_of([node], "plain"):
                is_head = not isinstance(head, str) and linear.node is head.node
                if self.lm_head if is_head else layer is not None and (self.router or not linear.routes):
                    weights.append(linear.weight)
            if node in graph.find("experts", layer):
                weights += args_of(node)[3:5]
            for weight in weights:
                if "weight" in weight.meta:
                    yield node, weight


SPELLINGS: Mapping[str, QuantizeWeights] = {
    **{kind: QuantizeWeights(kind) for kind in KINDS},
    **{f"w8a8-{kind}": QuantizeWeights(kind, activations=True) for kind in ROW_KINDS},
    "w8a8": QuantizeWeights(None, activations=True),
}
"""The pass by name: a format for weights alone, or for the rows that meet them as well; "w8a8" for these alone."""


def _obstacle(graph: Graph, weight: Node, format: Format, readers: Collection[Node]) -> str | None:
    """Reason why a chosen weight cannot be quantised, or None.

    Args:
        readers: the calls whose weights may be.
    """
    value, head = weight.meta["val"], head_of(graph)
    for user in weight.users:
        if user not in readers:
            is_head = not isinstance(head, str) and user is head.node
            return f"{'the LM head' if is_head else op_name(user.target)} reads it too, so it must stay"
    if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
        return f"it is {value.dtype}, not a floating weight"
    if KINDS[format.kind].bits == 4 and int(value.shape[-1]) % 2:
        return f"it has {int(value.shape[-1])} columns, and two 4-bit numbers lie in a byte"
    return None
