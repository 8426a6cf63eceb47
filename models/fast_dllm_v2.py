"""Fast-dLLM v2: block diffusion over Qwen2.5 (Efficient-Large-Model/Fast_dLLM_v2_{1.5B,7B}, arXiv 2509.26328).

The parameters carry Qwen2's names and shapes. Attention is block-causal in blocks of `bd_size`. The logits of a row
predict the position after it, as in the causal model that this one was started from. So the first token of a block has
no row in its own block. The last row of the block before it predicts it, in the forward that writes that block's final
keys. The others are decoded in sub-blocks of 8 (the policy "fast_dllm_v2").

The published code starts a prompt of exactly one block without that block's keys, as if it were not there. Here it is
read as any other prompt.
"""

from __future__ import annotations

from typing import Any

from dgraph.errors import CheckpointError
from dgraph.models.remote_code import RemoteCodeFamily, require

FACTS: dict[str, Any] = {
    "mask_id": 151665,
    "eos_ids": (151645,),
    "pad_id": 151643,
    "block_length": 32,
    "attention": "block_causal",
    "encoding": "block",
    "next_token": True,
    "logit_shift": 1,
}
NATIVE = "Qwen2ForCausalLM"


def translate(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config with the block length under dgraph's key, if Qwen2 can represent it."""
    require(config, "use_sliding_window", (False, None), NATIVE)
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise CheckpointError(
            f"layer_types is {kinds!r}, expected 'full_attention' alone: dgraph's attention sees "
            f"all positions before the end of a block."
        )
    said = (config[key] for key in ("bd_size", "block_size") if config.get(key) is not None)
    return {**config, "block_size": next(said, None)}


family = RemoteCodeFamily(
    name="fast_dllm_v2",
    summary="Fast-dLLM v2: block diffusion over Qwen2.5, each block begun by the forward that caches the one before",
    remote="Fast_dLLM_QwenForCausalLM",
    native=NATIVE,
    facts=FACTS,
    translate=translate,
)
