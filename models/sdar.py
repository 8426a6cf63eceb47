"""SDAR: block diffusion over Qwen3 (JetLM/SDAR-*-Chat-b{16,32,64}).

SDAR's parameters carry Qwen3's names and shapes. Its block length is in no config key of the published checkpoints,
only in their name; nor does their config name the mask token.
"""

from __future__ import annotations

import re
from typing import Any

from dgraph.models.remote_code import RemoteCodeFamily

FACTS: dict[str, Any] = {
    "mask_id": 151669,
    "eos_ids": (151645, 151643),
    "pad_id": 151643,
    "block_length": 32,
    "attention": "block_causal",
    "logit_shift": 0,
}


def translate(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config with the block length that the checkpoint's name says."""
    named = re.search(r"-b(\d+)$", folder)
    if config.get("block_size") is None and named:
        return {**config, "block_size": int(named.group(1))}
    return config


family = RemoteCodeFamily(
    name="sdar",
    summary="SDAR: block diffusion over Qwen3",
    remote="SDARForCausalLM",
    native="Qwen3ForCausalLM",
    facts=FACTS,
    translate=translate,
)
