"""The tiny models in plain PyTorch: Qwen3's parameter names, with the attention mask given from outside.

With SDAR's RMSNorm on each head of q and k a state dict loads into transformers' `Qwen3ForCausalLM` as it is, without
it (LLaDA) into `LlamaForCausalLM`. Training needs this file because rows hold several documents, and for SDAR a clean
and a noisy copy of each. Their mask is neither causal nor full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Mask = Tensor | BlockMask
"""Attention mask: bool [R, 1, T, keys] for the dense kernel, or a BlockMask for FlexAttention."""


@dataclass(frozen=True)
class TinyConfig:
    """Shape of the model; the names are those of transformers' Qwen3Config.

    family: "sdar" normalises q and k and denoises block by block, each seeing the blocks before it; "llada" does not
    normalise them, and every row sees every row.
    """

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024
    family: Literal["sdar", "llada"] = "sdar"


SDAR = TinyConfig()
LLADA = TinyConfig(num_key_value_heads=8, family="llada")
SHAPES = {shape.family: shape for shape in (SDAR, LLADA)}
"""The shapes of the embedded models."""


class KeyValueCache:
    """Post-RoPE keys and values of every position so far, [layers, sequences, positions, KV heads, D]."""

    def __init__(self, config: TinyConfig, sequences: int, positions: int, like: Tensor) -> None:
        shape = (config.num_hidden_layers, sequences, positions, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.sequences = torch.arange(sequences, device=like.device)
        self.length = positions

    def select(self, sequences: Tensor, length: int) -> KeyValueCache:
        """A view for the next forward: rows of these sequences (i64 [R]), keys up to position `length`."""
        view = object.__new__(KeyValueCache)
        view.keys, view.values, view.sequences, view.length = self.keys, self.values, sequences, length
        return view

    def update(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [R, H, T, D] at positions i64 [R, T]; return all keys and values, [R, H, length, D]."""
        at = (layer, self.sequences[:, None], positions)
        self.keys[at], self.values[at] = k.transpose(1, 2), v.transpose(1, 2)
        chosen = (layer, self.sequences, slice(0, self.length))
        return self.keys[chosen].transpose(1, 2), self.values[chosen].transpose(1, 2)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [R, H, T, D] by cos, sin [R, 1, T, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    def __init__(self, config: TinyConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        query, key = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        normed = config.family == "sdar"
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: KeyValueCache | None, positions: Tensor
    ) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin).to(v.dtype)
        if cache is not None:
            k, v = cache.update(self.layer, positions, k, v)
        if isinstance(mask, BlockMask):
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            assert isinstance(out, Tensor)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: TinyConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, cache: KeyValueCache | None, positions: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyModel(nn.Module):
    """Decoder whose caller gives the attention mask. Initial weights: normal, std 0.02, smaller before a residual."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.num_hidden_layers) if last else 0.02)

    def hidden(self, input_ids: Tensor, positions: Tensor, mask: Mask, cache: KeyValueCache | None = None) -> Tensor:
        """Final normed hidden states [R, T, hidden] of input_ids and positions, both i64 [R, T]."""
        x = self.model.embed_tokens(input_ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = (table.to(x.dtype) for table in self._rope(positions))
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask, cache, positions)
        return self.model.norm(x)

    def forward(self, input_ids: Tensor, positions: Tensor, mask: Mask, cache: KeyValueCache | None = None) -> Tensor:
        """Logits [R, T, vocabulary]; row i is the prediction of row i's own token once trained by diffusion."""
        return self.lm_head(self.hidden(input_ids, positions, mask, cache))

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device).float() / self.config.head_dim
        angle = positions[:, None, :, None].float() / self.config.rope_theta**half
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()
