"""Models of every family with few random weights, for tests: small enough for a laptop, and not trivial to decode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 97
MASK, EOS = VOCAB - 1, VOCAB - 2
BLOCK = 8

KEYS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
"""Config keys that tiny models share; a family changes the keys that it must."""
FACTS: dict[str, Any] = {"mask_id": MASK, "eos_ids": (EOS,), "pad_id": EOS, "block_length": BLOCK}
"""Facts of `ModelSpec` of every tiny model."""


def build_tiny(build: Callable[[Mapping[str, Any], str], Any], keys: Mapping[str, Any], seed: int) -> Any:
    """A model of `KEYS` and a family's own, in fp32 on the CPU; `build` makes it on the meta device."""
    from dgraph.models.checkpoint import make_hollow

    model = build({**KEYS, **keys}, "a tiny model")
    make_hollow(model, torch.float32, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data = torch.empty(parameter.shape)
    draw_weights(model, seed)
    model.tie_weights()
    return model


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Draw weights for a decode that is not trivial.

    A block starts as equal mask embeddings: only a sharp, position-dependent attention and a small mask embedding tell
    its rows apart. The head is scaled so that the highest probabilities spread from about 0.3 to 0.99. A threshold of
    0.5 to 0.9 then commits one row in some steps and many in others. The head's row of the mask is zero: with logits of
    this spread the mask is never predicted.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    for name, parameter in model.named_parameters():
        *_, owner, kind = name.split(".")
        if kind == "bias":
            parameter.copy_(normal(parameter, 0.3))
        elif parameter.dim() == 1:
            sharp = 2.0 if owner in ("q_norm", "k_norm", "query_layernorm", "key_layernorm") else 1.0
            parameter.copy_(sharp * (1.0 + normal(parameter, 0.1)))
        elif "embed" in owner:
            parameter.copy_(normal(parameter, 1.0))
            parameter[MASK] *= 0.2
        elif owner == "lm_head":
            parameter.copy_(normal(parameter, 5.0 * parameter.shape[-1] ** -0.5))
            parameter[MASK] = 0.0
        else:
            strong = owner in ("q_proj", "k_proj", "o_proj", "dense", "down_proj") or kind == "down_proj"
            parameter.copy_(normal(parameter, (2.0 if strong else 1.0) * parameter.shape[-1] ** -0.5))
