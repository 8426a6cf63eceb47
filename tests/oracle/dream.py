"""Dream in plain PyTorch, one sequence, every row sees every row; weights under Dream's names.

Written from the published description: the Qwen2 block, in which q, k and v have biases and o has none, fewer KV heads
than query heads, and a head that is not the embedding. A query head at a time, a row's attention at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


@dataclass(frozen=True)
class Config:
    """The shape of a Dream model."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 48
    vocab: int = 97
    rope_theta: float = 1000.0
    eps: float = 1e-6


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter of a checkpoint."""
    d, f = config.hidden, config.intermediate
    kv = d // config.heads * config.kv_heads
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (config.vocab, d),
    }
    for layer in range(config.layers):
        inside: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (d, d),
            "self_attn.q_proj.bias": (d,),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.weight": (d, d),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    return found


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn the pairs (i, i + D/2) of x [t, D] by their position times theta^(-2i/D)."""
    half = x.shape[1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = torch.arange(len(x)).double() * theta ** (-2 * i / x.shape[1])
        cos, sin = angle.cos().float(), angle.sin().float()
        out[:, i] = x[:, i] * cos - x[:, i + half] * sin
        out[:, i + half] = x[:, i + half] * cos + x[:, i] * sin
    return out


def forward(weights: Mapping[str, Tensor], config: Config, tokens: Sequence[int]) -> Tensor:
    """Logits [t, vocab] of a sequence of t tokens, as the model gives them: row i is about position i + 1."""
    size = config.hidden // config.heads
    h = weights["model.embed_tokens.weight"][torch.tensor(tokens)]

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (config.hidden,), weights[f"{name}.weight"], config.eps)

    for layer in range(config.layers):
        name = f"model.layers.{layer}"
        x = norm(h, f"{name}.input_layernorm")
        q, k, v = (
            linear(x, weights[f"{name}.self_attn.{n}_proj.weight"], weights[f"{name}.self_attn.{n}_proj.bias"])
            for n in "qkv"
        )
        mixed = []
        for head in range(config.heads):
            own = slice(head * size, (head + 1) * size)
            group = head * config.kv_heads // config.heads
            shared = slice(group * size, (group + 1) * size)
            queries, keys = rotate(q[:, own], config.rope_theta), rotate(k[:, shared], config.rope_theta)
            rows = [(keys @ query / size**0.5).softmax(0) @ v[:, shared] for query in queries]
            mixed.append(torch.stack(rows))
        h = h + linear(torch.cat(mixed, dim=1), weights[f"{name}.self_attn.o_proj.weight"])
        x = norm(h, f"{name}.post_attention_layernorm")
        gated = silu(linear(x, weights[f"{name}.mlp.gate_proj.weight"]))
        gated = gated * linear(x, weights[f"{name}.mlp.up_proj.weight"])
        h = h + linear(gated, weights[f"{name}.mlp.down_proj.weight"])
    return linear(norm(h, "model.norm"), weights["lm_head.weight"])
