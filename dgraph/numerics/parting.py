"""The distances of two runs of graphs on the same inputs, node by node, and the first node at which they part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.numerics.run import Run
from dgraph.ops.statistics import GIVEN
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


TOKENS = ("token", "draw")
"""Outputs that are tokens."""
STATISTICS = ("confidence", *(statistic.name for statistic in GIVEN))
"""Outputs that are statistics of a distribution over tokens."""
UNIT = 1.0
"""Magnitude of statistics: a confident model has an entropy near 0, whose rounding is that of probabilities."""


@dataclass(frozen=True)
class Difference:
    """The distance of two values.

    Attributes:
        most: the largest difference of two elements; infinite where shapes or rows differ.
        scale: the largest magnitude among the elements that are numbers.
        what: it in words.
        cosine: of the angle between the values as vectors of all their elements.
        parts: True if the values differ by more than was allowed.
    """

    most: float
    scale: float
    what: str
    cosine: float = 0.0
    parts: bool = True

    def __str__(self) -> str:
        return self.what

    @property
    def share(self) -> float:
        """The largest difference as a share of the largest magnitude."""
        return self.most / self.scale if self.scale else float(self.most and torch.inf)


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


Rounded = Collection[torch.dtype]
Same = Callable[[Node], Node | None]
"""Gives the node of the first graph that a node of the second one stands for, or None."""


def first_parting(
    before: Run, after: Run, tolerance: float | None = 0.0, same: Same | None = None, rounded: Rounded = ()
) -> Parting | None:
    """The first node, in the order of the second graph, that has another value than in the first one.

    Rows are told apart by their number in the step, so one run may have left some out or moved them.

    Args:
        before, after: runs that kept their values, on the same inputs.
        tolerance: as a share of the largest magnitude; 0: equal numbers. None: see `TOLERANCES`.
        same: see `same_name`, the default.
        rounded: see `distance`.
    """
    stands_for = same or same_name(before)
    for node, values in shared(before, after, stands_for):
        found = difference(values, tolerance, rounded)
        if found is not None:
            new = tuple(arg for arg in node.all_input_nodes if arg.op == "call_function" and stands_for(arg) is None)
            return Parting(node, node.meta["layer"], new, found)
    return None


def same_name(before: Run) -> Same:
    """Pair nodes of the same name and op, as in a graph and what a pass made of it."""
    named = {node.name: node for node in before.graph.calls}

    def by_name(node: Node) -> Node | None:
        other = named.get(node.name)
        return other if other is not None and other.target == node.target else None

    return by_name


def shared(before: Run, after: Run, same: Same) -> Iterator[tuple[Node, tuple[Tensor, Tensor]]]:
    """Nodes of the second run, in order, with the values of both on the rows that they have in common.

    Values that cannot be laid side by side are left out: of other sizes, or over rows without numbers.
    """
    for node in after.graph.calls:
        other = same(node)
        if other is None or other not in before.values or node not in after.values:
            continue
        values = before.flat(other), after.flat(node)
        if not all(isinstance(value, Tensor) for value in values) or values[0].shape[1:] != values[1].shape[1:]:
            continue
        numbers = before.numbers(other), after.numbers(node)
        if values[0].shape[:1] != values[1].shape[:1] and numbers == (None, None):
            continue
        yield node, aligned(*values, *numbers)


def aligned(a: Tensor, b: Tensor, rows_a: Tensor | None, rows_b: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows that two values have in common, in the same order.

    rows_a, rows_b: the number of each row in the step; None: all of them in order.
    """
    if rows_a is None and rows_b is None:
        return a, b
    if rows_a is not None and rows_b is not None and rows_a.device != rows_b.device:
        return aligned(a.cpu(), b.cpu(), rows_a.cpu(), rows_b.cpu())
    lists = [torch.arange(len(v), device=v.device) if r is None else r for v, r in ((a, rows_a), (b, rows_b))]
    size = max(int(rows.amax()) + 1 if len(rows) else 0 for rows in lists)
    places = []
    for rows in lists:
        place, live = rows.new_full((size,), -1), rows >= 0
        place[rows[live]] = live.nonzero()[:, 0]
        places.append(place)
    common = ((places[0] >= 0) & (places[1] >= 0)).nonzero()[:, 0]
    return a[places[0][common]], b[places[1][common]]


def difference(values: tuple[Tensor, Tensor], tolerance: float | None, rounded: Rounded = ()) -> Difference | None:
    """The distance of two values; None within a tolerance (see `distance`)."""
    found = distance(values, tolerance, rounded)
    return found if found.parts else None


def distance(
    values: tuple[Tensor, Tensor], tolerance: float | None, rounded: Rounded = (), least: float = 0.0
) -> Difference:
    """The distance of two values.

    Args:
        values: of one shape.
        tolerance: they part beyond this share of the largest magnitude; None: see `TOLERANCES`.
        rounded: dtypes in which values were computed that these come from. A value is no closer than the coarsest.
        least: magnitude by which smaller values are measured, as `UNIT` of a statistic.
    """
    a, b = values
    if a.shape != b.shape or a.dtype != b.dtype:
        kinds = [f"{v.dtype} {tuple(v.shape)}".removeprefix("torch.") for v in values]
        return Difference(torch.inf, torch.inf, f"it is {kinds[1]}, and was {kinds[0]}")
    wide_a, wide_b = a.double(), b.to(a.device).double()
    apart = torch.where((wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan()), 0.0, (wide_a - wide_b).abs())
    apart = apart.nan_to_num(torch.inf, torch.inf)
    numbers = wide_a[wide_a.isfinite()].abs()
    most, scale = (float(v.max()) if v.numel() else 0.0 for v in (apart, numbers))
    scale = max(scale, least)
    real = a.is_floating_point()
    own = max(TOLERANCES.get(dtype, 0.0) for dtype in (a.dtype, *rounded)) if tolerance is None else tolerance
    allowed = own * scale if real else 0.0
    of = f", of magnitudes up to {scale:.3g}" if real else ""
    what = f"{int((apart > allowed).sum())} of {apart.numel()} elements differ, by up to {most:.3g}{of}"
    return Difference(most, scale, what, _cosine(wide_a, wide_b) if most else 1.0, most > allowed)


def _cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of the angle between two values; elements that are no numbers count as 0."""
    flat_a, flat_b = (value.flatten().nan_to_num(0.0, 0.0, 0.0) for value in (a, b))
    lengths = float(flat_a.norm() * flat_b.norm())
    return float(flat_a @ flat_b) / lengths if lengths else 0.0


def check_tolerance(tolerance: float | None) -> None:
    """Refuse a tolerance that is no share of a magnitude.

    Raises:
        InputError: below 0, or no number.
    """
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < torch.inf):
        raise InputError(
            f"tolerance must be a share of a magnitude, at least 0, or None for the rounding of each dtype, got "
            f"{tolerance!r}."
        )


def in_one_dtype(values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two values in the coarser of their dtypes, if both are real numbers: that which `TOLERANCES` allows more."""
    a, b = values
    if a.dtype == b.dtype or not (a.is_floating_point() and b.is_floating_point()):
        return values
    coarser = max(a.dtype, b.dtype, key=lambda dtype: TOLERANCES.get(dtype, 0.0))
    return a.to(coarser), b.to(coarser)
