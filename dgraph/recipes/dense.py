"""The baseline: every masked row of the block through every layer in every step."""

from __future__ import annotations

from dgraph.passes.base import Pass
from dgraph.passes.cache_kv import CacheKV
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.fuse_projections import FuseProjections
from dgraph.passes.only_kv import OnlyKV
from dgraph.passes.pack_rows import PackRows
from dgraph.recipes.base import Phase, Recipe
from dgraph.spec import ModelSpec

CACHED: tuple[Pass, ...] = (PackRows(), FuseProjections(), CacheKV())
"""What every recipe for a block-causal model starts with."""

PREFILL = Phase("prefill", (*CACHED, OnlyKV()))
"""The prompt's whole blocks: keys and values only."""


def dense(spec: ModelSpec, block_cache: str = "off", refresh: bool = True, max_num_logits: int = 2048) -> Recipe:
    """Block diffusion as published, with a KV cache of earlier blocks; no row is evicted.

    Args:
        spec: the model.
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        refresh: forward a finished block once more before it is committed.
        max_num_logits: rows whose logits exist at a time.
    """
    step = Phase("step", (*CACHED, ChunkLMHead(max_num_logits)))
    return Recipe("dense", 1, (PREFILL, step), block_cache, refresh)
