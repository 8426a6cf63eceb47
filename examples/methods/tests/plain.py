"""Decoding a bidirectional model without any of dgraph: one prompt, the whole canvas, plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.testing import TinyModel

# (canvas i64[T], start, end of the block, masked positions of it, step of the response) -> logits [T, V], row p of
# which is about position p; rows that are not about masked positions of the block may hold anything.
Forward = Callable[[Tensor, int, int, int], Tensor]
# (log-probabilities of the block's masks [m, V], step of the block, their positions) -> which of them to commit.
Choose = Callable[[Tensor, int, list[int]], list[int]]
# (layer, q, k, v [H, T, D]) -> [H, T, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def decode(tiny: TinyModel, prompt: list[int], new: int, forward: Forward, choose: Choose) -> list[int]:
    """The response's ids up to a stop token."""
    spec = tiny.model.spec
    canvas = torch.tensor([*prompt, *[spec.mask_id] * new])
    number, finished = 0, False
    for start in range(len(prompt), len(canvas), spec.block_length):
        stop = min(start + spec.block_length, len(canvas))
        step = 0
        while not finished and (masked := [p for p in range(start, stop) if canvas[p] == spec.mask_id]):
            logits = forward(canvas, start, stop, number)[masked]
            logits[:, spec.mask_id] = -math.inf
            for i in choose(logits.log_softmax(-1), step, masked):
                canvas[masked[i]] = logits[i].argmax()
            step, number = step + 1, number + 1
            finished = _ended(canvas[start:stop].tolist(), spec.mask_id, spec.eos_ids)
    response = canvas[len(prompt) :].tolist()
    return response[: next((i for i, token in enumerate(response) if token in spec.eos_ids), len(response))]


def _ended(block: list[int], mask_id: int, eos_ids: tuple[int, ...]) -> bool:
    """Whether a stop token stands before every mask of the block."""
    first = next((i for i, token in enumerate(block) if token in eos_ids or token == mask_id), None)
    return first is not None and block[first] != mask_id


def above(threshold: float) -> Choose:
    """What is more confident than the threshold, or else the most confident."""

    def choose(logprobs: Tensor, step: int, masked: list[int]) -> list[int]:
        sure = logprobs.exp().amax(-1)
        return [i for i, p in enumerate(sure.tolist()) if p > threshold] or [int(sure.argmax())]

    return choose


def logits_of(tiny: TinyModel, tokens: Tensor, positions: Tensor) -> Tensor:
    """[n, V]: logits of n rows at these positions, which see each other and nothing else."""
    return tiny.model.module(tokens[None], positions[None])[0]


def about(logits: Tensor, positions: Tensor, width: int, shift: int) -> Tensor:
    """[width, V]: logits of rows at these positions, in the places of what they predict."""
    placed = logits.new_zeros(width + 1, logits.shape[1])
    placed[positions + shift] = logits
    return placed[:width]


@torch.no_grad()
def llama(tiny: TinyModel, tokens: Tensor, attend: Attend, positions: Tensor | None = None) -> Tensor:
    """[T, V]: a Llama or Qwen2 forward with another attention; positions i64[T], in order if not given."""
    weights = {name.removeprefix("model."): w for name, w in tiny.model.module.named_parameters()}
    weights = {name.removeprefix("model."): w for name, w in weights.items()}
    spec, config = tiny.model.spec, tiny.model.module.model.config
    theta = config.rope_parameters["rope_theta"]
    positions = torch.arange(len(tokens)) if positions is None else positions
    angle = positions[:, None] * theta ** -(torch.arange(0, spec.head_dim, 2) / spec.head_dim)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config.rms_norm_eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    h = weights["embed_tokens.weight"][tokens]
    for layer in range(spec.layers):
        at = f"layers.{layer}."
        x = norm(h, f"{at}input_layernorm")
        q, k, v = (
            linear(x, f"{at}self_attn.{n}_proj").unflatten(1, (-1, spec.head_dim)).transpose(0, 1) for n in "qkv"
        )
        k, v = (y.repeat_interleave(spec.heads // spec.kv_heads, 0) for y in (k, v))
        mixed = attend(layer, rotated(q), rotated(k), v).transpose(0, 1).flatten(1)
        h = h + linear(mixed, f"{at}self_attn.o_proj")
        x = norm(h, f"{at}post_attention_layernorm")
        h = h + linear(F.silu(linear(x, f"{at}mlp.gate_proj")) * linear(x, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
    return linear(norm(h, "norm"), "lm_head")
