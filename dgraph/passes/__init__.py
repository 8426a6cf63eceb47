"""The passes, one file each, and the manager that runs them."""

from __future__ import annotations

from collections.abc import Mapping

from dgraph.passes.adapt_drafts import AdaptDrafts
from dgraph.passes.add_rows import AddRows
from dgraph.passes.adjust_logits import AdjustLogits
from dgraph.passes.base import Effect, Pass, Report
from dgraph.passes.bound_rows import BoundRows
from dgraph.passes.cache_kv import CacheKV
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.count_rows import CountRows
from dgraph.passes.encode_rows import EncodeRows
from dgraph.passes.evict_tokens import EvictTokens
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.passes.fuse_projections import FuseProjections
from dgraph.passes.gate_ffn import GateFFN
from dgraph.passes.manager import run_passes
from dgraph.passes.measure_rows import MeasureRows
from dgraph.passes.only_kv import OnlyKV
from dgraph.passes.only_masked import OnlyMasked
from dgraph.passes.pack_rows import PackRows
from dgraph.passes.partial_attention import PartialAttention
from dgraph.passes.quantised_operands import QuantisedOperands
from dgraph.passes.quantize_weights import QuantizeWeights
from dgraph.passes.reuse_rows import ReuseRows
from dgraph.passes.self_condition import SelfCondition
from dgraph.passes.shard_tensor_parallel import ShardTensorParallel
from dgraph.passes.slot_kv import SlotKV
from dgraph.passes.sparse_kv import SparseKV
from dgraph.plugins import Table, check_class

GROUP = "dgraph.passes"

_OWN: dict[str, type[Pass]] = {
    cls.__name__: cls
    for cls in (
        QuantizeWeights,
        ShardTensorParallel,
        PackRows,
        AdaptDrafts,
        FuseProjections,
        CacheKV,
        SlotKV,
        AddRows,
        EvictTokens,
        ChunkLMHead,
        SelfCondition,
        OnlyMasked,
        GateFFN,
        PartialAttention,
        ReuseRows,
        SparseKV,
        CountRows,
        FuseGLU,
        BoundRows,
        EncodeRows,
        OnlyKV,
        QuantisedOperands,
    )
}
PASSES: Mapping[str, type[Pass]] = Table(_OWN, GROUP, check_class(Pass))
"""Every pass by name: dgraph's own in the order in which recipes use them, and those of other packages."""

__all__ = [
    "PASSES",
    "AdaptDrafts",
    "AdjustLogits",
    "BoundRows",
    "CacheKV",
    "ChunkLMHead",
    "CountRows",
    "Effect",
    "EncodeRows",
    "EvictTokens",
    "FuseGLU",
    "FuseProjections",
    "GateFFN",
    "MeasureRows",
    "OnlyKV",
    "OnlyMasked",
    "PackRows",
    "PartialAttention",
    "Pass",
    "QuantisedOperands",
    "QuantizeWeights",
    "Report",
    "ReuseRows",
    "SelfCondition",
    "ShardTensorParallel",
    "SlotKV",
    "SparseKV",
    "run_passes",
]
