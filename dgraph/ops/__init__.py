"""The ops of dgraph: schema, fake, plain-torch reference, contract and samples of each, one op per file.

Importing this package registers them all as `torch.ops.dgraph.*`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dgraph.ops import (
    attention,
    compact,
    importance,
    keep_index,
    kv_write,
    lm_head,
    packed_attention,
    paged_attention,
    rms_norm,
    rope,
    select_tokens,
)
from dgraph.ops.lm_head import decode_logits
from dgraph.ops.registry import OPS, Op, Sample, op_of, register

references: dict[str, Callable[..., Any]] = {name: op.reference for name, op in OPS.items()}
"""The reference of each op, by name."""

__all__ = [
    "OPS",
    "Op",
    "Sample",
    "attention",
    "compact",
    "decode_logits",
    "importance",
    "keep_index",
    "kv_write",
    "lm_head",
    "op_of",
    "packed_attention",
    "paged_attention",
    "references",
    "register",
    "rms_norm",
    "rope",
    "select_tokens",
]
