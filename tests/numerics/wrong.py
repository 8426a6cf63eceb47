"""Passes that are not what they declare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.passes import Effect, Pass
from dgraph.passes.base import Report
from dgraph.types.nodes import args_of

aten = torch.ops.aten


def gate_of(graph: Graph, layer: int) -> Node:
    """The activation of a layer's gate."""
    return graph.find("silu", layer)[0]


@dataclass(frozen=True)
class Scale(Pass):
    """Multiplies the gate of layer 2 by a number."""

    by: float = 1 + 1e-6

    effect = Effect.EXACT
    summary = "scales a gate"

    def run(self, graph: Graph, report: Report) -> None:
        gate = gate_of(graph, 2)
        scaled = graph.call(aten.mul.Tensor, (gate, self.by), before=gate.next, by=report.name, like=gate)
        graph.redirect(gate, scaled, after=scaled)
        report.did("the gate", 2)


@dataclass(frozen=True)
class Hopeless(Scale):
    """Says of no setting that it changes nothing."""

    effect = Effect.APPROXIMATE


@dataclass(frozen=True)
class Promised(Scale):
    """Says of a setting that it changes nothing."""

    identity_by: float = 1.0

    effect = Effect.APPROXIMATE

    def identity(self) -> Promised:
        return replace(self, by=self.identity_by)


@dataclass(frozen=True)
class Halves(Pass):
    """Sums the products of the first linear layer of layer 1 in two halves."""

    effect = Effect.EXACT
    summary = "sums in two halves"

    def run(self, graph: Graph, report: Report) -> None:
        linear = graph.find("linear", 1)[0]

        def call(target: Any, *args: Any) -> Node:
            return graph.call(target, args, before=linear, by=report.name)

        def part(value: Any, begin: int, end: int) -> Node:
            return call(aten.slice.Tensor, value, value.meta["val"].dim() - 1, begin, end)

        x, weight = args_of(linear)
        size = int(weight.meta["val"].shape[1])
        parts = ((0, size // 2), (size // 2, size))
        halves = [call(aten.linear.default, part(x, *each), part(weight, *each)) for each in parts]
        graph.replace(linear, call(aten.add.Tensor, *halves))
        report.did("a linear layer", 1)


@dataclass(frozen=True)
class HonestHalves(Halves):
    """The same, and says so."""

    effect = Effect.REASSOCIATES


@dataclass(frozen=True)
class ZeroWeight(Pass):
    """Sets one number of a weight of layer 2 to 0."""

    effect = Effect.REASSOCIATES
    summary = "zeroes a number"
    changes_weights = True

    def run(self, graph: Graph, report: Report) -> None:
        name = next(name for name in graph.tensors if name.endswith("layers.2.mlp.down_proj.weight"))
        changed = graph.tensors[name].detach().clone()
        changed[0, 0] = 0
        graph.replace(graph.weight(name), graph.add_weight("changed", changed))
        del graph.tensors[name]
        report.did("a weight", 2)


@dataclass(frozen=True)
class Rename(Pass):
    """Gives all outputs other names."""

    effect = Effect.EXACT
    summary = "renames"
    signature = frozenset({"logits", "scores"})

    def run(self, graph: Graph, report: Report) -> None:
        graph.set_outputs({"scores": graph.result("logits")})
        report.did("logits -> scores")
