"""SDAR: block diffusion over Qwen3 (JetLM/SDAR-*-Chat-b{16,32,64}), and what was trained from it (TraDo, MBD-SDAR).

SDAR's parameters carry Qwen3's names and shapes. The published checkpoints were trained for blocks of 4, or of N where
their name ends in -bN; no config key says so, nor does their config name the mask token.
"""

from __future__ import annotations

from typing import Any

from dgraph.errors import CheckpointError
from dgraph.models.remote_code import RemoteCodeFamily, named

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

    Raises:
        CheckpointError: a model of the same class that is strictly causal (I-DLM).
    """
    if config.get("use_regular_causal"):
        raise CheckpointError(
            "use_regular_causal is true: this is an I-DLM (arXiv 2604.11035), in which masks see only what comes "
            "before them, and rows predict the next position. dgraph has no strictly causal blocks; load an SDAR."
        )
    said = config.get("block_size") is not None or config.get("block_length") is not None
    found = None if said else named(config, folder, r"sdar.*-b(\d+)(?![0-9a-z])")
    return config if found is None else {**config, "block_size": int(found.group(1))}


family = RemoteCodeFamily(
    name="sdar",
    summary="SDAR: block diffusion over Qwen3",
    remote="SDARForCausalLM",
    native="Qwen3ForCausalLM",
    facts=FACTS,
    translate=translate,
)
