"""A plain Qwen3 forward pass for one sequence, in fp32, with explicit rows and an explicit cache.

A call takes any rows of the sequence: token ids, absolute positions, and for each row a `limit`: the row
attends to exactly the positions < limit, masked or not, before it or after it. Every layer first writes the
keys and values of all its rows into the cache, then reads; so a row sees the other rows of the same call.

Weights are a dict with the names of a Hugging Face Qwen3 checkpoint. No paging, no packing, no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

Weights = Mapping[str, Tensor]

# (layer, q [n, Hq, D], k [n, Hkv, D]), both after q/k-norm and RoPE -> None, or (index of the rows that go on
# [m], their new limits [m]). Called after the layer's keys and values were written and before its attention.
Hook = Callable[[int, Tensor, Tensor], "tuple[Tensor, Tensor] | None"]
# (rows x [n, hidden], what gives the layer's matrices by name) -> [n, hidden].
FeedForward = Callable[[Tensor, Callable[[str], Tensor]], Tensor]


@dataclass(frozen=True)
class Config:
    """The shape of a Qwen3 model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float = 10_000.0
    eps: float = 1e-6


def stored(x: Tensor) -> Tensor:
    """What a cache gives back of vectors [..., D] that are written to it; tests put a rounding in its place."""
    return x


class Cache:
    """Keys (after RoPE) and values of one sequence: per layer [capacity, Hkv, D], by absolute position."""

    def __init__(self, config: Config, capacity: int, like: Tensor) -> None:
        shape = (capacity, config.kv_heads, config.head_dim)
        # NaN, so that a read of something never written cannot go unnoticed.
        self.k = [like.new_full(shape, torch.nan) for _ in range(config.layers)]
        self.v = [like.new_full(shape, torch.nan) for _ in range(config.layers)]
        self.written = [[False] * capacity for _ in range(config.layers)]

    def write(self, layer: int, positions: Sequence[int], k: Tensor, v: Tensor) -> None:
        at = torch.tensor(positions, dtype=torch.int64, device=k.device)
        self.k[layer][at], self.v[layer][at] = stored(k), stored(v)
        for position in positions:
            self.written[layer][position] = True

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [0, end); all of them must have been written in this layer."""
        missing = [p for p in range(end) if not self.written[layer][p]]
        assert not missing, f"layer {layer} reads positions {missing}, which were never written"
        return self.k[layer][:end], self.v[layer][:end]


def wide(x: Tensor) -> torch.dtype:
    """The dtype of statistics: fp32, or float64 for a model in float64."""
    return torch.promote_types(x.dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Qwen3's order: normalise in fp32, cast back, then scale."""
    xf = x.to(wide(x))
    return weight * (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [n, H, D], half-split as in Hugging Face: column i pairs with column i + D/2."""
    dim = x.shape[-1]
    inverse = 1.0 / (theta ** (torch.arange(0, dim, 2, device=x.device).float() / dim))
    angle = positions.to(wide(x))[:, None] * inverse
    angle = torch.cat((angle, angle), dim=-1)[:, None]
    rotated = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1)
    return x * angle.cos().to(x.dtype) + rotated * angle.sin().to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, limit: Tensor) -> Tensor:
    """q [n, Hq, D] over k, v [L, Hkv, D] -> [n, Hq, D]: row i sees the keys [0, limit[i])."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, k).to(wide(q)) * q.shape[-1] ** -0.5
    hidden = torch.arange(k.shape[0], device=q.device)[None, :] >= limit[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).to(v.dtype)
    return torch.einsum("hnl,lhd->nhd", weights, v)


def gated(x: Tensor, weight: Callable[[str], Tensor]) -> Tensor:
    """The feed-forward of rows x [n, hidden]; `weight` gives the matrix of a projection."""
    return linear(silu(linear(x, weight("gate_proj"))) * linear(x, weight("up_proj")), weight("down_proj"))


def forward(
    weights: Weights,
    config: Config,
    tokens: Sequence[int],
    positions: Sequence[int],
    limits: Sequence[int],
    cache: Cache,
    hook: Hook | None = None,
    feed_forward: FeedForward = gated,
) -> Tensor:
    """Run n rows (tokens, positions and limits [n]) through the model, writing `cache`.

    Returns the hidden states after the last norm, [m, hidden]: m = n, or the rows that the hook let go on.
    """
    device = weights["model.embed_tokens.weight"].device
    row_positions = torch.tensor(positions, device=device)
    limit = torch.tensor(limits, device=device)
    live = list(positions)
    h = weights["model.embed_tokens.weight"][torch.tensor(tokens, device=device)]
    for layer in range(config.layers):

        def weight(name: str, prefix: str = f"model.layers.{layer}.") -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        x = rms_norm(h, weight("input_layernorm"), config.eps)
        q = linear(x, weight("self_attn.q_proj")).view(-1, config.heads, config.head_dim)
        k = linear(x, weight("self_attn.k_proj")).view(-1, config.kv_heads, config.head_dim)
        v = linear(x, weight("self_attn.v_proj")).view(-1, config.kv_heads, config.head_dim)
        q = rope(rms_norm(q, weight("self_attn.q_norm"), config.eps), row_positions, config.rope_theta)
        k = rope(rms_norm(k, weight("self_attn.k_norm"), config.eps), row_positions, config.rope_theta)
        cache.write(layer, live, k, v)

        chosen = hook(layer, q, k) if hook is not None else None
        if chosen is not None:
            index, limit = chosen
            h, q, row_positions = h[index], q[index], row_positions[index]
            live = row_positions.tolist()

        keys, values = cache.read(layer, int(limit.max()))
        mixed = attention(q, keys, values, limit).reshape(len(live), -1)
        h = h + linear(mixed, weight("self_attn.o_proj"))
        x = rms_norm(h, weight("post_attention_layernorm"), config.eps)
        h = h + feed_forward(x, lambda name, weight=weight: weight(f"mlp.{name}"))
    return rms_norm(h, weights["model.norm.weight"], config.eps)


def project(weights: Weights, h: Tensor) -> Tensor:
    """Logits [m, vocab] in fp32 of final hidden states [m, hidden]; a tied model has no lm_head.weight."""
    head = weights.get("lm_head.weight")
    return linear(h, weights["model.embed_tokens.weight"] if head is None else head).float()
