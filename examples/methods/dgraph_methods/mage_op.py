"""dgraph_methods::top_votes: attention to the keys that some row of a window attends to most, see mage.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops import OPS, Sample, define, numeric
from dgraph.ops.attention.sparse import SELECT, spans_of

CONTRACT = """\
As dgraph::kv_votes of the rows inside the window: the votes for key row j of a sequence with action SELECT, and for KV
head h. But a row votes, by each query head, only for the `top` keys outside of the window that it attends to most, of
equal ones the lower. Keys inside the window get no votes.
q [N, Hq, D], positions i64[N] and limit i32[N] by cu_rows i32[b+1]; k [M, Hkv, D] and key_positions i64[M] by cu_keys
i32[b+1]; window i32[b, 2]; action i32[b]; scale a float; top at least 1
-> f32[M, Hkv]: means over the query heads of h's group of sums over rows. Padding rows give 0, and may hold anything.
Deterministic. A sequence gives the same bits alone and in any batch."""


def top_votes(
    q: Tensor, k: Tensor, positions: Tensor, key_positions: Tensor, cu_rows: Tensor, cu_keys: Tensor, limit: Tensor,
    window: Tensor, action: Tensor, scale: float, top: int,
) -> Tensor:  # fmt: skip
    out, (heads, kv_heads) = k.new_zeros(k.shape[:2], dtype=numeric(q.dtype)), (q.shape[1], k.shape[1])
    for s, rows, keys in spans_of(action, SELECT, cu_rows, cu_keys):
        inside = (positions[rows] >= window[s, 0]) & (positions[rows] < window[s, 1])
        mine = q[rows][inside].to(out.dtype).unflatten(1, (kv_heads, heads // kv_heads))
        at = key_positions[keys]
        seen = (at < limit[rows][inside][:, None])[None, None]
        scores = torch.einsum("rhgd,khd->hgrk", mine, k[keys].to(out.dtype)) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)
        weights = weights.masked_fill((at >= window[s, 0]) & (at < window[s, 1]), 0)
        best = weights.argsort(dim=-1, descending=True, stable=True)[..., :top]
        votes = torch.zeros_like(weights).scatter(-1, best, weights.gather(-1, best))
        out[keys] = votes.mean(1).sum(1).T
    return out


def fake(q: Tensor, k: Tensor, *rest: object) -> Tensor:
    return k.new_empty(k.shape[:2], dtype=numeric(q.dtype))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for of in OPS["kv_votes"].samples(generator):
        if of.padded is not None and "float8" not in of.name:
            yield Sample(of.name, (*of.args[:10], 3), (*of.padded[:10], 3))


OP = define(
    "dgraph_methods::top_votes", top_votes, samples=samples, contract=CONTRACT, fake=fake,
    own_rows=("k", "key_positions"), padding=(0,),
)  # fmt: skip
