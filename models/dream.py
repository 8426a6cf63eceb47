"""Dream: masked diffusion over Qwen2 (Dream-org/Dream-v0-{Base,Instruct}-7B), started from Qwen2.5.

The parameters carry Qwen2's names and shapes (biases on q, k and v, none on o). Every row sees every row. The logits
of a row predict the position after it, as in the causal model that Dream was started from.
"""

from __future__ import annotations

from typing import Any

from dgraph.models.remote_code import RemoteCodeFamily, require

FACTS: dict[str, Any] = {
    "mask_id": 151666,
    "eos_ids": (151643,),
    "pad_id": 151643,
    "block_length": 32,
    "attention": "bidirectional",
    "logit_shift": 1,
}
NATIVE = "Qwen2ForCausalLM"


def translate(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config as it is, if Qwen2 can represent it."""
    for key in ("use_mrope", "use_sliding_window"):
        require(config, key, (False, None), NATIVE)
    return config


family = RemoteCodeFamily(
    name="dream",
    summary="Dream: masked diffusion over Qwen2, logits shifted by one",
    remote="DreamModel",
    native=NATIVE,
    facts=FACTS,
    translate=translate,
)
