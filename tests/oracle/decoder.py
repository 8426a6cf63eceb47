"""Llama, Qwen2 and Qwen3 as diffusion models in plain PyTorch: one sequence, no cache, all rows in every step.

Weights are a dict with the names of a checkpoint. Biases and norms of queries and keys are read where there are some,
so the names alone say which of the three it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


@dataclass(frozen=True)
class Config:
    """The shape of a model, and which of the three it is."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    intermediate: int = 48
    vocab: int = 97
    theta: float = 1000.0
    eps: float = 1e-6
    bias: bool = False
    qk_norm: bool = False
    tied: bool = False


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter of a checkpoint."""
    d, f = config.hidden, config.intermediate
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, d), "model.norm.weight": (d,)}
    if not config.tied:
        found["lm_head.weight"] = (config.vocab, d)
    for layer in range(config.layers):
        inside: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (query, d),
            "self_attn.k_proj.weight": (key, d),
            "self_attn.v_proj.weight": (key, d),
            "self_attn.o_proj.weight": (d, query),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        if config.bias:
            inside |= {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", query), ("k", key), ("v", key))}
        if config.qk_norm:
            inside |= {f"self_attn.{n}_norm.weight": (config.head_dim,) for n in "qk"}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    return found


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Vectors [..., D] over their root mean square."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """Heads [t, H, D], whose pairs (i, i + D/2) turn by their position times theta^(-2i/D)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].double(), x[..., half:].double()
    rates = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(len(x)).double()[:, None, None] * rates
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1).to(x)


def forward(weights: Mapping[str, Tensor], config: Config, tokens: Sequence[int], block: int | None = None) -> Tensor:
    """Logits [t, vocab] of a sequence of t tokens; a row sees all of it, or its own block and earlier ones."""
    count, size = len(tokens), config.head_dim
    ends = [count if block is None else (i // block + 1) * block for i in range(count)]
    blind = torch.arange(count) >= torch.tensor(ends)[:, None]
    h = weights["model.embed_tokens.weight"][torch.tensor(list(tokens))]
    for layer in range(config.layers):
        name = f"model.layers.{layer}."

        def part(x: Tensor, which: str, name: str = name) -> Tensor:
            return linear(x, weights[f"{name}{which}.weight"], weights.get(f"{name}{which}.bias"))

        x = norm(h, weights[f"{name}input_layernorm.weight"], config.eps)
        q, k, v = (part(x, f"self_attn.{n}_proj").view(count, -1, size) for n in "qkv")
        if config.qk_norm:
            q, k = (norm(z, weights[f"{name}self_attn.{n}_norm.weight"], config.eps) for z, n in ((q, "q"), (k, "k")))
        q, k = turned(q, config.theta), turned(k, config.theta)
        mixed = []
        for head in range(config.heads):
            group = head * config.kv_heads // config.heads
            scores = q[:, head] @ k[:, group].T / math.sqrt(size)
            mixed.append(scores.masked_fill(blind, -torch.inf).softmax(-1) @ v[:, group])
        h = h + part(torch.cat(mixed, dim=1), "self_attn.o_proj")
        x = norm(h, weights[f"{name}post_attention_layernorm.weight"], config.eps)
        h = h + part(silu(part(x, "mlp.gate_proj")) * part(x, "mlp.up_proj"), "mlp.down_proj")
    head_of = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return linear(norm(h, weights["model.norm.weight"], config.eps), head_of)


def decode(
    weights: Mapping[str, Tensor],
    config: Config,
    prompt: Sequence[int],
    new: int,
    block: int,
    mask: int,
    threshold: float,
    causal: bool,
) -> tuple[list[int], int]:
    """Tokens of a response that ends at the end of a block, and the number of steps that committed some.

    A step commits the masks of the first open block whose confidence is at least the threshold, or the surest one.
    Blocks begin at multiples of their length if attention is causal over blocks, else after the prompt.
    """
    canvas, steps = [*prompt, *[mask] * new], 0
    while mask in canvas:
        first = canvas.index(mask)
        begin = first // block * block if causal else len(prompt) + (first - len(prompt)) // block * block
        logits = forward(weights, config, canvas, block if causal else None)
        logits[:, mask] = -torch.inf
        sure, token = logits.softmax(-1).max(-1)
        open_ = [i for i in range(begin, min(begin + block, len(canvas))) if canvas[i] == mask]
        chosen = [i for i in open_ if sure[i] >= threshold] or [max(open_, key=lambda i: float(sure[i]))]
        for i in chosen:
            canvas[i] = int(token[i])
        steps += 1
    return canvas[len(prompt) :], steps
