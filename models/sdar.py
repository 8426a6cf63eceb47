"""SDAR: block diffusion over Qwen3 (JetLM/SDAR-*-Chat-b{16,32,64}).

SDAR's parameters carry Qwen3's names and shapes. The published checkpoints were trained for blocks of 4, or of N where
their name ends in -bN; no config key says so, nor does their config name the mask token.
"""

from __future__ import annotations

import re
from typing import Any

from dgraph.models.remote_code import RemoteCodeFamily

FACTS: dict[str, Any] = {
    "mask_id": 151669,
    "eos_ids": (151645, 151643),
    "pad_id": 151643,
    "block_length": None,
    "attention": "block_causal",
    "logit_shift": 0,
}


def translate(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config with the block length that the checkpoint's name says.

    The name may stand anywhere in the checkpoint's path: a hub's cache has it above the folder. The path that an object
    was loaded from serves, too.
    """
    if config.get("block_size") is None and config.get("block_length") is None:
        places = re.split(r"[/\\]", f"{config.get('_name_or_path') or ''}/{folder}")
        names = (re.search(r"sdar.*-b(\d+)(?![0-9a-z])", place, re.IGNORECASE) for place in reversed(places))
        if found := next(filter(None, names), None):
            return {**config, "block_size": int(found.group(1))}
    return config


family = RemoteCodeFamily(
    name="sdar",
    summary="SDAR: block diffusion over Qwen3",
    remote="SDARForCausalLM",
    native="Qwen3ForCausalLM",
    facts=FACTS,
    translate=translate,
)
