"""dgraph::importance: attention that each of some rows of a block receives from all of them (FOCUS, Eq. 2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.padded import check_heads, groups, offsets_of, take
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
FOCUS Eq. 2. Queries and keys are the members M of each sequence, as a compacted list in row order; no other
row takes part. In the paper M is all rows of the block, in its public kernels the masked ones. Scores
q.k * scale in fp32; maximum over a window of `pool` (odd, stride 1, truncated at both ends) along the keys
of the list; softmax over the keys; sum over heads and queries. The result over a sequence sums to Hq * |M|.
q [N, Hq, D] and k [N, Hkv, D], after QK-norm and RoPE; member bool[N]; cu_rows i32[b+1]
-> f32[N] (float64 for float64).
Rows that are no members, and padding rows, give 0; they may hold anything.
Deterministic, without atomics. The reference pads each list to a length that depends on |M| alone, so that
a sequence gives the same bits alone and in any batch."""


def reference(q: Tensor, k: Tensor, member: Tensor, cu_rows: Tensor, scale: float, pool: int) -> Tensor:
    check_heads("importance", q, k, 1)
    if pool < 1 or pool % 2 == 0:
        raise InputError(f"dgraph::importance: pool must be odd and at least 1, got {pool}.")
    dtype = numeric(q.dtype)
    out = q.new_zeros(q.shape[0], dtype=dtype)
    live = int(cu_rows[-1])
    index = member[:live].nonzero().squeeze(1)
    # Below 16 rows a product of one matrix takes another route than a product of many, with other last bits.
    for group in groups(offsets_of(member, cu_rows), least=16, cost=q.shape[1]):
        rows = index[group.rows]
        mass = _mass(take(q, rows).to(dtype), take(k, rows).to(dtype), group.live, scale, pool)
        out[rows[group.live]] = mass[group.live]
    return out


def _mass(q: Tensor, k: Tensor, live: Tensor, scale: float, pool: int) -> Tensor:
    """Attention [g, m] that each key of padded lists receives, of q [g, m, Hq, D] and k [g, m, Hkv, D]."""
    g, m, heads, d = q.shape
    kv_heads = k.shape[2]
    # Query heads of one KV head are stacked as rows of one matrix, so that keys are not repeated.
    stacked = q.view(g, m, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4).reshape(g * kv_heads, -1, d)
    keys = k.permute(0, 2, 3, 1).reshape(g * kv_heads, d, m)
    scores = torch.bmm(stacked, keys).view(g, heads * m, m).mul_(scale)
    dead = ~live[:, None, :]
    scores.masked_fill_(dead, -torch.inf)
    pooled = scores.clone()
    for shift in range(1, min(pool // 2, m - 1) + 1):
        torch.maximum(pooled[..., shift:], scores[..., :-shift], out=pooled[..., shift:])
        torch.maximum(pooled[..., :-shift], scores[..., shift:], out=pooled[..., :-shift])
    pooled.masked_fill_(dead, -torch.inf)  # a pool around a slot past the end reaches back into the list
    mass = pooled.softmax(-1).view(g, heads, m, m)
    return mass.masked_fill_(~live[:, None, :, None], 0).sum((1, 2))


def fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], dtype=numeric(q.dtype))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, share, hq, hkv, d, pool in (
        ("block of 32", (32, 32), 0.7, 4, 2, 16, 3),
        ("ragged, an empty sequence", (5, 0, 17, 1), 0.5, 4, 4, 8, 3),
        ("all members, wide pool", (6, 3), 1.1, 3, 1, 10, 5),
        ("no members", (4, 2), -1.0, 2, 2, 8, 3),
        ("blocks beside rows of a commit", (64, 20), 1.3, 4, 2, 16, 3),
        ("no pool", (9,), 0.6, 4, 2, 8, 1),
        ("no rows", (0, 0), 0.5, 2, 1, 8, 3),
    ):
        n = sum(counts)
        q, k = (torch.randn(n, h, d, generator=generator) for h in (hq, hkv))
        cu_rows = cu_rows_of(counts)
        member = torch.rand(n, generator=generator) < share
        if share > 1.2:  # rows of a block, after as many that commit the one before it
            member &= torch.cat([torch.arange(c) >= c // 2 for c in counts])
        yield Sample(
            name,
            (q, k, member, cu_rows, d**-0.5, pool),
            (*(pad_rows(x, 4) for x in (q, k, member)), cu_rows, d**-0.5, pool),
        )


OP = define(
    "importance",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    padding=(0,),
    kernel="dgraph.ops.selection.triton.importance:kernel",
)
