"""FuseGLU: the activation of a gated unit within the product before it, over the rows that are live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from dgraph.errors import UnknownName
from dgraph.ir.graph import Graph
from dgraph.ir.linears import Linear, linears_of, unit_of
from dgraph.ir.quantised_operands import is_fused_operand
from dgraph.ops import OPS
from dgraph.passes.base import Effect, Pass, Report
from dgraph.plans.papers import OURS, Paper

OPERANDS = ("quantised", "16-bit")
"""Operands of products over rows that the host counts: `FuseGLU.packed` names those whose units are fused."""


@dataclass(frozen=True)
class FuseGLU(Pass):
    """Compute silu(gate) * up within the product of both.

    A linear layer over a count leaves padding rows out. The ops between it and the next one are plain torch over all
    rows of the buffer, of which few may be live. They take as long as the products. As part of the product they run on
    the live rows, and gate and up are never stored.

    Packed rows, whose number the host knows, are all of a step's, or those that an eviction kept. A linear layer over
    them is fused only if `packed` names its operands: elsewhere the library's product is faster than the kernel.

        before  %29 = dgraph.rows_linear(%28, mlp.gate_proj+up_proj.weight, None, %22)     f32[N, 256]
                %30, %31 = split_with_sizes(%29, [128, 128], 1)                            (f32[N, 128], f32[N, 128])
                %32 = silu(%30)                                                            f32[N, 128]
                %33 = mul(%32, %31)                                                        f32[N, 128]
        after   %29 = dgraph.rows_glu(%28, mlp.gate_proj+up_proj.weight, None, %22)        f32[N, 128]

    Run it after FuseProjections, which makes one product of gate and up, and after the pass that counts the rows
    (GateFFN, ReuseRows, CountRows).

    Reassociates: on a GPU the product is summed in the same order, but gate, up and silu are not rounded in between.

    Attributes:
        packed: operands of linear layers over packed rows that are fused too, of `OPERANDS`. "quantised": rows and
            weight are both read quantised (`QuantisedOperands`). "16-bit": rows and weight of one dtype of 16 bits; the
            weight may be stored quantised.

    Raises:
        UnknownName: other operands.
    """

    packed: tuple[str, ...] = ()

    effect: ClassVar[Effect] = Effect.REASSOCIATES
    papers: ClassVar[tuple[Paper, ...]] = OURS
    summary: ClassVar[str] = "silu(gate) * up within the product, on live rows only"

    def __post_init__(self) -> None:
        for name in self.packed:
            if name not in OPERANDS:
                raise UnknownName("kind of operands", name, OPERANDS)

    def run(self, graph: Graph, report: Report) -> None:
        for linear in linears_of(graph.calls, "counted", *(["plain"] if self.packed else [])):
            unit = unit_of(linear.node)
            if isinstance(unit, Node):
                unit = self._obstacle(graph, linear) or unit
            if isinstance(unit, str):
                report.skip(unit, linear.node)
            elif unit is not None:
                self._fuse(graph, linear, unit, report)
        graph.sweep()

    def _obstacle(self, graph: Graph, linear: Linear) -> str | None:
        """Reason why a whole unit is left alone, or None."""
        if linear.kind == "counted":
            return None
        if graph.row_set(linear.x) is None or "cu_rows" not in graph.inputs:
            return "its rows are not packed; run PackRows before it"
        if not any(_MATCHES[name](linear) for name in self.packed):
            return f"its rows and weight are not {' or '.join(self.packed)} operands"
        return None

    @staticmethod
    def _fuse(graph: Graph, linear: Linear, product: Node, report: Report) -> None:
        """Compute a product silu(gate) * up by the linear layer before it."""
        node, count = linear.node, linear.count
        if count is None:
            count = graph.offsets_of(str(graph.row_set(linear.x)))
        unit = graph.call(OPS["rows_glu"], (linear.x, linear.weight, linear.bias, count), before=node, by=report.name)
        unit.meta["source"] = node.meta.get("source")
        graph.replace(product, unit)
        report.did(node.meta["role"] or "a gated unit", node.meta["layer"])


def _are_quantised(linear: Linear) -> bool:
    """True if a linear layer reads rows and weight quantised."""
    return linear.x.target is OPS["dequantise_rows"].overload and is_fused_operand(linear.x) and _is_stored(linear)


def _are_short(linear: Linear) -> bool:
    """True if a linear layer reads rows of 16 bits, and a weight of the model of the same dtype."""
    dtypes = {value.meta["val"].dtype for value in (linear.x, linear.weight)}
    return ("weight" in linear.weight.meta or _is_stored(linear)) and len(dtypes) == 1 and dtypes.pop().itemsize == 2


def _is_stored(linear: Linear) -> bool:
    return is_fused_operand(linear.weight)


_MATCHES = dict(zip(OPERANDS, (_are_quantised, _are_short), strict=True))
