"""LLaDA: masked diffusion over Llama (GSAI-ML/LLaDA-8B-{Base,Instruct}, LLaDA-1.5).

LLaDA is a Llama with full attention heads, no bias and an output head of its own. Its config keys and parameter names
are those of OLMo. Every row sees every row.
"""

from __future__ import annotations

import re
from typing import Any

from dgraph.errors import CheckpointError
from dgraph.models.remote_code import RemoteCodeFamily, require, require_size

EOS_ID = 126081
END_OF_TURN_ID = 126348
"""<|eot_id|>: ends an answer of the chat models, and is in no config key."""

FACTS: dict[str, Any] = {
    "mask_id": 126336,
    "eos_ids": (EOS_ID, END_OF_TURN_ID),
    "pad_id": EOS_ID,
    "block_length": 32,
    "attention": "bidirectional",
    "logit_shift": 0,
}
NATIVE = "LlamaForCausalLM"

# Native config key -> LLaDA's.
KEYS = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "mlp_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
}

# Settings of OLMo's code, with the values that are Llama's; None where a missing key means the same.
_REPRESENTABLE: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "block_group_size": (1, None),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True, None),
    "attention_layer_norm": (False, None),
    "bias_for_layer_norm": (False, None),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "rope": (True,),
    "alibi": (False, None),
    "input_emb_norm": (False, None),
    "scale_logits": (False, None),
    "clip_qkv": (None,),
    "rope_scaling": (None,),
    "weight_tying": (True, False, None),
}
_SIZES = (
    *("d_model", "n_heads", "n_layers", "n_kv_heads", "mlp_hidden_size", "max_sequence_length"),
    *("embedding_size", "vocab_size"),
)

_OUTSIDE = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def translate(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """LLaDA's config in Llama's keys.

    Raises:
        CheckpointError: a key is missing, or has a value that Llama cannot represent.
    """
    for key, allowed in _REPRESENTABLE.items():
        require(config, key, allowed, NATIVE)
    for key in _SIZES:
        require_size(config, key)
    if config.get("mlp_hidden_size") is None and config.get("mlp_ratio") and config.get("d_model"):
        config = {**config, "mlp_hidden_size": int(config["mlp_ratio"] * config["d_model"])}
    if missing := [key for key in KEYS.values() if config.get(key) is None]:
        raise CheckpointError(f"{', '.join(missing)} is missing.")
    heads, kv_heads = config["n_heads"], config.get("n_kv_heads")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query_attention") else heads
    # The embedding may be padded beyond the vocabulary, and with it the head.
    rows = config.get("embedding_size") or config.get("vocab_size")
    eos = config.get("eos_token_id")
    return {
        **{native: config[key] for native, key in KEYS.items()},
        "num_key_value_heads": kv_heads,
        "vocab_size": rows,
        "tie_word_embeddings": config.get("weight_tying", True),
        "mask_token_id": config.get("mask_token_id"),
        "eos_token_id": list(FACTS["eos_ids"]) if eos == EOS_ID else eos,
        "pad_token_id": config.get("pad_token_id"),
        "bos_token_id": None,
    }


def stored(name: str) -> str:
    """LLaDA's name of a parameter of Llama: "model.layers.3.mlp.up_proj.weight" is block 3's "up_proj.weight"."""
    path, _, leaf = name.rpartition(".")
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
    if inside is None:
        return f"{_OUTSIDE[path]}.{leaf}"
    return f"model.transformer.blocks.{inside.group(1)}.{_INSIDE[inside.group(2)]}.{leaf}"


family = RemoteCodeFamily(
    name="llada",
    summary="LLaDA: masked diffusion over Llama",
    remote="LLaDAModelLM",
    native=NATIVE,
    facts=FACTS,
    translate=translate,
    stored=stored,
    tiny={"num_key_value_heads": 4},
)
