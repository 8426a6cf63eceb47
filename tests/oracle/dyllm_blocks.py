"""DyLLM in plain PyTorch on a block-causal model, as the forward pass of `tests.oracle.focus.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracle import llada2
from tests.oracle.dyllm import Layer, Memory, Method, Turn, hidden
from tests.oracle.qwen3 import Cache, Config, FeedForward, Weights, gated, rope


@dataclass(frozen=True)
class Pass:
    """One forward pass of a sequence."""

    full: bool
    positions: list[int]
    limits: list[int]
    layers: list[Layer]


class Blocks:
    """A forward pass with what DyLLM keeps between two of them.

    The first `full_steps` passes over a block compute everything (the one over the prompt's whole blocks, too), and in
    the first rides the commit of the block before. After them the rows that carry another token than in their last
    pass have changed.

    Args:
        size: columns of a block.

    Attributes:
        passes: over the sequence so far; a new cache begins a new sequence.
        memory: keys and values are those of the cache.
        watch: called after each pass.
    """

    passes: list[Pass]
    memory: Memory

    def __init__(self, method: Method, size: int, feed_forward: FeedForward = gated, turn: Turn = rope) -> None:
        self.method, self.size, self.feed_forward, self.turn = method, size, feed_forward, turn
        self.watch: Callable[[Pass, Memory], None] = lambda step, memory: None
        self.cache: Cache | None = None

    def __call__(
        self,
        weights: Weights,
        config: Config,
        tokens: Sequence[int],
        positions: Sequence[int],
        limits: Sequence[int],
        cache: Cache,
        hook: None = None,
    ) -> Tensor:
        assert hook is None, "nothing is evicted here"
        if cache is not self.cache:
            self.cache, self.memory, self.passes = cache, Memory(config, len(cache.k[0])), []
            self.memory.k, self.memory.v = cache.k, cache.v
            self.forwarded, self.counts = dict[int, int](), dict[int, int]()
        block, method = positions[-1] // self.size, self.method
        count = self.counts.get(block, 0)
        full = count < method.full_steps or (method.every > 0 and count % method.every == 0)
        assert full or positions[0] // self.size == block, "a commit rides in a full step"
        changed = [p for p, token in zip(positions, tokens, strict=True) if self.forwarded.get(p) != token]
        h, layers = hidden(
            weights, config, tokens, positions, limits, self.memory, method, changed, full, self.feed_forward, self.turn
        )
        for layer, found in enumerate(layers):
            for p in found.projected:
                cache.written[layer][p] = True
        self.forwarded.update(zip(positions, tokens, strict=True))
        self.counts[block] = count + 1
        self.passes.append(Pass(full, list(positions), list(limits), layers))
        self.watch(self.passes[-1], self.memory)
        return h


def as_qwen3(weights: Weights, config: llada2.Config) -> dict[str, Tensor]:
    """A LLaDA2 model's weights under the names of a Qwen3's, queries, keys and values apart."""
    sizes = [n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads)]
    names = {
        "word_embeddings": "embed_tokens",
        "attention.query_layernorm": "self_attn.q_norm",
        "attention.key_layernorm": "self_attn.k_norm",
        "attention.dense": "self_attn.o_proj",
        "gate.expert_bias": "gate.expert_bias.weight",
    }
    found = {}
    for name, value in weights.items():
        if "query_key_value" in name:
            for part, rows in zip("qkv", value.split(sizes), strict=True):
                found[name.replace("attention.query_key_value", f"self_attn.{part}_proj")] = rows
            continue
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = value
    return found


def llada2_parts(config: llada2.Config) -> tuple[FeedForward, Turn]:
    """The feed-forward network of a layer under `as_qwen3`'s names, and the rotation of the first columns of a head."""

    def feed_forward(x: Tensor, weight: Callable[[str], Tensor]) -> Tensor:
        try:
            weight("gate")
        except KeyError:
            return gated(x, weight)
        bias = weight("gate.expert_bias")
        routed = llada2.mixture(x, weight, lambda logits: llada2.sigmoid_routing(logits, bias, config))
        return routed + gated(x, lambda name: weight(f"shared_experts.{name}"))

    def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
        rotary = int(config.head_dim * config.rotary)
        return torch.cat((rope(x[..., :rotary], positions, theta), x[..., rotary:]), dim=-1)

    return feed_forward, turn
