"""The original loop of a bidirectional model: a forward of the whole canvas per step, no cache, graph or compiler.

Written as LLaDA's published `generate` computes it: all rows through all layers in bf16 with fused SDPA, logits of all
rows, their argmax and softmax, then the most confident masks of the block are committed. Nothing in it reads a value on
the host, so it is not slowed down by that either.

Beside the weights it holds at its peak, for b sequences of t tokens and a vocabulary of V: the logits [b, t, V] in the
dtype of the model, their softmax of the same size, and ids. Inside a layer it holds the hidden states, that layer's
queries, keys and values, what attention gives, and gate, up and their product [b, t, intermediate]; no keys and values
of another layer.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.families import Model


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE with the halves of a head as pairs; x [b, heads, t, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


class FullForward:
    """The forward of a Llama or Qwen2 shaped model over ids i64[b, t] -> logits [b, t, V]."""

    def __init__(self, model: Model):
        inner = model.module.get_submodule("model")
        self.body, self.head, self.spec = inner.get_submodule("model"), inner.get_submodule("lm_head"), model.spec

    def __call__(self, ids: Tensor) -> Tensor:
        spec, body = self.spec, self.body
        b, t = ids.shape
        x = body.embed_tokens(ids)  # type: ignore[operator]
        positions = torch.arange(t, device=ids.device)[None]
        cos, sin = (part[:, None].to(x.dtype) for part in body.rotary_emb(x, positions))  # type: ignore[operator]
        for layer in body.layers:  # type: ignore[union-attr]
            attention = layer.self_attn
            y = layer.input_layernorm(x)
            q, k, v = (
                project(y).view(b, t, -1, spec.head_dim).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            grouped = spec.heads != spec.kv_heads
            y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, enable_gqa=grouped)
            x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(body.norm(x))  # type: ignore[operator]


@torch.no_grad()
def seconds_per_step(model: Model, ids: Tensor, response: int, steps: int, warm: int = 2) -> float:
    """Median seconds of a step of the loop.

    Args:
        ids: i64[b, t], prompts and mask tokens.
        response: rows at the end that are to be decoded.
        steps, warm: timed steps, and steps before them.
    """
    forward, times = FullForward(model), []
    for step in range(warm + steps):
        _wait(ids)
        begin = time.perf_counter()
        logits = forward(ids)
        token = logits.argmax(-1)
        confidence = logits.softmax(-1).gather(-1, token[..., None])[..., 0]
        masked = ids == model.spec.mask_id
        masked[:, :-response] = False
        best = torch.where(masked, confidence.float(), -1.0).argmax(1, keepdim=True)
        ids = ids.scatter(1, best, token.gather(1, best))
        _wait(ids)
        if step >= warm:
            times.append(time.perf_counter() - begin)
        del logits
    return sorted(times)[len(times) // 2]


def reset_peak() -> None:
    """Count the peak of the device's memory from now on."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The most memory that tensors had at a time since `reset_peak`, weights and CUDA graphs included; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
