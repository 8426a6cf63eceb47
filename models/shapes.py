"""Published shapes with random weights, built straight on a device: what speed is measured on without a download."""

from __future__ import annotations

from typing import Any

import torch

from dgraph.errors import UnknownName
from dgraph.families import Model
from dgraph.models.checkpoint import restore_buffers
from dgraph.models.native import PREFIX, Forward, native_spec

# Architecture, config keys and facts of the published checkpoints.
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sdar-8b": (
        "Qwen3",
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
        },
        {"mask_id": 151669, "eos_ids": (151645, 151643), "pad_id": 151643, "block_length": 32},
    ),
    "llada-8b": (
        "Llama",
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
        {"mask_id": 126336, "eos_ids": (126081,), "pad_id": 126081, "block_length": 32},
    ),
    "dream-7b": (
        "Qwen2",
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
        {"mask_id": 151666, "eos_ids": (151643,), "pad_id": 151643, "block_length": 32},
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
        changes: config keys to override, e.g. `num_hidden_layers=4`, or `block_length=`.

    Raises:
        UnknownName: no such shape.
    """
    import transformers

    if name not in SHAPES:
        raise UnknownName("shape", name, SHAPES)
    architecture, keys, facts = SHAPES[name]
    facts = {**facts, **{k: changes.pop(k) for k in list(changes) if k in facts}}
    config = getattr(transformers, f"{architecture}Config")(**{**keys, **changes})
    with torch.device("meta"):
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    for module in model.modules():  # `to_empty` leaves the rotary frequencies undefined; have them computed again
        for buffer_name, _ in list(module.named_buffers(recurse=False)):
            setattr(module, buffer_name, getattr(module, buffer_name).to("meta"))
    restore_buffers(model, config, torch.device(device))
    return Model(name, Forward(model), native_spec(config, name, dtype, **facts), None, PREFIX)
