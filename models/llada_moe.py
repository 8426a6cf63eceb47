"""LLaDA-MoE: masked diffusion with a mixture of experts (inclusionAI/LLaDA-MoE-7B-A1B-{Base,Instruct}).

Its code follows OLMoE, but for norms of each head's queries and keys. Its computation and its parameter names are those
of a Qwen3-MoE whose weights of experts are the softmax itself. These are never divided by the sum of the chosen ones
(whatever `norm_topk_prob` says). Layers are dense where `moe_layer_freq` is 0. Every row sees every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgraph.errors import CheckpointError
from dgraph.models import sdar_moe
from dgraph.models.moe import MoEFamily
from dgraph.models.native import PREFIX
from dgraph.models.remote_code import require, require_size
from dgraph.models.sdar_moe import NATIVE, MoEForward

FACTS: dict[str, Any] = {
    "mask_id": 156895,
    "eos_ids": (156892,),
    "pad_id": 156892,
    "block_length": 32,
    "attention": "bidirectional",
    "logit_shift": 0,
}

# Settings of its code, with the values that are Qwen3-MoE's; None where a missing key means the same.
_REPRESENTABLE: dict[str, tuple[Any, ...]] = {
    "qk_layernorm": (True,),
    "moe_router_score_function": ("softmax", None),
    "moe_router_enable_expert_bias": (False, None),
    "shared_expert_intermediate_size": (None, 0),
    "partial_rotary_factor": (1, None),
    "routed_scaling_factor": (1, None),
    "attention_bias": (False, None),
    "clip_qkv": (None,),
    "rope_scaling": (None,),
}


def translate(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Its config in the keys of Qwen3-MoE.

    Raises:
        CheckpointError: a key is missing, or has a value that Qwen3-MoE cannot represent.
    """
    for key, allowed in _REPRESENTABLE.items():
        require(keys, key, allowed, NATIVE)
    needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "expert_intermediate_size")
    if wrong := [key for key in needed if type(keys.get(key)) is not int]:
        raise CheckpointError(f"{', '.join(wrong)} must be given, a number each.")
    for key in (*needed, "dense_intermediate_size", "num_key_value_heads", "num_experts", "num_experts_per_tok"):
        require_size(keys, key)
    layers, width = keys["num_hidden_layers"], keys["expert_intermediate_size"]
    routed = keys.get("moe_layer_freq") or [1] * layers
    if not isinstance(routed, list):
        raise CheckpointError(f"moe_layer_freq is {routed!r}, expected a list with an entry for each layer.")
    if len(routed) != layers:
        raise CheckpointError(f"moe_layer_freq must have an entry for each of {layers} layers, got {len(routed)}.")
    return {
        **keys,
        "head_dim": keys["hidden_size"] // keys["num_attention_heads"],
        "num_key_value_heads": keys.get("num_key_value_heads") or keys["num_attention_heads"],
        "intermediate_size": keys.get("dense_intermediate_size") or width,
        "moe_intermediate_size": width,
        "mlp_only_layers": [layer for layer, kind in enumerate(routed) if kind == 0],
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    }


def build(keys: Mapping[str, Any], source: str) -> Any:
    """A Qwen3-MoE on the meta device whose experts can be captured.

    Raises:
        CheckpointError: the config does not describe one.
    """
    try:
        native = translate(keys)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    return sdar_moe.build(native, source)


family = MoEFamily(
    name="llada_moe",
    summary="LLaDA-MoE: masked diffusion with a mixture of experts",
    classes=("LLaDAMoEModelLM",),
    facts=FACTS,
    build=build,
    wrap=MoEForward,
    prefix=PREFIX,
    tiny={
        "expert_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "qk_layernorm": True,
    },
)
