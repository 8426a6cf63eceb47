"""Published shapes with random weights, built straight on a device: what speed is measured on without a download."""

from __future__ import annotations

from typing import Any

import torch

from dgraph.errors import UnknownName
from dgraph.families import Model
from dgraph.models import dream, llada, llada2, sdar, sdar_moe
from dgraph.models.moe import MoEFamily, materialise
from dgraph.models.remote_code import RemoteCodeFamily

# Family, which builds the model and knows its facts, and the config's keys, of the published checkpoints.
SHAPES: dict[str, tuple[RemoteCodeFamily | MoEFamily, dict[str, Any]]] = {
    "sdar-8b": (
        sdar.family,
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "block_size": 32,
        },
    ),
    "sdar-30b-a3b": (
        sdar_moe.family,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "block_size": 32,
        },
    ),
    "llada2-mini": (
        llada2.family,
        {
            "vocab_size": 157184,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 32768,
        },
    ),
    "llada-8b": (
        llada.family,
        {
            "vocab_size": 126464,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "dream-7b": (
        dream.family,
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
}


def random_model(
    name: str, device: str | torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any
) -> Model:
    """A model of a published shape with random weights.

    Args:
        name: a key of `SHAPES`.
        device, dtype: where and as what the weights are made; nothing passes through the host.
        seed: of the weights.
        changes: config keys to override, e.g. `num_hidden_layers=4`, or facts of the family, e.g. `block_length=`.
            A shape of LLaDA or Dream is that of a bidirectional model; to decode it in blocks whose keys and values
            are kept, as SDAR is, give `attention="block_causal", logit_shift=0`.

    Raises:
        UnknownName: no such shape.
        CheckpointError: `changes` that do not make a model.
    """
    if name not in SHAPES:
        raise UnknownName("shape", name, SHAPES)
    family, keys = SHAPES[name]
    facts = {k: v for k, v in family.facts.items() if v is not None}
    facts |= {k: changes.pop(k) for k in list(changes) if k in family.facts}
    source = f"the shape {name}"
    model = materialise(family.build({**keys, **changes}, source), torch.device(device), dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return family.model(name, model, {**keys, **changes}, dtype, **facts)
