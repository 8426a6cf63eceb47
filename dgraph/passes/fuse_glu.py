"""FuseGLU: the activation of a gated unit within the product before it, over the rows that are live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dgraph.ir.graph import Graph
from dgraph.ir.linears import unit_of
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.types.nodes import args_of


@dataclass(frozen=True)
class FuseGLU(Pass):
    """Compute silu(gate) * up within the product of both, if only the device knows the number of rows.

    A linear layer over a count leaves padding rows out. The ops between it and the next one are plain torch over all
    rows of the buffer, of which few may be live. They take as long as the products. As part of the product they run on
    the live rows, and gate and up are never stored.

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
            found = unit_of(linear)
            if isinstance(found, str):
                report.skip(found, linear)
            elif found is not None:
                unit = graph.call(OPS["rows_glu"], args_of(linear), before=linear, by=report.name)
                unit.meta["source"] = linear.meta.get("source")
                graph.replace(found, unit)
                report.did(linear.meta["role"] or "a gated unit", linear.meta["layer"])
        graph.sweep()
