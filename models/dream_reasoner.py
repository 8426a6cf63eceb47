"""DreamReasoner: block diffusion over Qwen3 (Dream-org/DreamReasoner-8B, arXiv 2606.19257).

It shares the name and the config's class with Dream, and little else. The parameters carry Qwen3's names and shapes
(norms of queries and keys, no biases). Attention is block-causal in blocks of `block_size`, and logits of a row predict
its own position. The policy "reasoner" is the published rule.
"""

from __future__ import annotations

from typing import Any

from dgraph.models.dream import translate
from dgraph.models.remote_code import RemoteCodeFamily

FACTS: dict[str, Any] = {
    "mask_id": 151669,
    "eos_ids": (151645, 151643),
    "pad_id": 151643,
    "block_length": 32,
    "attention": "block_causal",
    "logit_shift": 0,
}

family = RemoteCodeFamily(
    name="dream_reasoner",
    summary="DreamReasoner: block diffusion over Qwen3",
    remote="DreamForCausalLM",
    native="Qwen3ForCausalLM",
    facts=FACTS,
    translate=translate,
    alike="sdar",
)
