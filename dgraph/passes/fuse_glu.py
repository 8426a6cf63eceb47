"""FuseGLU: the activation of a gated unit within the product before it, over the rows that are live."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from dgraph.graph import Graph
from dgraph.nodes import args_of, op_name
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseGLU(Pass):
    """Multiply silu of the gate by up where the two are computed, if only the device knows the number of rows.

    A linear layer over a count leaves padding rows out. What stands between it and the next one is plain torch over as
    many rows as there is room for, of which few may be live, and takes as long as the products. As part of the product
    it runs on the live rows, and gate and up are never stored.

        before  %29 = dgraph.rows_linear(%28, mlp.gate_proj+up_proj.weight, None, %22)     f32[N, 256]
                %30, %31 = split_with_sizes(%29, [128, 128], 1)                            (f32[N, 128], f32[N, 128])
                %32 = silu(%30)                                                            f32[N, 128]
                %33 = mul(%32, %31)                                                        f32[N, 128]
        after   %29 = dgraph.rows_glu(%28, mlp.gate_proj+up_proj.weight, None, %22)        f32[N, 128]

    Run it after FuseProjections, which makes one product of gate and up, and after the pass that counts the rows
    (GateFFN, ReuseRows, CountRows).

    Reassociates: on a GPU the product is summed in the same order, but gate, up and silu are not rounded in between.
    """

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    summary: ClassVar[str] = "silu(gate) * up within the product, on live rows only"

    def run(self, graph: Graph, report: Report) -> None:
        for linear in graph.find("rows_linear"):
            found = _unit_of(linear)
            if isinstance(found, str):
                report.skip(found, linear)
            elif found is not None:
                unit = graph.call(OPS["rows_glu"], args_of(linear), before=linear, by=report.name)
                unit.meta["source"] = linear.meta.get("source")
                graph.replace(found, unit)
                report.did(linear.meta["role"] or "a gated unit", linear.meta["layer"])
        graph.sweep()


def _unit_of(linear: Node) -> Node | str | None:
    """The product silu(gate) * up after a linear layer; why it cannot be told or replaced; None if it is no gate."""
    if _calls(linear.users, aten.silu.default):
        return "its result is a gate alone; run FuseProjections before it, which makes one product of gate and up"
    for split in _calls(linear.users, aten.split_with_sizes.default):
        silus = [silu for part in split.users for silu in _calls(part.users, aten.silu.default)]
        if silus:
            return _product(linear, split, silus)
    return None


def _product(linear: Node, split: Node, silus: Sequence[Node]) -> Node | str:
    """The product of silu of the gate, one of those given, and up; or why there is none."""
    _, sizes, *rest = args_of(split)
    dim = rest[0] if rest else 0
    if len(sizes) != 2 or sizes[0] != sizes[1] or dim not in (1, -1):
        return f"it is split into {list(sizes)} along dimension {dim}, not into gate columns and as many up columns"
    if any(args_of(args_of(silu)[0])[1] != 0 for silu in silus):
        return "silu is of the second half; the columns of the gate must be the first"
    silu, gate = silus[0], args_of(silus[0])[0]
    second = [part for part in split.users if args_of(part)[1] == 1]
    products = [(n, up) for up in second for n in _calls(silu.users, aten.mul.Tensor) if {*args_of(n)} == {silu, up}]
    if not products:
        return "silu of the first half is not multiplied by the second half"
    product, up = products[0]
    for what, value, readers in (
        ("its result", linear, {split}),
        ("the split", split, {gate, up}),
        ("the gate", gate, {silu}),
        ("silu of the gate", silu, {product}),
        ("the second half", up, {product}),
    ):
        others = [user for user in value.users if user not in readers]
        if others:
            return f"{op_name(others[0].target)} reads {what} too, so it must stay"
    return product


def _calls(nodes: Iterable[Node], target: object) -> list[Node]:
    return [node for node in nodes if node.target is target]
