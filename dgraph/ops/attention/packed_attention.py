"""dgraph::packed_attention: attention among the rows of a step, without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, limits_of, pad_rows, positions_of
from dgraph.ops.padded import attend, check_gap, check_heads, check_window, groups, hidden_keys, mask_of
from dgraph.ops.registry import Sample, define

CONTRACT = """\
Attention among packed rows: row i sees the rows j of its own sequence with positions[j] < limit[i], and of these,
where there is a window, those with positions[j] > origin[i] - window: the row itself or its block begins at origin.
A gap hides the positions in [gap[i, 0], gap[i, 1]) from row i. The key of a row with own[i] is seen by that row alone,
whatever its limit, window and gap are.
q [N, Hq, D]; k, v [N, Hkv, D]; positions i64[N]; cu_rows i32[b+1]; limit i32[N]; origin i32[N], or None with window 0;
gap i32[N, 2] and own bool[N], or None -> [N, Hq, D] in the dtype of q.
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
    gap: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    check_heads("packed_attention", q, k, 1)
    check_window("packed_attention", origin, window)
    check_gap("packed_attention", len(q), gap)
    out = q.new_zeros(q.shape)
    for group in groups(cu_rows):
        rows = group.rows
        at, end = positions[rows], limit[rows]
        since = None if origin is None else origin[rows]
        hidden = hidden_keys(at, end, since, window, None if gap is None else gap[rows])
        hidden = hidden.logical_or_(~group.live[:, None, :])
        if own is not None:  # slots past the end of a sequence repeat its first row, and are hidden all the same
            alone = own[rows][:, None, :] & group.live[:, None, :]
            itself = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device)
            hidden = (hidden | alone) & ~(alone & itself)
        # Positions ascend: a row that does not see the first key sees none, unless that key is behind the window.
        plain = origin is None and gap is None and own is None
        blind = at[:, :1] >= end if plain else hidden.all(dim=2)
        mask = mask_of(hidden, q.dtype)
        group.scatter(out, attend(group.take(q), group.take(k), group.take(v), mask, blind, scale))
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
    yield from _ranges(generator)


def _ranges(generator: torch.Generator) -> Iterator[Sample]:
    """Samples of rows that see two ranges, and of rows after a sequence's others that no other row sees."""
    positions, cu_rows = torch.tensor([0, 1, 2, 3, 1, 2, 0, 1, 1]), cu_rows_of((6, 3))
    q, k, v = (torch.randn(9, h, 8, generator=generator) for h in (4, 2, 2))
    gap = torch.stack([positions, positions + 1], 1).int()
    gap[2], gap[6] = torch.tensor([3, 3]), torch.tensor([0, 9])  # an empty one, and one that leaves nothing
    own = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 1]).bool()
    limit = torch.tensor([4, 4, 4, 3, 4, 0, 2, 2, 2]).int()
    for name, origin, window, two, alone in (
        ("two ranges", None, 0, gap, None),
        ("rows of their own", None, 0, None, own),
        ("two ranges, rows of their own and windows", positions.int(), 2, gap, own),
    ):
        yield from _sample(name, q, k, v, positions, cu_rows, limit, origin, window, two, alone)


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
    gap: Tensor | None = None,
    own: Tensor | None = None,
) -> Iterator[Sample]:
    scale = q.shape[2] ** -0.5
    padded = (*(pad_rows(x, 5) for x in (q, k, v, positions)), cu_rows, pad_rows(limit, 5), scale)
    found = (origin, window, gap, own)
    more: tuple[Any, ...] = () if found == (None, 0, None, None) else found
    more_padded = tuple(pad_rows(x, 5) if isinstance(x, Tensor) else x for x in more)
    yield Sample(name, (q, k, v, positions, cu_rows, limit, scale, *more), (*padded, *more_padded))


OP = define(
    "packed_attention",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    added="own",
    padding=(0,),
)
