"""Decoding a bidirectional model over a canvas, with the published caches: one sequence, plain loops, dense tensors.

The response is decoded block by block after the prompt; the canvas has mask tokens from the current block's masks on.
Every row sees the whole canvas, so every decoded token changes every key. The methods differ in the rows that a step
forwards; all others are seen with the keys and values that they were last given:

- vanilla: all rows, always.
- Fast-dLLM: all rows in a block's first step, then the block (dual) or the block and all after it (prefix).
- dKV-Cache (decode): with D_i the positions decoded when step i of the block is over, step i forwards all rows but
  D_(i-2), so that a token is cached one step after it was decoded; all rows in steps 0, 1 and every N-th.
- dKV-Cache (greedy): the order in which a block is decoded is drawn before the block, so that the rows that a step
  decodes are known before it: these, those decoded in the step before, and around each of the former, one after the
  other, the W nearest rows of masks that are not among the rows yet, the left one first; all rows in every N-th step.
- vicinity (dInfer): all rows in the first steps of the response and in a block's first step, then the block and so many
  rows before it and after it.
- block cache (FOCUS, 4.3): of the rows that a step would forward, decoded ones are skipped once they were forwarded as
  decoded ("dc"), and, but for the last of the block, once their right neighbour was, too ("dc+").
- FOCUS: rows as in Fast-dLLM's dual cache; in steps that do not forward all rows, masked rows are evicted.

If the model's logits are shifted (Dream), row p predicts position p + 1: a row is masked if what it predicts is, and
the row before the block goes with the block. FOCUS then evicts no row that holds a token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.oracle.focus import BlockCache, choose, stopped
from tests.oracle.qwen3 import Cache, Config, Hook, Weights, attention, gated, rms_norm, rope
from tests.oracle.scoring import Eviction, EvictRows

_LLADA = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def llada_names(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """LLaDA's names of a Llama's weights."""
    names = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
    for layer in range(layers):
        names |= {f"model.layers.{layer}.{mine}": f"blocks.{layer}.{its}" for mine, its in _LLADA.items()}
    return {f"model.transformer.{its}.weight": weights[f"{mine}.weight"] for mine, its in names.items()}


def forward(
    weights: Weights,
    config: Config,
    tokens: Sequence[int],
    positions: Sequence[int],
    end: int,
    cache: Cache,
    hook: Hook | None = None,
) -> Tensor:
    """Logits [m, vocab] of n rows of a Llama or Qwen2, each of which sees all positions [0, end).

    As in `qwen3.forward`, every layer writes the keys and values of its rows into the cache, then reads, and the hook
    may let m rows go on. What limits it gives them is not looked at: the rest of the canvas has keys of earlier steps.
    """
    at, live = torch.tensor(positions), list(positions)
    h = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    for layer in range(config.layers):

        def project(x: Tensor, name: str, prefix: str = f"model.layers.{layer}.self_attn.") -> Tensor:
            return linear(x, weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

        def weight(name: str, prefix: str = f"model.layers.{layer}.") -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        x = rms_norm(h, weight("input_layernorm"), config.eps)
        q, k, v = (project(x, f"{name}_proj").view(len(live), -1, config.head_dim) for name in "qkv")
        q, k = rope(q, at, config.rope_theta), rope(k, at, config.rope_theta)
        cache.write(layer, live, k, v)
        if (chosen := hook(layer, q, k) if hook is not None else None) is not None:
            h, q, at = h[chosen[0]], q[chosen[0]], at[chosen[0]]
            live = at.tolist()
        keys, values = cache.read(layer, end)
        mixed = attention(q, keys, values, torch.full((len(live),), end))
        h = h + project(mixed.flatten(1), "o_proj")
        x = rms_norm(h, weight("post_attention_layernorm"), config.eps)
        h = h + gated(x, lambda name, weight=weight: weight(f"mlp.{name}"))
    return linear(rms_norm(h, weights["model.norm.weight"], config.eps), weights["lm_head.weight"])


@dataclass(frozen=True)
class Moment:
    """Where a sequence stands before a step. The block is [start, stop), the canvas [0, end)."""

    start: int
    stop: int
    end: int
    size: int  # of a block; the last one may be cut short by the end
    shift: int
    number: int  # steps of the response so far
    decoded: list[set[int]]  # before each step of the block, the coming one last; the prompt is decoded
    coming: list[int]  # positions that the step will decode, in order, where that is known

    @property
    def step(self) -> int:
        """Of the block, from 0."""
        return len(self.decoded) - 1

    def clamp(self, begin: int, end: int) -> set[int]:
        return set(range(max(0, begin), min(self.end, end)))

    def predicting(self) -> set[int]:
        """Rows whose prediction is wanted."""
        return {p - self.shift for p in range(self.start, self.stop) if p not in self.decoded[-1]}

    def skipped(self, rule: BlockCache) -> set[int]:
        """Rows whose keys are those of a decoded token, with a decoded neighbour if the rule asks for one.

        The coming step finds the keys of the step before, which saw what had been decoded before it.
        """
        seen = self.decoded[-2]
        if rule == "off":
            return set()
        return {p for p in seen if rule == "dc" or p == self.stop - 1 or p + 1 in seen}


# The rows of a step; None: all, and nothing is evicted.
Method = Callable[[Moment], "set[int] | None"]


def vanilla(moment: Moment) -> set[int] | None:
    return None


@functools.cache
def fast_dllm(cache: str = "dual", every: int = 0, block_cache: BlockCache = "off", front: bool = True) -> Method:
    """front: the row that predicts the block's first position goes with the block."""

    def rows(moment: Moment) -> set[int] | None:
        if moment.step == 0 or (every and moment.step % every == 0):
            return None
        last = moment.stop if cache == "dual" else moment.end
        region = moment.clamp(moment.start - moment.shift * front, last)
        return (region - moment.skipped(block_cache)) | moment.predicting()

    return rows


def dkv_cache(every: int) -> Method:
    def rows(moment: Moment) -> set[int] | None:
        if moment.step <= 1 or (every and moment.step % every == 0):
            return None
        after_two_steps_ago = moment.decoded[moment.step - 1]
        return (moment.clamp(0, moment.end) - after_two_steps_ago) | moment.predicting()

    return rows


def dkv_greedy(every: int, window: int) -> Method:
    def rows(moment: Moment) -> set[int] | None:
        if moment.step == 0 or (every and moment.step % every == 0):
            return None
        chosen = moment.decoded[-1] - moment.decoded[-2] | {p - moment.shift for p in moment.coming}
        masks = moment.clamp(0, moment.end) - moment.decoded[-1]
        for position in moment.coming:
            row = position - moment.shift
            chosen |= set(sorted(masks - chosen, key=lambda p: (abs(p - row), p))[:window])
        return chosen

    return rows


def vicinity(before: int, ahead: int, warm_up: int, every: int = 0) -> Method:
    def rows(moment: Moment) -> set[int] | None:
        if moment.number < warm_up or moment.step == 0 or (every and moment.step % every == 0):
            return None
        return moment.clamp(moment.start - moment.shift - before, moment.start + moment.size + ahead)

    return rows


def dense(block_cache: BlockCache) -> Method:
    """Vanilla with a block cache over the whole canvas, filled in a block's first step."""

    def rows(moment: Moment) -> set[int] | None:
        if moment.step == 0:
            return None
        return (moment.clamp(0, moment.end) - moment.skipped(block_cache)) | moment.predicting()

    return rows


@dataclass(frozen=True)
class Step:
    """One forward pass. All positions are absolute and ascending."""

    full: bool
    positions: list[int]
    masked: list[int]  # rows whose predictions are wanted
    kept: list[int]
    committed: list[tuple[int, int]]  # (position, token)
    average: float
    reached: int  # after the step
    score: list[float]  # per row; empty where nothing is evicted


@dataclass
class Trace:
    """What `generate` did. `kv(l)`: keys and values [end, Hkv, D] of layer l as they were last written."""

    cache: Cache
    end: int
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.read(layer, self.end)


def dream_count(masks: int, step: int, steps: int, eps: float = 1e-3) -> int:
    """Tokens that step i of a block commits: timesteps from 1 to eps; the last step commits all."""
    if step >= steps - 1:
        return masks
    t, s = (1 - i * (1 - eps) / steps for i in (step, step + 1))
    return math.floor(masks * (1 - s / t))


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
    order: Callable[[int], float] | None = None,
    schedule: str = "block",
    first: bool = False,
    eviction: Eviction | None = None,
    forward: Callable[..., Tensor] = forward,
) -> Trace:
    """Decode greedily, committing by a threshold, in `steps` steps per block, or along Dream's timesteps with the least
    entropy first (alg "entropy", alg_temp 0).

    order: in `steps` steps, the highest first, whatever is predicted. schedule "masks": the steps share out the masks
    that the block began with, instead of its length. first: a block's first step commits its first position, whatever
    is predicted of the others (Fast-dLLM on Dream). forward: the model's, if another one keeps something between steps.
    """
    size, end = block_length, len(prompt) + max_new_tokens
    canvas = [*prompt, *[mask_id] * max_new_tokens]
    trace = Trace(Cache(config, end, next(iter(weights.values()))), end)
    start, finished, every = len(prompt), False, list[int]()
    while start < end and not finished:
        stop = min(start + size, end)
        decoded: list[set[int]] = []
        yields: list[int] = []
        reached = -1
        total = size if schedule == "block" else stop - start
        while mask_id in canvas[start:stop] and not finished:
            decoded.append({p for p in range(end) if canvas[p] != mask_id})
            done = sum(n > 0 for n in yields)
            count = 0 if steps is None else max(1, total // steps + (done < total % steps))
            coming = [p for p in range(start, stop) if canvas[p] == mask_id]
            coming = [] if order is None else sorted(coming, key=lambda p: (-order(p), p))[:count]
            moment = Moment(start, stop, end, size, shift, len(trace.steps), decoded, coming)
            chosen = method(moment)
            positions = sorted(range(end) if chosen is None else chosen)
            wanted = moment.predicting()
            masked = [p in wanted for p in positions]
            average = (eviction or Eviction()).average(yields, every)
            hook = None
            if eviction is not None and chosen is not None:
                # Every row has keys in every layer since the block's first step, so no placeholder lacks them.
                limits = [end] * len(positions)
                holds = [start <= p < stop and canvas[p] == mask_id for p in positions]
                inside = [start <= p + shift < stop for p in positions]
                number = len(trace.steps)
                hook = EvictRows(eviction, number, positions, masked, limits, average, reached, holds, inside)
            logits = forward(weights, config, [canvas[p] for p in positions], positions, end, trace.cache, hook)
            kept = positions if hook is None else [positions[i] for i in hook.kept]
            reached = max(reached, kept[-1])

            logits[:, mask_id] = -math.inf
            found = {
                p + shift: (int(row.argmax()), row.softmax(-1))
                for p, row in zip(kept, logits, strict=True)
                if p in wanted
            }
            if dream_steps is not None:
                score = {p: (token, float(torch.xlogy(q, q).sum())) for p, (token, q) in found.items()}
                count = dream_count(len(wanted), len(yields), dream_steps)
            else:
                score = {p: (token, float(q.max()) if order is None else order(p)) for p, (token, q) in found.items()}
            committed = choose(score, threshold, count)
            if first and moment.step == 0:
                committed = [(start, score[start][0])]
            for position, token in committed:
                canvas[position] = token
            yields.append(len(committed))
            every.append(len(committed))
            trace.steps.append(
                Step(
                    full=chosen is None,
                    positions=positions,
                    masked=sorted(wanted.intersection(positions)),
                    kept=kept,
                    committed=committed,
                    average=average,
                    reached=reached,
                    score=[] if hook is None else hook.score,
                )
            )
            finished = stopped(canvas, start, stop, mask_id, eos_ids)
        start = stop

    output = canvas[len(prompt) :]
    cut = next((i for i, token in enumerate(output) if token in eos_ids), len(output))
    trace.tokens = output[:cut]
    return trace
