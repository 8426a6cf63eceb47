"""DyLLM in plain PyTorch: one sequence, explicit caches, rows by absolute position (paper, algorithms 1 to 4).

Beside keys and values, a sequence keeps per layer and position the attention's context C (before the output projection)
and the feed-forward network's output F. A full step computes and stores all of them. In a sparse step each layer

- projects keys and values of the rows A that were salient in the layer before (in the first: decoded in the step
  before); the other rows keep theirs;
- attends exactly for the rows A; any other row's context is C plus softmax(q K^T)[:, A] times what the values of A
  have changed by;
- calls a row salient if the cosine between its context and C is below tau;
- runs the feed-forward network on the salient rows; any other takes F.

With tau above 1 every row is salient, and every row attends exactly, in the first layer, too. `gate` and `partial`
leave out the one half or the other.

`generate` decodes a bidirectional model; see `tests.oracle.dyllm_blocks` for a block-causal one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.oracle import qwen3
from tests.oracle.canvas import dream_count
from tests.oracle.focus import choose, stopped
from tests.oracle.qwen3 import Config, FeedForward, Weights, attention, gated, project, rms_norm, rope

Turn = Callable[[Tensor, Tensor, float], Tensor]
"""Rotates x [n, H, D] at positions i64[n] with a base, as `rope` does."""


@dataclass(frozen=True)
class Method:
    """DyLLM's settings; tau may differ by layer."""

    tau: float | tuple[float, ...] = 0.99
    full_steps: int = 4
    period: int = 4
    gate: bool = True
    partial: bool = True
    every: int = 0
    update: bool = True  # of contexts; False: every row attends to the keys and values that there are

    def of(self, layer: int) -> float:
        return self.tau[layer] if isinstance(self.tau, tuple) else self.tau


class Memory:
    """Keys (after RoPE), values, contexts and features of one sequence: per layer [capacity, ...], NaN at first."""

    def __init__(self, config: Config, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        def empty(*shape: int) -> list[Tensor]:
            return [torch.full((capacity, *shape), torch.nan, dtype=dtype) for _ in range(config.layers)]

        self.k, self.v = (empty(config.kv_heads, config.head_dim) for _ in range(2))
        self.c, self.f = empty(config.heads, config.head_dim), empty(config.hidden)


@dataclass(frozen=True)
class Layer:
    """What a step did in one layer: positions of the rows that were projected, and of those that are salient."""

    projected: list[int]
    salient: list[int]


def cosines(a: Tensor, b: Tensor) -> list[float]:
    """Of each row of one [n, ...] with that of another; 1 if both are zero, 0 if one is."""
    x, y = a.flatten(1).double(), b.flatten(1).double()
    there, other = x.any(1), y.any(1)
    found = (x * y).sum(1) / (x.square().sum(1).sqrt() * y.square().sum(1).sqrt())
    return torch.where(there & other, found, (there == other).double()).tolist()


def forward(
    weights: Weights,
    config: Config,
    tokens: Sequence[int],
    positions: Sequence[int],
    end: int,
    memory: Memory,
    method: Method,
    changed: Sequence[int],
    full: bool,
    feed_forward: FeedForward = gated,
) -> tuple[Tensor, list[Layer]]:
    """Logits [n, vocab] of n rows of a Llama, Qwen2 or Qwen3, each of which sees all positions [0, end)."""
    h, layers = hidden(
        weights, config, tokens, positions, [end] * len(positions), memory, method, changed, full, feed_forward
    )
    return project(weights, h), layers


def hidden(
    weights: Weights,
    config: Config,
    tokens: Sequence[int],
    positions: Sequence[int],
    limits: Sequence[int],
    memory: Memory,
    method: Method,
    changed: Sequence[int],
    full: bool,
    feed_forward: FeedForward = gated,
    turn: Turn = rope,
) -> tuple[Tensor, list[Layer]]:
    """States [n, hidden] after the last norm of n rows, each of which sees the positions before its limit.

    changed: positions that were decoded in the step before; not looked at in a full step.
    """
    at, limit, rows = torch.tensor(positions), torch.tensor(limits), range(len(positions))
    salient = list(rows) if full else [i for i in rows if positions[i] in set(changed)]
    h = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    layers = []
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."

        def weight(name: str, prefix: str = prefix) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        def heads(x: Tensor, which: Tensor, name: str, prefix: str = f"{prefix}self_attn.") -> Tensor:
            """Projected, normalised and turned rows [m, heads, D] at positions `which`."""
            path = f"{prefix}{name}"
            y = linear(x, weights[f"{path}_proj.weight"], weights.get(f"{path}_proj.bias"))
            y = y.view(len(x), y.shape[1] // config.head_dim, config.head_dim)
            if f"{path}_norm.weight" in weights:
                y = rms_norm(y, weights[f"{path}_norm.weight"], config.eps)
            return y if name == "v" else turn(y, which, config.rope_theta)

        x = rms_norm(h, weight("input_layernorm"), config.eps)
        projected = salient if method.partial else list(rows)
        where = at[projected]
        q, k, v = heads(x, at, "q"), heads(x[projected], where, "k"), heads(x[projected], where, "v")
        k, v = qwen3.stored(k), qwen3.stored(v)
        dv = v - memory.v[layer][where]
        memory.k[layer][where], memory.v[layer][where] = k, v
        keys, values = memory.k[layer][: max(limits)], memory.v[layer][: max(limits)]
        assert keys.isfinite().all(), f"layer {layer} reads keys that were never written"

        tau, cached = method.of(layer), memory.c[layer][at]
        context = attention(q, keys, values, limit)
        if method.partial and method.update and not full and tau <= 1:
            others = [i for i in rows if i not in projected]
            group = config.heads // config.kv_heads
            scores = torch.einsum("nhd,lhd->nhl", q[others], keys.repeat_interleave(group, 1)) * config.head_dim**-0.5
            unseen = torch.arange(len(keys)) >= limit[others][:, None, None]
            inside = where < len(keys)
            share = scores.masked_fill(unseen, -torch.inf).softmax(-1)[:, :, where[inside]]
            change = torch.einsum("nhl,lhd->nhd", share, dv[inside].repeat_interleave(group, 1))
            context[others] = cached[others] + change
        similar = cosines(context, cached)
        salient = [i for i in rows if full or similar[i] < tau or tau > 1]
        memory.c[layer][at] = context
        layers.append(Layer(where.tolist(), at[salient].tolist()))

        h = h + linear(context.flatten(1), weight("self_attn.o_proj"))
        x = rms_norm(h, weight("post_attention_layernorm"), config.eps)
        run = salient if method.gate else list(rows)
        memory.f[layer][at[run]] = feed_forward(x[run], lambda name, weight=weight: weight(f"mlp.{name}"))
        h = h + memory.f[layer][at]
    return rms_norm(h, weights["model.norm.weight"], config.eps), layers


@dataclass(frozen=True)
class Step:
    """One forward pass; all positions are absolute and ascending."""

    full: bool
    tokens: list[int]
    positions: list[int]
    changed: list[int]  # decoded in the step before
    layers: list[Layer]
    committed: list[tuple[int, int]]  # (position, token)
    logits: Tensor


@dataclass
class Trace:
    """What `generate` did."""

    memory: Memory
    end: int
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


Watch = Callable[[Step, Memory], None]


@torch.no_grad()
def generate(
    weights: Weights,
    config: Config,
    prompt: Sequence[int],
    method: Method,
    *,
    max_new_tokens: int,
    block_length: int,
    mask_id: int,
    eos_ids: Sequence[int] = (),
    shift: int = 0,
    threshold: float | None = None,
    steps: int | None = None,
    dream_steps: int | None = None,
    watch: Watch | None = None,
) -> Trace:
    """Decode greedily, block by block; rules of committing as in `tests.oracle.canvas.generate`.

    watch: called after each step.
    """
    end = len(prompt) + max_new_tokens
    canvas = [*prompt, *[mask_id] * max_new_tokens]
    trace = Trace(Memory(config, end, weights["model.norm.weight"].dtype), end)
    start, finished = len(prompt), False
    changed: list[int] = []
    while start < end and not finished:
        stop, yields = min(start + block_length, end), list[int]()
        while mask_id in canvas[start:stop] and not finished:
            t = len(trace.steps)
            full = t < method.full_steps or (method.every > 0 and len(yields) % method.every == 0)
            wide = full or (method.period > 0 and (t - method.full_steps) % method.period == 0)
            positions = list(range(0 if wide else max(0, len(prompt) - shift), end))
            row_tokens = [canvas[p] for p in positions]
            logits, layers = forward(
                weights, config, row_tokens, positions, end, trace.memory, method, changed, full
            )  # fmt: skip
            logits[:, mask_id] = -math.inf
            found = {}
            for p, row in zip(positions, logits, strict=True):
                if start <= p + shift < stop and canvas[p + shift] == mask_id:
                    shares = row.softmax(-1)
                    sure = shares.max() if dream_steps is None else torch.xlogy(shares, shares).sum()
                    found[p + shift] = (int(row.argmax()), float(sure))
            if dream_steps is not None:
                count = dream_count(len(found), len(yields), dream_steps)
            else:
                done = sum(n > 0 for n in yields)
                count = 0 if steps is None else max(1, block_length // steps + (done < block_length % steps))
            committed = choose(found, threshold, count)
            step = Step(full, row_tokens, positions, changed, layers, committed, logits)
            trace.steps.append(step)
            if watch is not None:
                watch(step, trace.memory)
            for position, token in committed:
                canvas[position] = token
            changed = [p for p, _ in committed]
            yields.append(len(committed))
            finished = stopped(canvas, start, stop, mask_id, eos_ids)
        start = stop
    output = canvas[len(prompt) :]
    trace.tokens = output[: next((i for i, token in enumerate(output) if token in eos_ids), len(output))]
    return trace
