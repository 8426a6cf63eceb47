"""Workloads on which tilings are timed: calls of a kernel on random values of a shape, as a decode step makes them.

Calls in a row take different data, more than an L2 cache holds. The reason: a layer of a model finds neither its
weights nor its keys there. Facts that a shape does not give are as a step typically has them, and stated at each
function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as bound
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.attention.triton import attention_tiling, paged_attention, partial_attention
from dgraph.ops.draws import cu_rows_of
from dgraph.ops.kv.scales import FLOAT8, by_head
from dgraph.ops.lm_head.triton import lm_head
from dgraph.ops.products.triton import rows_linear
from dgraph.ops.tuning import AttentionShape, LinearShape, LogitsShape

KEYS = 2048
"""Keys that a sequence has, if its page table addresses that many."""
ROOM = 256 << 20
"""Bytes of the data that calls in a row take turns on: several times an L2 cache."""
SETS = 8
"""Most calls in a row."""

Call = Callable[[Any], Any]
"""A call of the kernel under a tiling; returns its results, without padding."""


@dataclass(frozen=True)
class Trial:
    """Calls of one shape.

    Attributes:
        loads: per amount of live data the calls in a row; each load counts the same.
        reset: undoes what calls wrote into their arguments.
    """

    loads: list[list[Call]]
    reset: Callable[[], object] = lambda: None


class _Draws:
    """Random values of one dtype on one device, the same ones every time."""

    def __init__(self, device: torch.device, dtype: str):
        self.device: torch.device = device
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self.device)
        return values.to(self.dtype)

    def order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._generator, device=self.device)


class _Caches:
    """Sequences at the end of equally many keys, in pages of random order.

    Every other one has three times as many rows as its neighbour: an eviction leaves them unequal, and a tile that fits
    the mean has to be there twice for those above it.
    """

    def __init__(self, shape: AttentionShape, draw: _Draws):
        b = max(1, shape.sequences)
        counts = _unequal(shape.rows, shape.sequences)
        self.keys = min(shape.keys, max(KEYS, *counts, 1))
        self.cu_rows = cu_rows_of(counts).to(draw.device)
        starts = self.cu_rows[:-1].long().repeat_interleave(self.cu_rows.diff().long())
        lengths = self.cu_rows.diff().long().repeat_interleave(self.cu_rows.diff().long())
        self.positions = self.keys - lengths + torch.arange(shape.rows, device=draw.device) - starts
        self.limit = torch.full((shape.rows,), self.keys, dtype=torch.int32, device=draw.device)
        stored: torch.dtype = getattr(torch, shape.stored)
        value = stored.itemsize * shape.head_dim
        pool = max(1, ROOM // (2 * shape.page * shape.kv_heads * value))
        needed = b * -(-self.keys // shape.page)
        sets = max(1, min(SETS, pool // needed))
        pool = min(pool, sets * needed)
        self.k, self.v = (draw(pool, shape.page, shape.kv_heads, shape.head_dim).to(stored) for _ in range(2))
        self.scales: tuple[Tensor | None, Tensor | None] = None, None
        if stored == FLOAT8:
            k_scale, v_scale = (by_head(each[..., 0].float().abs() + 0.5) for each in (self.k, self.v))
            self.scales = k_scale, v_scale
        # If the keys do not fit into the pool, sequences share pages; still no cache holds them all.
        order = draw.order(pool).int().repeat(-(-sets * needed // pool))[: sets * needed]
        width = max(1, shape.keys // shape.page)
        self.tables = []
        for own in order.view(sets, b, -1):
            table = torch.full((b, width), -1, dtype=torch.int32, device=draw.device)
            table[:, : own.shape[1]] = own[:, :width]
            self.tables.append(table)


def _unequal(rows: int, sequences: int) -> list[int]:
    """Number of rows of each sequence: half of the mean and one and a half in turn."""
    ends = [rows * (2 * s - s % 2) // max(1, 2 * sequences - sequences % 2) for s in range(sequences + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def attention(shape: AttentionShape, device: torch.device) -> Trial:
    """paged_attention: every row sees all keys of its sequence."""
    draw = _Draws(device, shape.dtype)
    held, q = _Caches(shape, draw), draw(shape.rows, shape.heads, shape.head_dim)

    def call(table: Tensor, tiling: attention_tiling.Tiling) -> Any:
        scale = shape.head_dim**-0.5
        given = q, held.k, held.v, table, held.cu_rows, held.limit, scale, *held.scales
        return paged_attention.kernel(*given, tiling=tiling)

    return Trial([[bound(call, table) for table in held.tables]])


def partial(shape: AttentionShape, device: torch.device) -> Trial:
    """partial_attention: every eighth row has changed."""
    draw = _Draws(device, shape.dtype)
    held, q = _Caches(shape, draw), draw(shape.rows, shape.heads, shape.head_dim)
    before = draw(*held.k.shape[:2], shape.heads, shape.head_dim)
    context, dv = before.clone(), 0.05 * draw(shape.rows, shape.kv_heads, shape.head_dim)
    changed = torch.arange(0, shape.rows, 8, device=device)
    index = torch.full((shape.rows,), -1, device=device)
    index[: len(changed)] = changed
    cu_changed = torch.searchsorted(changed, held.cu_rows.long()).int()
    full = torch.zeros(shape.rows, dtype=torch.bool, device=device)

    def call(table: Tensor, tiling: partial_attention.Tiling) -> tuple[Tensor, Tensor]:
        return partial_attention.kernel(
            q, held.k, held.v, dv, index, cu_changed, context, full, held.positions, table, held.cu_rows, held.limit,
            shape.head_dim**-0.5, 0.99, *held.scales, tiling=tiling,
        )  # fmt: skip

    return Trial([[bound(call, table) for table in held.tables]], lambda: context.copy_(before))


def products(shape: LinearShape, device: torch.device) -> Trial:
    """rows_linear: an eighth, a quarter, half and all of the rows are live."""
    draw = _Draws(device, shape.dtype)
    size = shape.d_in * shape.d_out * draw.dtype.itemsize
    weights = [shape.d_in**-0.5 * draw(shape.d_out, shape.d_in) for _ in range(max(2, min(SETS, ROOM // size)))]
    x = draw(shape.rows, shape.d_in)

    def call(rows: int, count: Tensor, weight: Tensor, tiling: rows_linear.Tiling) -> Tensor:
        return rows_linear.kernel(x, weight, None, count, tiling)[:rows]

    loads: list[list[Call]] = []
    for rows in sorted({max(1, shape.rows // part) for part in (8, 4, 2, 1)}):
        count = torch.tensor([rows], dtype=torch.int32, device=device)
        loads.append([bound(call, rows, count, weight) for weight in weights])
    return Trial(loads)


def logits(shape: LogitsShape, device: torch.device) -> Trial:
    """lm_head: the reduction of a chunk; every row is a candidate, none is drawn."""
    draw = _Draws(device, shape.dtype)
    count = max(1, min(SETS, ROOM // (shape.rows * shape.vocab * draw.dtype.itemsize)))
    candidate = torch.ones(shape.rows, dtype=torch.bool, device=device)
    temperature = torch.zeros(shape.rows, device=device)
    seed = torch.arange(shape.rows, device=device)

    def call(x: Tensor, tiling: lm_head.Tiling) -> tuple[Tensor, ...]:
        token, confidence, margin, entropy = torch.empty_like(seed), *torch.empty((3, shape.rows), device=device)
        lm_head.reduce_logits(x, candidate, temperature, seed, -1, token, confidence, margin, entropy, tiling)
        return token, confidence, margin, entropy

    return Trial([[bound(call, draw(shape.rows, shape.vocab)) for _ in range(count)]])
