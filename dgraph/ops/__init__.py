"""The ops of dgraph: schema, fake, plain-torch reference, contract and samples of each, one op per file.

Importing this package registers them all as `torch.ops.dgraph.*`. A call with CUDA tensors runs a Triton
kernel where there is one (`KERNELS`), and the reference else; Triton is imported on the first such call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgraph.ops import (
    attention,
    compact,
    drift,
    experts,
    feature_merge,
    feature_read,
    feature_take,
    feature_write,
    importance,
    keep_index,
    kv_pack,
    kv_scores,
    kv_update,
    kv_votes,
    kv_write,
    least_similar,
    list_kept,
    lm_head,
    packed_attention,
    paged_attention,
    partial_attention,
    rms_norm,
    rope,
    route,
    row_slots,
    rows_glu,
    rows_linear,
    rows_norm,
    rows_rope,
    select_tokens,
    sparse_attention,
)
from dgraph.ops.lm_head import decode_logits
from dgraph.ops.registry import OPS, Op, Sample, launcher, op_of, register, use_kernel

references: dict[str, Callable[..., Any]] = {name: op.reference for name, op in OPS.items()}
"""The reference of each op, by name."""

KERNELS = (
    "compact",
    "drift",
    "experts",
    "feature_merge",
    "feature_read",
    "feature_write",
    "importance",
    "keep_index",
    "kv_pack",
    "kv_scores",
    "kv_update",
    "kv_votes",
    "kv_write",
    "least_similar",
    "list_kept",
    "lm_head",
    "paged_attention",
    "partial_attention",
    "route",
    "rows_glu",
    "rows_linear",
    "rows_norm",
    "rows_rope",
    "select_tokens",
    "sparse_attention",
)
"""Ops with a kernel in dgraph/ops/triton."""

for _name in KERNELS:
    use_kernel(OPS[_name])

__all__ = [
    "KERNELS",
    "OPS",
    "Op",
    "Sample",
    "attention",
    "compact",
    "decode_logits",
    "drift",
    "experts",
    "feature_merge",
    "feature_read",
    "feature_take",
    "feature_write",
    "importance",
    "keep_index",
    "kv_pack",
    "kv_scores",
    "kv_update",
    "kv_votes",
    "kv_write",
    "launcher",
    "least_similar",
    "list_kept",
    "lm_head",
    "op_of",
    "packed_attention",
    "paged_attention",
    "partial_attention",
    "references",
    "register",
    "rms_norm",
    "rope",
    "route",
    "row_slots",
    "rows_glu",
    "rows_linear",
    "rows_norm",
    "rows_rope",
    "select_tokens",
    "sparse_attention",
]
