"""LLaDA in plain PyTorch, one sequence, every row sees every row; weights under LLaDA's own names.

Written from the published description: the Llama block with SwiGLU in two matrices (`ff_proj` through SiLU, times
`up_proj`), RMSNorm before attention and before the feed-forward, rotary positions over the two halves of a head, no
bias, and a head that is not the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Config:
    """The shape of a LLaDA model. `rows` of the embedding may be more than the vocabulary has ids."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    intermediate: int = 48
    rows: int = 97
    rope_theta: float = 500.0
    eps: float = 1e-5


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter of a checkpoint."""
    d, f = config.hidden, config.intermediate
    found: dict[str, tuple[int, ...]] = {"wte": (config.rows, d), "ln_f": (d,), "ff_out": (config.rows, d)}
    for layer in range(config.layers):
        inside = dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), (d, d))
        inside |= {"attn_norm": (d,), "ff_norm": (d,), "ff_proj": (f, d), "up_proj": (f, d), "ff_out": (d, f)}
        found |= {f"blocks.{layer}.{name}": shape for name, shape in inside.items()}
    return {f"model.transformer.{name}.weight": shape for name, shape in found.items()}


def forward(weights: Mapping[str, Tensor], config: Config, tokens: Sequence[int]) -> Tensor:
    """Logits [t, rows] of a sequence of t tokens."""

    def of(name: str) -> Tensor:
        return weights[f"model.transformer.{name}.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt() * of(name)

    t, size = len(tokens), config.hidden // config.heads
    turns = torch.outer(torch.arange(t).double(), config.rope_theta ** (-torch.arange(size // 2).double() * 2 / size))
    rotation = torch.polar(torch.ones_like(turns), turns).to(torch.complex64)

    def heads(x: Tensor, rotate: bool) -> Tensor:
        x = x.view(t, config.heads, size).transpose(0, 1)
        if not rotate:
            return x
        z = torch.complex(x[..., : size // 2].contiguous(), x[..., size // 2 :].contiguous()) * rotation
        return torch.cat((z.real, z.imag), dim=-1)

    stream = of("wte")[torch.tensor(tokens)]
    for layer in range(config.layers):
        block = f"blocks.{layer}."
        x = norm(stream, f"{block}attn_norm")
        q, k, v = (heads(x @ of(f"{block}{n}_proj").T, rotate=n != "v") for n in "qkv")
        weight = (q @ k.transpose(1, 2) / size**0.5).softmax(-1)
        stream = stream + (weight @ v).transpose(0, 1).reshape(t, config.hidden) @ of(f"{block}attn_out").T
        x = norm(stream, f"{block}ff_norm")
        gate = x @ of(f"{block}ff_proj").T
        stream = stream + (gate * gate.sigmoid() * (x @ of(f"{block}up_proj").T)) @ of(f"{block}ff_out").T
    return norm(stream, "ln_f") @ of("ff_out").T
