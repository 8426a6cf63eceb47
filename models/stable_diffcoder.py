"""Stable-DiffCoder: block diffusion over Llama (ByteDance-Seed/Stable-DiffCoder-8B-{Base,Instruct}).

The parameters carry Llama's names and shapes. Attention is block-causal in blocks of 4, and logits of a row predict its
own position. The tokenizer names the mask token, "<[MASK_TOKEN]>". The policy "stable_diffcoder" is the published
rule.
"""

from __future__ import annotations

from typing import Any

from dgraph.models.remote_code import RemoteCodeFamily

FACTS: dict[str, Any] = {
    "mask_id": 5,
    "eos_ids": (2,),
    "pad_id": 1,
    "block_length": 4,
    "attention": "block_causal",
    "logit_shift": 0,
}

family = RemoteCodeFamily(
    name="stable_diffcoder",
    summary="Stable-DiffCoder: block diffusion over Llama",
    remote="StableDiffcoderForCausalLM",
    native="LlamaForCausalLM",
    facts=FACTS,
    alike="native",
)
