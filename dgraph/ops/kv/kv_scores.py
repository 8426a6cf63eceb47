"""dgraph::kv_scores: score each key of a sequence by the mean query of its window (Sparse-dLLM, dLLM-Serve)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT, per_sequence, spans_of
from dgraph.ops.draws import cu_rows_of, pad_rows, positions_of
from dgraph.ops.kv.kv_votes import in_float8
from dgraph.ops.kv.scales import check_scale, unscaled
from dgraph.ops.padded import check_heads
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
The score of key row j of a sequence with action SELECT: s_h(j) = scale * mean(q)_h . k_j for query head h, the mean
over
the query rows of the sequence whose position is inside its window [lo, hi). No such row: 0.
shared=False: for each KV head the maximum of s_h(j) over the query heads of its group (dLLM-Serve Eq. 6);
shared=True: the mean over all query heads, the same for every KV head (Sparse-dLLM).
q [N, Hq, D] and positions i64[N] by cu_rows i32[b+1], positions ascending in a sequence; k [M, Hkv, D] by
cu_keys i32[b+1]; window i32[b, 2]; action i32[b]
k in float8_e4m3fn has k_scale f32[M, Hkv], contiguous: a key stands for its scale times what is stored
-> f32[M, Hkv] (float64 for float64). Query head h reads KV head h // (Hq / Hkv). Means, scores and sums in fp32 at
least. Sequences with other actions, and padding rows, give 0. Padding rows, and query rows outside of the window, may
hold anything. Deterministic; a sequence gives the same bits alone and in any batch of the reference."""


def reference(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cu_rows: Tensor,
    cu_keys: Tensor,
    window: Tensor,
    action: Tensor,
    scale: float,
    shared: bool,
    k_scale: Tensor | None = None,
) -> Tensor:
    check_heads("kv_scores", q, k, 1)
    check_scale("kv_scores", k, k_scale)
    out = q.new_zeros(k.shape[:2], dtype=numeric(q.dtype))
    kv_heads = k.shape[1]
    bounds = window.tolist()
    for s, rows, keys in spans_of(action, SELECT, cu_rows, cu_keys):
        low, high = bounds[s]
        inside = (positions[rows] >= low) & (positions[rows] < high)
        found = q[rows][inside].to(out.dtype)
        if not len(found):
            continue
        mean = found.mean(0).view(kv_heads, -1, q.shape[2])
        of_s = unscaled(k[keys], None if k_scale is None else k_scale[keys], q.dtype).to(out.dtype)
        scores = torch.einsum("hgd,jhd->jhg", mean, of_s) * scale
        out[keys] = scores.mean((1, 2))[:, None] if shared else scores.amax(2)
    return out


def fake(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(k.shape[:2], dtype=numeric(q.dtype))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, windows, actions, heads, d, shared in (
        ("by head", (20, 17), ((8, 16), (9, 17)), (SELECT, SELECT), (4, 2), 16, False),
        ("shared", (20, 17), ((8, 16), (9, 17)), (SELECT, SELECT), (4, 2), 16, True),
        (
            "every action, an empty sequence",
            (9, 12, 0, 14, 5),
            ((6, 9), (8, 12), (3, 5), (10, 14), (2, 5)),
            (DENSE, SELECT, SELECT, REUSE, REPACK),
            (3, 3),
            8,
            False,
        ),
        ("one KV head, odd head dim", (11, 3), ((4, 8), (0, 3)), (SELECT, SELECT), (3, 1), 10, False),
        ("shared, a window beyond the rows", (11, 3), ((4, 8), (3, 9)), (SELECT, SELECT), (3, 3), 10, True),
        ("a window beyond the rows", (5, 3), ((5, 8), (1, 9)), (SELECT, SELECT), (2, 1), 8, False),
        ("no rows", (0, 0), ((0, 4), (0, 4)), (SELECT, SELECT), (2, 1), 8, True),
    ):
        n = sum(counts)
        q, k = (torch.randn(n, h, d, generator=generator) for h in heads)
        cu, positions = cu_rows_of(counts), positions_of(counts, [0] * len(counts))
        rest = (cu, cu.clone(), per_sequence(windows), per_sequence(actions), d**-0.5, shared)
        yield Sample(name, (q, k, positions, *rest), (*(pad_rows(x, 3) for x in (q, k, positions)), *rest))
    q, k = torch.randn(7, 4, 8, generator=generator), torch.randn(19, 2, 8, generator=generator)
    positions, cu_rows, cu_keys = torch.tensor([4, 5, 8, 9, 2, 3, 6]), cu_rows_of((4, 3)), cu_rows_of((12, 7))
    rest = (cu_rows, cu_keys, per_sequence([(5, 9), (2, 6)]), per_sequence([SELECT, SELECT]), 1.0, False)
    few, padded = (q, k, positions, *rest), (*(pad_rows(x, 3) for x in (q, k, positions)), *rest)
    yield Sample("fewer query rows than keys", few, padded)
    yield Sample("the same, float8", in_float8(few), in_float8(padded))


OP = define(
    "kv_scores",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    own_rows=("k", "k_scale"),
    scales={"k": "k_scale"},
    padding=(0,),
    kernel="dgraph.ops.kv.triton.kv_scores:kernel",
)
