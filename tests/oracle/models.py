"""Small random Qwen3 models whose decode is not trivial, and the same weights as a transformers model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.oracle.qwen3 import Config, Weights


def tiny_config(
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    vocab: int = 97,
) -> Config:
    """A Qwen3 of a few ten thousand parameters. By convention the last id of the vocabulary is the mask."""
    return Config(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab)


def mask_id(config: Config) -> int:
    return config.vocab - 1


def random_weights(config: Config, seed: int) -> dict[str, Tensor]:
    """fp32 weights under Hugging Face names, for a decode that is not trivial.

    A block starts as equal [MASK] embeddings: only a sharp, position-dependent attention (large q/k-norm
    weights, a small mask embedding) tells its rows apart. The head is scaled so that top-1 probabilities
    spread from about 0.3 to 0.99: a threshold of 0.5 to 0.9 commits one row in some steps and many in
    others. The head's row of the mask is zero: with logits of this spread the mask is never the argmax.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    def norm(size: int, scale: float = 1.0) -> Tensor:
        return scale * (1.0 + normal(size, std=0.1))

    d, ff = config.hidden, config.intermediate
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    weights = {"model.embed_tokens.weight": normal(config.vocab, d, std=1.0)}
    weights["model.embed_tokens.weight"][mask_id(config)] *= 0.2
    for layer in range(config.layers):
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}input_layernorm.weight": norm(d),
            f"{name}self_attn.q_proj.weight": normal(query, d, std=d**-0.5),
            f"{name}self_attn.k_proj.weight": normal(key, d, std=d**-0.5),
            f"{name}self_attn.v_proj.weight": normal(key, d, std=d**-0.5),
            f"{name}self_attn.o_proj.weight": normal(d, query, std=2.0 * query**-0.5),
            f"{name}self_attn.q_norm.weight": norm(config.head_dim, 2.0),
            f"{name}self_attn.k_norm.weight": norm(config.head_dim, 2.0),
            f"{name}post_attention_layernorm.weight": norm(d),
            f"{name}mlp.gate_proj.weight": normal(ff, d, std=d**-0.5),
            f"{name}mlp.up_proj.weight": normal(ff, d, std=d**-0.5),
            f"{name}mlp.down_proj.weight": normal(d, ff, std=2.0 * ff**-0.5),
        }
    weights["model.norm.weight"] = norm(d)
    weights["lm_head.weight"] = normal(config.vocab, d, std=5.0 / math.sqrt(d))
    weights["lm_head.weight"][mask_id(config)] = 0.0
    return weights


def to_transformers(config: Config, weights: Weights, attention: str = "eager") -> Any:
    """A transformers.Qwen3ForCausalLM (fp32, eval) that holds copies of `weights`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hf = Qwen3Config(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.eps,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings="lm_head.weight" not in weights,
        attention_bias=False,
        use_cache=False,
        attn_implementation=attention,  # type: ignore[call-arg]
    )
    model = Qwen3ForCausalLM(hf).eval()
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")
    return model
