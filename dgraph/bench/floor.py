"""The floor of a step: its matrix products at the row counts that were met, and the bytes that attention must read.

Nothing else is in it: norms, activations, selection, the transition between steps and every launch count as overhead.
So measured time over floor bounds the speed-up that is left to gain without another method.
"""

from __future__ import annotations

import bisect
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from dgraph.bench.products import Mixture, Shape, calls_of
from dgraph.ir.graph import Graph
from dgraph.ir.linears import head_of, linear_of, linears_of
from dgraph.ir.quantised_operands import is_fused_operand
from dgraph.ir.stored_weights import stored_of
from dgraph.lowering.timing import graph_seconds
from dgraph.ops import OPS, op_of
from dgraph.passes.salience import UPDATED, of_masked
from dgraph.types.nodes import args_of, viewed

COLD = 400e6
"""Least bytes of the weights that are multiplied in turn: several times an L2 cache."""

SCALE_BYTES = 4
"""Bytes of the scale of a row in 8 bits."""

UNTOLD = ("attention", "packed_attention", "sparse_attention", *UPDATED)
"""Attention ops whose bytes no `StepCount` has.

They are attention without a cache; attention over packed keys, whose number each sequence's last selection sets for a
head; and updated attention, which reads keys only of sequences in which something has changed.
"""

NEW_LIMIT = 1
"""Index of the result of dgraph::select_tokens that limits the positions kept rows see, if they do not see all."""

SETTLE, STAY = 0.2, 0.03
"""Seconds of load on a GPU before a shape's first measurement, and before each one that follows at once.

With them the clocks are those of a long run, and not of a burst.
"""


@dataclass(frozen=True)
class StepCount:
    """Row and key counts of one step.

    Attributes:
        rows: live rows of each row set: all rows, kept rows, masked kept rows.
        keys: per row set, positions of the KV cache that one attention on it reads, over all sequences; keyed by the
            layer's window in positions (0 for all).
        head: rows that got logits.
    """

    rows: tuple[int, ...]
    keys: tuple[Mapping[int, int], ...]
    head: int


@dataclass(frozen=True)
class Reading:
    """Bytes that an attention reads and writes.

    Attributes:
        key_bytes: bytes of one position of K and V, with their scales if they have some.
        query_bytes: bytes of one row of queries and results.
        window: the window of earlier positions that its rows see; 0 for all.
    """

    key_bytes: int
    query_bytes: int
    window: int


@dataclass(frozen=True)
class Product:
    """A linear layer or a mixture of experts, with the storage of its rows and weights.

    Attributes:
        shape: shape of its weights.
        spared: bytes that stored weights save against weights in their dtype; 0 if they save none.
        narrow: True if it takes rows, and so weights, in 8 bits.
    """

    shape: Shape
    spared: int = 0
    narrow: bool = False


@dataclass(frozen=True)
class Work:
    """Products and attentions of a step program, by row set (all rows, then the kept ones).

    Attributes:
        multiplied: per row set, the number of equal products by product.
        listed: the same for products on rows that a step finds salient. Only the device knows their number, so one row
            counts.
        attentions: per row set, the number of equal attentions by reading; those of `UNTOLD` are left out.
        masked: True if the last row set is that of the masked rows (OnlyMasked).
        last: the product of the LM head, if that takes the masked rows alone; else None.
        dtype: dtype of the weights.
        told: True if `attentions` has all attentions of the program.
        hides: True if kept rows see their sequence only up to the last kept row (see `EvictTokens`).
    """

    multiplied: tuple[dict[Product, int], ...]
    listed: dict[Product, int]
    attentions: tuple[dict[Reading, int], ...]
    masked: bool
    last: Product | None
    dtype: torch.dtype
    told: bool = True
    hides: bool = False

    @property
    def products(self) -> tuple[dict[Shape, int], ...]:
        """Per row set, the number of products by shape, whatever their storage of rows and weights."""
        found: tuple[dict[Shape, int], ...] = tuple({} for _ in self.multiplied)
        for shapes, products in zip(found, self.multiplied, strict=True):
            for product, times in products.items():
                shapes[product.shape] = shapes.get(product.shape, 0) + times
        return found

    @property
    def head(self) -> Shape | None:
        """The shape of `last`."""
        return None if self.last is None else self.last.shape

    @property
    def windows(self) -> frozenset[int]:
        """The windows of its attentions."""
        return frozenset(reading.window for found in self.attentions for reading in found)


@dataclass(frozen=True)
class Floor:
    """Seconds per step by part, on average over the steps.

    `attention` has no value (None) if the program has attention whose bytes no count has (`UNTOLD`).
    """

    linear: float
    experts: float
    attention: float | None
    head: float

    @property
    def total(self) -> float:
        """Seconds per step over all parts; attention counts 0 if it has no value."""
        return self.linear + self.experts + (self.attention or 0.0) + self.head

    def to_json(self) -> dict[str, float]:
        """Milliseconds by part; experts only where there are some, attention only where its bytes are known."""
        parts = {"linear": self.linear, "experts": self.experts, "attention": self.attention, "head": self.head}
        found = {name: seconds for name, seconds in parts.items() if seconds is not None}
        found["total"] = self.total
        return {name: 1e3 * seconds for name, seconds in found.items() if seconds or name != "experts"}


def row_sets_of(graph: Graph) -> list[str]:
    """The row sets of a step program, in the order of `Work` and `StepCount`."""
    return list(dict.fromkeys(r for n in graph.calls if (r := graph.row_set(n)) is not None))


def work_of(graph: Graph) -> Work:
    """The products and attentions of a step's graph, as `dgraph.rewrite` gives it.

    Experts count as their two grouped products, with rows that are routed at random; the ops that order the rows are
    not counted. Vocabulary attention counts as two products on all of its rows: that of a head that keeps its logits,
    and that of the mean embedding. Ops that select rows or keys are not counted.

    Attention over packed keys (dgraph::sparse_attention), updated attention (dgraph::partial_attention) and attention
    without a cache are not counted either (see `UNTOLD`). If there is any, the floor has no attention at all. Its total
    is then that of the products, below the time that the step must take.
    """
    row_sets = row_sets_of(graph)
    multiplied: list[dict[Product, int]] = [{} for _ in row_sets]
    attentions: list[dict[Reading, int]] = [{} for _ in row_sets]
    listed: dict[Product, int] = {}
    linears, mixed = {linear.node: linear for linear in linears_of(graph.calls)}, graph.find("experts")
    for node in [*linears, *mixed]:
        x, weights = args_of(node)[0], args_of(node)[3:5] if node in mixed else [linears[node].weight]
        product = _product(_mixture(node) if node in mixed else linears[node].shape, x, weights)
        found = listed if _on_listed(node) else multiplied[row_sets.index(str(graph.row_set(node)))]
        found[product] = found.get(product, 0) + 1
    for node in [*graph.find("vocabulary_attention"), *graph.find("vocabulary_part")]:
        x, weight = args_of(node)[:2]
        ids, width = map(int, weight.meta["val"].shape)
        known = multiplied[row_sets.index(str(graph.row_set(x)))]
        for product in (Product((ids, width)), Product((width, ids))):
            known[product] = known.get(product, 0) + 1
    for node in graph.find("paged_attention"):
        read, count = _reading(node), attentions[row_sets.index(str(graph.row_set(node)))]
        count[read] = count.get(read, 0) + 1
    last = head_of(graph)
    head = None if isinstance(last, str) or last.kind != "head" else last  # logits are counted among the products
    return Work(
        tuple(multiplied),
        listed,
        tuple(attentions),
        head is not None and of_masked(graph, head.x),
        _product(head.shape, head.x, [head.weight]) if head is not None else None,
        graph.spec.dtype,
        not any(graph.find(op) for op in UNTOLD),
        any(args_of(part)[1] == NEW_LIMIT for node in graph.find("select_tokens") for part in node.users),
    )


def _product(shape: Shape, x: Node, weights: Iterable[Node]) -> Product:
    """A product of rows by weights, with the bytes that their storage saves."""
    spared = 0
    for weight in weights:
        stored = stored_of(weight)
        parts = [weight] if stored is None else stored.parts
        spared += _bytes(weight) - sum(map(_bytes, parts))
    return Product(shape, max(0, spared), is_fused_operand(x))


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) * int(value.dtype.itemsize)


def _least(product: Product, dtype: torch.dtype, rows: int, device: Device) -> float:
    """Least seconds of a product, from the measured time of the unquantised product.

    A quantised weight saves the time to read the bytes that it does not store. The result is at least the time to read
    the stored bytes.

    With rows in 8 bits as well, the measured time is divided by the dtype's size in bytes. Matrix units multiply that
    many times more numbers of one byte. The result is then at least the time to read weight and rows and to write the
    product.
    """
    shape, less = product.shape, float(product.spared)
    seconds = device.product(shape, dtype, rows)
    if not less or rows <= 0:
        return seconds
    if isinstance(shape, Mixture):
        read = min(1.0, rows * shape.chosen / shape.experts)  # of the experts, at most
        whole = 3.0 * shape.experts * shape.hidden * shape.inner
        outputs = inputs = shape.hidden
    else:
        read, whole = 1.0, float(shape[0] * shape[1])
        outputs, inputs = shape
    whole, less = whole * dtype.itemsize * read, less * read
    if product.narrow:
        of_rows = rows * (inputs + SCALE_BYTES + outputs * dtype.itemsize)
        return max(seconds / dtype.itemsize, (whole - less + of_rows) / device.bandwidth)
    return max(seconds - less / device.bandwidth, (whole - less) / device.bandwidth)


def _reading(attention: Node) -> Reading:
    """The bytes of a dgraph::paged_attention, from its arguments, as head counts and sizes may differ by layer."""
    op, args = OPS["paged_attention"], args_of(attention)
    caches = [node for node in op.values([*op.scales, *op.scales.values()], args) if node is not None]
    keys = sum(math.prod(node.meta["val"].shape[2:]) * node.meta["val"].dtype.itemsize for node in caches)
    q = args[0].meta["val"]
    window = next(iter(op.values("window", args)), 0)
    return Reading(keys, 2 * math.prod(q.shape[1:]) * q.dtype.itemsize, window)


def _mixture(node: Node) -> Mixture:
    _, choice, _, _, down = (value.meta["val"].shape for value in args_of(node)[:5])
    return Mixture(int(down[0]), int(choice[1]), int(down[1]), int(down[2]))


def _on_listed(node: Node) -> bool:
    """True if a linear layer or experts run on listed rows that are not a row set of their own."""
    op, args = op_of(node.target), args_of(node)
    if (linear := linear_of(node)) is not None and linear.count is not None:
        part = linear.count
    elif op is OPS["experts"] and args[1].target is torch.ops.aten.masked_fill.Scalar:
        part = viewed(args_of(args[1])[1])  # index < 0: rows after the listed ones go to no expert
        part = args_of(part)[0]
    else:
        return False
    return part.target is operator.getitem and "rows" not in args_of(part)[0].meta


@dataclass
class Device:
    """Times measured once per process: products by shape and row count, and copy bandwidth.

    Attributes:
        device: the device that is timed.
        samples: row counts that are timed per shape; between them times are interpolated.
    """

    device: torch.device
    samples: int = 6
    _times: dict[tuple[Shape, torch.dtype], dict[int, float]] = field(default_factory=dict)
    _bandwidth: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second, read plus written, of a large copy."""
        if not self._bandwidth:
            source = torch.ones(1 << (28 if self.device.type == "cuda" else 22), device=self.device)
            target = torch.empty_like(source)
            # Timed with a kernel, as a plain copy inside a graph goes to a copy engine, which is slower.
            self._bandwidth = 2 * 4 * source.numel() / self.seconds([partial(torch.neg, source, out=target)] * 2)
        return self._bandwidth

    def measure(self, shape: Shape, dtype: torch.dtype, counts: Iterable[int]) -> None:
        """Time a product at up to `samples` of the given row counts, the extremes among them."""
        wanted = sorted({c for c in counts if c > 0})
        if not wanted:
            return
        places = {round(i * (len(wanted) - 1) / max(1, self.samples - 1)) for i in range(self.samples)}
        known = self._times.setdefault((shape, dtype), {})
        missing = [wanted[i] for i in sorted(places) if wanted[i] not in known]
        if not missing:
            return
        calls = calls_of(shape, dtype, self.device, COLD if self.device.type == "cuda" else 1.0)
        for i, rows in enumerate(missing):
            known[rows] = self.seconds(calls(rows), settle=STAY if i else SETTLE)

    def product(self, shape: Shape, dtype: torch.dtype, rows: int) -> float:
        """Seconds of one product, interpolated between the measured row counts; 0 without rows."""
        if rows <= 0:
            return 0.0
        known = self._times[shape, dtype]
        at = sorted(known)
        right = bisect.bisect_left(at, rows)
        if right < len(at) and at[right] == rows:
            return known[rows]
        low, high = at[max(0, right - 1)], at[min(right, len(at) - 1)]
        share = (rows - low) / (high - low) if high > low else 0.0
        return known[low] + share * (known[high] - known[low])

    @torch.no_grad()
    def seconds(self, calls: Sequence[Callable[[], Any]], runs: int = 9, settle: float = 0.0) -> float:
        """Seconds of one call, the median over runs of all calls in a row.

        On a GPU a run is a replay of a CUDA graph of the calls, after `settle` seconds of the same load.
        """
        if self.device.type != "cuda":
            calls[0]()
            times = []
            for _ in range(3):
                start = time.perf_counter()
                for call in calls:
                    call()
                times.append((time.perf_counter() - start) / len(calls))
            return statistics.median(times)
        return graph_seconds(calls, runs, settle)


def floor_of(work: Work, counts: Sequence[StepCount], device: Device) -> Floor:
    """The floor of steps with those row counts."""
    steps = max(1, len(counts))
    linear = experts = attention = head = 0.0
    rows_of = [[c.rows[stage] for c in counts] for stage in range(len(work.multiplied))]
    for rows, products in zip([*rows_of, [1] * len(counts)], [*work.multiplied, work.listed], strict=True):
        for product, times in products.items():
            seconds = times * _sum_of(product, work.dtype, rows, device)
            if isinstance(product.shape, Mixture):
                experts += seconds
            else:
                linear += seconds
    for stage, attentions in enumerate(work.attentions):
        for read, times in attentions.items():
            moved = sum(c.keys[stage][read.window] * read.key_bytes + c.rows[stage] * read.query_bytes for c in counts)
            attention += times * moved / device.bandwidth
    if work.last is not None:
        head = _sum_of(work.last, work.dtype, [c.head for c in counts], device)
    return Floor(linear / steps, experts / steps, attention / steps if work.told else None, head / steps)


def _sum_of(product: Product, dtype: torch.dtype, rows: Sequence[int], device: Device) -> float:
    """Least seconds of a product, summed over row counts."""
    device.measure(product.shape, dtype, rows)
    return sum(_least(product, dtype, r, device) for r in rows)
