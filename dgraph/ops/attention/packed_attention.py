"""dgraph::packed_attention: attention among the rows of a step, without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, limits_of, pad_rows, positions_of
from dgraph.ops.padded import attend, check_heads, check_window, groups, hidden_keys, mask_of, take
from dgraph.ops.registry import Sample, define

CONTRACT = """\
Attention among packed rows: row i sees the rows j of its own sequence with positions[j] < limit[i], and of these,
where there is a window, those with positions[j] > origin[i] - window: the row itself or its block begins at origin.
q [N, Hq, D]; k, v [N, Hkv, D]; positions i64[N]; cu_rows i32[b+1]; limit i32[N]; origin i32[N], or None with window 0
-> [N, Hq, D] in the dtype of q.
Query head h reads KV head h // (Hq / Hkv). Scores q.k * scale and sums in fp32 at least.
A row that sees nothing, and a padding row, gives zeros. Padding rows may hold anything.
Deterministic. The reference pads each sequence to a length that depends on nothing but its own row count,
so that a sequence gives the same bits alone and in any batch."""


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
    origin: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    check_heads("packed_attention", q, k, 1)
    check_window("packed_attention", origin, window)
    out = q.new_zeros(q.shape)
    for group in groups(cu_rows):
        rows = group.rows
        at, end = positions[rows], limit[rows]
        since = None if origin is None else origin[rows]
        hidden = hidden_keys(at, end, since, window).logical_or_(~group.live[:, None, :])
        # Positions ascend: a row that does not see the first key sees none, unless that key is behind the window.
        blind = at[:, :1] >= end if origin is None else hidden.all(dim=2)
        mask = mask_of(hidden, q.dtype)
        group.scatter(out, attend(take(q, rows), take(k, rows), take(v, rows), mask, blind, scale))
    return out


def fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, block, hq, hkv, d in (
        ("one sequence, whole blocks", (16,), 8, 4, 2, 16),
        ("ragged, an empty sequence, prompts not multiples of the block", (5, 0, 33, 1), 4, 4, 4, 8),
        ("no rows", (0, 0), 4, 2, 1, 8),
        ("multi-query, odd head dim, block longer than the prompts", (3, 7), 32, 3, 1, 10),
    ):
        n, starts = sum(counts), [0] * len(counts)
        q, k, v = (torch.randn(n, h, d, generator=generator) for h in (hq, hkv, hkv))
        positions, limit = positions_of(counts, starts), limits_of(counts, starts, block)
        yield from _sample(name, q, k, v, positions, cu_rows_of(counts), limit)
    q, k, v = (torch.randn(6, h, 8, generator=generator) for h in (4, 2, 2))
    positions, cu_rows = positions_of((7, 5), (0, 0)), cu_rows_of((7, 5))
    origin = torch.cat([positions[:9], torch.full((3,), 3)]).int()  # causal rows, then a block
    q, k, v = (torch.randn(12, h, 8, generator=generator) for h in (4, 2, 2))
    yield from _sample("windows", q, k, v, positions, cu_rows, (origin + 1).clamp(max=5), origin, 3)
    positions = torch.tensor([10, 11, 14, 0, 1, 2])
    limit = torch.tensor([10, 15, 11, 0, 3, 1]).int()
    yield from _sample("gaps in the positions, rows that see nothing", q, k, v, positions, cu_rows_of((3, 3)), limit)


def _sample(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    origin: Tensor | None = None,
    window: int = 0,
) -> Iterator[Sample]:
    scale = q.shape[2] ** -0.5
    padded = (*(pad_rows(x, 5) for x in (q, k, v, positions)), cu_rows, pad_rows(limit, 5), scale)
    more = () if origin is None else (origin, window)
    more_padded = () if origin is None else (pad_rows(origin, 5), window)
    yield Sample(name, (q, k, v, positions, cu_rows, limit, scale, *more), (*padded, *more_padded))


OP = define(
    "packed_attention",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    padding=(0,),
)
