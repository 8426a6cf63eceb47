"""dgraph::partial_attention: attention after only some keys and values have changed (DyLLM)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dgraph.ops.attention import partial_context
from dgraph.ops.registry import define
from dgraph.ops.selection import drifted

CONTRACT = """\
Context of rows over the paged cache of their sequence, exact for some and updated for the others; then which rows are
salient, as drift says of that context.
q [N, H, D]; k_cache, v_cache [pages, page, Hkv, D]; c_cache [pages, page, H, D], all of one dtype, but k_cache and
v_cache may be in float8_e4m3fn, with scales k_scale and v_scale as in paged_attention; position p of
sequence s at cache[page_table[s, p // page], p % page]. c_cache may have another number of pages, found
by c_table i32[b, P'] instead. positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1];
limit i32[N]; full bool[N]. Query head h reads KV head h // (H / Hkv).
index i64[K]: the rows of q whose k and v have changed, ascending, -1 from cu_changed[b] on; cu_changed i32[b+1]: its
offsets by sequence; dv [K, Hkv, D]: what was added to their values. The caches hold the new k and v already.
-> context [N, H, D] in the dtype of q, and salient bool[N].
Exact rows, the same as paged_attention gives: those in index, those with full, and every row if tau is above 1.
Any other row: its entry of c_cache + the sum over j of index, in its sequence, with positions[j] < limit of
p_j * dv_j, where p = softmax(q.k * scale) over all positions < limit. No such j, or limit 0: its entry of c_cache.
Scores, p and sums in fp32 at least, rounded once at the end. An approximate row reads dv of its own sequence only; an
exact one reads none, so that the dv of a full sequence may be NaN.
salient = full, or the cosine between context as returned and c_cache is below tau; all as in drift, the update of
c_cache with the context of every live row included.
Padding rows of q and of index may hold anything and give zeros and False; they write nothing. Slots that no row sees
may hold NaN. Deterministic; a sequence gives the same bits alone and in any batch (reference)."""


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    dv: Tensor,
    index: Tensor,
    cu_changed: Tensor,
    c_cache: Tensor,
    full: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
    tau: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    c_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    caches, changes = (k_cache, v_cache), (dv, index, cu_changed)
    where = (full, positions, page_table, cu_rows, limit)
    scales = k_scale, v_scale
    context, sums = partial_context.reference(q, *caches, *changes, c_cache, *where, scale, tau, *scales, c_table)
    return context, drifted.reference(sums, full, cu_rows, tau)


def fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), torch.empty(q.shape[0], dtype=torch.bool, device=q.device)


OP = define(
    "partial_attention",
    reference,
    samples=partial_context.samples,
    contract=CONTRACT,
    fake=fake,
    mutates=("c_cache",),
    scales={"k_cache": "k_scale", "v_cache": "v_scale"},
    own_rows=("dv", "index", "cu_changed"),
    padding=(0, 0),
    kernel="dgraph.ops.attention.triton.partial_attention:kernel",
    tuning="dgraph.ops.triton.candidates:PARTIAL",
)
