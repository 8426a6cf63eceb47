"""The first node at which two runs of graphs on the same inputs part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.numerics.run import Run
from dgraph.types.nodes import where

TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float8_e4m3fn: 1e-1,
}
"""The distance that sums in another order may make, by dtype: a share of the largest magnitude of the tensor.

About a hundred times the rounding of a float32, and a few times that of a shorter format.
"""


@dataclass(frozen=True)
class Difference:
    """The distance of two values.

    Attributes:
        most: the largest difference of two elements; infinite where shapes or rows differ.
        scale: the largest magnitude among the elements that are numbers.
        what: it in words.
    """

    most: float
    scale: float
    what: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Parting:
    """The first node of a run whose value is not that of the same node in another run.

    Attributes:
        node: node of the later graph.
        layer: its layer; None outside the layers.
        reads: its arguments that the other graph has not.
        difference: difference of the two values.
    """

    node: Node
    layer: int | None
    reads: tuple[Node, ...]
    difference: Difference

    def __str__(self) -> str:
        named = ", ".join(f"{arg.name} (made by {arg.meta['by']})" for arg in self.reads)
        reads = f", which reads {named}" if named else ""
        return f"{where(self.node)}{reads}: {self.difference}"


def first_parting(
    before: Run, after: Run, tolerance: float | None = 0.0, same: Callable[[Node], Node | None] | None = None
) -> Parting | None:
    """The first node, in the order of the second graph, that has another value than in the first one.

    Rows are told apart by their number in the step, so one run may have left some out or moved them.

    Args:
        before, after: runs that kept their values, on the same inputs.
        tolerance: as a share of the largest magnitude; 0: equal numbers. None: see `TOLERANCES`.
        same: the node of the first graph that a node of the second one stands for, or None. Default: the one of the
            same name and op, as in a graph and what a pass made of it.
    """
    named = {node.name: node for node in before.graph.calls}

    def by_name(node: Node) -> Node | None:
        other = named.get(node.name)
        return other if other is not None and other.target == node.target else None

    stands_for = same or by_name
    for node in after.graph.calls:
        other = stands_for(node)
        if other is None or other not in before.values or node not in after.values:
            continue
        values = before.flat(other), after.flat(node)
        if not all(isinstance(value, Tensor) for value in values) or values[0].shape[1:] != values[1].shape[1:]:
            continue
        numbers = before.numbers(other), after.numbers(node)
        if len(values[0]) != len(values[1]) and numbers == (None, None):
            continue
        found = difference(aligned(*values, *numbers), tolerance)
        if found is not None:
            new = tuple(arg for arg in node.all_input_nodes if arg.op == "call_function" and stands_for(arg) is None)
            return Parting(node, node.meta["layer"], new, found)
    return None


def aligned(a: Tensor, b: Tensor, rows_a: Tensor | None, rows_b: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows that two values have in common, in the same order.

    rows_a, rows_b: the number of each row in the step; None: all of them in order.
    """
    if rows_a is None and rows_b is None:
        return a, b
    lists = [torch.arange(len(v), device=v.device) if r is None else r for v, r in ((a, rows_a), (b, rows_b))]
    size = max(int(rows.amax()) + 1 if len(rows) else 0 for rows in lists)
    places = []
    for rows in lists:
        place, live = rows.new_full((size,), -1), rows >= 0
        place[rows[live]] = live.nonzero()[:, 0]
        places.append(place)
    common = ((places[0] >= 0) & (places[1] >= 0)).nonzero()[:, 0]
    return a[places[0][common]], b[places[1][common]]


def difference(values: tuple[Tensor, Tensor], tolerance: float | None) -> Difference | None:
    """The distance of two values; None within a tolerance (see `first_parting`)."""
    a, b = values
    if a.shape != b.shape or a.dtype != b.dtype:
        kinds = [f"{v.dtype} {tuple(v.shape)}".removeprefix("torch.") for v in values]
        return Difference(torch.inf, torch.inf, f"it is {kinds[1]}, and was {kinds[0]}")
    wide_a, wide_b = a.double(), b.double()
    apart = torch.where((wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan()), 0.0, (wide_a - wide_b).abs())
    apart = apart.nan_to_num(torch.inf, torch.inf)
    numbers = wide_a[wide_a.isfinite()].abs()
    most, scale = (float(v.max()) if v.numel() else 0.0 for v in (apart, numbers))
    share = TOLERANCES.get(a.dtype, 0.0) if tolerance is None else tolerance
    if most <= share * scale if a.is_floating_point() else most == 0:
        return None
    count = int((apart > share * scale).sum()) if a.is_floating_point() else int((apart > 0).sum())
    of = f", of magnitudes up to {scale:.3g}" if a.is_floating_point() else ""
    return Difference(most, scale, f"{count} of {apart.numel()} elements differ, by up to {most:.3g}{of}")
