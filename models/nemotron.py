"""Nemotron-Labs-Diffusion: one dense decoder in two modes (NVIDIA, 3B, 8B and 14B, arXiv 2607.05722).

The decoder is Ministral's: no biases, no norm of queries or keys, YaRN, and queries that are scaled at positions after
the original window (`llama_4_scaling_beta`). Its parameters stand under `encoder.`, and its head, `diffusion_head`, is
not the embedding. A prompt and a finished block are forwarded with causal attention, which predicts the next token; a
block is denoised with attention to all of it, and begins with that token. So the causal rows alone are an
autoregressive model, which the policies "autoregressive" and "self_speculation" decode by.

A checkpoint's folder may hold an adapter by which self-speculation drafts, in PEFT's format (`linear_spec_lora`, of
rank 128 beside o_proj): `dgraph.load(folder, adapter="linear_spec_lora")`. Drafts alone read it; what verifies them,
and every other policy, reads the model's own weights.
"""

from __future__ import annotations

from typing import Any

from dgraph.errors import CheckpointError
from dgraph.models.remote_code import RemoteCodeFamily, require, section

FACTS: dict[str, Any] = {
    "mask_id": 100,
    "eos_ids": (2,),
    "pad_id": 0,
    "block_length": 32,
    "attention": "block_causal",
    "encoding": "causal",
    "next_token": True,
    "logit_shift": 0,
}
NATIVE = "Ministral3ForCausalLM"
TINY_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Rotation of a tiny model: prompts reach over its original window, so that the scale of queries shows."""


def translate(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """The config, if Ministral can represent it."""
    for key, allowed in (
        ("sliding_window", (None,)),
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("hidden_act", ("silu", None)),
        ("dlm_paradigm", ("bidirectional", None)),
        ("tie_word_embeddings", (False, None)),
    ):
        require(config, key, allowed, NATIVE)
    rope = section(config, "rope_parameters") or section(config, "rope_scaling")
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if rope.get(key) is None:
            raise CheckpointError(f"rope_parameters has no {key}, by which {NATIVE} scales queries.")
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    said = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    return {**said, "rope_parameters": rope, "tie_word_embeddings": False}


def stored(name: str) -> str:
    """A parameter's name in the checkpoint."""
    if name == "lm_head.weight":
        return "diffusion_head.weight"
    return name.replace("model.", "encoder.", 1)


family = RemoteCodeFamily(
    name="nemotron",
    summary="Nemotron-Labs-Diffusion: block diffusion, autoregression and self-speculation with one set of weights",
    remote="NemotronLabsDiffusionModel",
    native=NATIVE,
    facts=FACTS,
    translate=translate,
    stored=stored,
    tiny={"rope_parameters": TINY_ROPE},
)
