"""FOCUS and plain block-diffusion decoding, written from the paper: one sequence, plain loops, dense tensors.

Block diffusion (SDAR): the prompt's full blocks are encoded block-causally; what is left of the prompt
begins the first decoded block; a block starts as masks and is denoised step by step; a finished block is
committed to the cache by a forward of its rows, which here rides in the first step of the next block.

FOCUS ("DLLMs Know How to Tame Their Compute Bound", sections 3 and 4): each step measures the importance of
the masked rows in two early layers; its rise predicts which rows will decode; the other masked rows are
evicted before the attention of layer `after`, when their keys and values of that layer are already written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tests.oracle.qwen3 import Cache, Config, Weights, project
from tests.oracle.qwen3 import forward as qwen3_forward
from tests.oracle.scoring import Among, AverageOver, Eviction, EvictRows, Noise, Select, Signal

BlockCache = Literal["off", "dc", "dc+"]


@dataclass(frozen=True)
class Step:
    """One forward pass of the decode loop. All positions are absolute and ascending."""

    start: int  # of the current block
    positions: list[int]  # the processing set P; those < start are the previous block's commit rows
    masked: list[int]  # M
    score: list[float]  # per row of P, as selection saw it (0 if not masked); empty without eviction
    kept: list[int]  # S
    limit: int  # what rows of the current block attend to in the last layer: positions < limit
    average: float  # the N_decoded that gave the budget
    reached: int  # after the step
    confidence: dict[int, tuple[int, float]]  # masked kept position -> (best token, its probability)
    committed: list[tuple[int, int]]  # (position, token)


@dataclass
class Trace:
    """What `generate` did. `kv(l)`: keys (after RoPE) and values [committed_end, Hkv, D] of layer l."""

    cache: Cache
    canvas: list[int]  # prompt and every block, as they were at the end
    committed_end: int  # everything before it has its final keys and values
    tokens: list[int] = field(default_factory=list)  # the output: cut at a stop token and at max_new_tokens
    steps: list[Step] = field(default_factory=list)

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.cache.read(layer, self.committed_end)


def choose(confidence: dict[int, tuple[int, float]], threshold: float | None, count: int) -> list[tuple[int, int]]:
    """(position, token) to commit: all above the threshold, at least the best; or the best `count`.

    Ties go to the lower position.
    """
    order = sorted(confidence, key=lambda p: (-confidence[p][1], p))
    if threshold is None:
        chosen = order[:count]
    else:
        bar = float(torch.tensor(threshold, dtype=torch.float32))  # confidences are fp32
        chosen = [p for p in order if confidence[p][1] > bar] or order[:1]
    return [(p, confidence[p][0]) for p in sorted(chosen)]


def ready_columns(block: Sequence[bool], rule: BlockCache) -> set[int]:
    """Columns that are frozen from now on (section 4.3). `block`: was the column decoded before this step?"""
    if rule == "off":
        return set()
    last = len(block) - 1
    return {i for i, decoded in enumerate(block) if decoded and (rule == "dc" or i == last or block[i + 1])}


def stopped(canvas: Sequence[int], since: int, until: int, mask_id: int, eos_ids: Sequence[int]) -> bool:
    """A stop token was generated in [since, until), and no mask stands before it."""
    for token in canvas[since:until]:
        if token == mask_id:
            return False
        if token in eos_ids:
            return True
    return False


@torch.no_grad()
def generate(
    weights: Weights,
    config: Config,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    block_length: int,
    mask_id: int,
    eos_ids: Sequence[int] = (),
    threshold: float | None = None,
    steps: int | None = None,
    evict: bool = True,
    alpha: float = 1.5,
    after: int = 1,
    signal: Signal = "delta",
    select: Select = "top",
    keep: int = 0,
    pool: int = 3,
    full_steps: int = 1,
    average_over: AverageOver | None = None,
    among: Among = "candidates",
    noise: Noise | None = None,
    block_cache: BlockCache = "dc+",
    recommit: bool = True,
    forward: Callable[..., Tensor] = qwen3_forward,
) -> Trace:
    """Decode greedily. Dense block diffusion is evict=False, block_cache="off", recommit=True.

    threshold: commit every row more confident than it, at least the best one; or steps: a fixed schedule:
    step i of a block commits block_length // steps rows, one more in the first block_length % steps, at
    least one. alpha, keep: the budget of masked rows, from the average yield of the steps of the block or of the
    sequence (`average_over`; the latter by default if the first step evicts), or (keep > 0) fixed. among: see
    `Eviction`. after: the layer whose attention is the first on the kept rows. signal: its importance minus
    that of the layer before it, or its importance alone. select: keep the rows with the highest scores, the
    lowest, or those with the highest `noise(step, positions)`; steps count from 0. full_steps: so many steps
    at the beginning of a block evict nothing, and what later steps evict is seen; 0: no row after the last kept one
    is seen, as published. block_cache: when a decoded row is no longer recomputed within its block ("dc+":
    once its right neighbour is decoded too). recommit: commit recomputes the whole block, or only the rows
    that were not cached yet. forward: the model, if it is another than Qwen3.
    """
    if (threshold is None) == (steps is None):
        raise ValueError("give exactly one of threshold and steps")
    if evict and not (1 if signal == "delta" else 0) <= after < config.layers:
        raise ValueError(f"after={after} does not fit signal={signal!r} and {config.layers} layers")
    if (select == "random") != (noise is not None):
        raise ValueError('give noise with select="random", and only then')
    if mask_id in prompt_ids:
        raise ValueError(f"the prompt contains the mask id {mask_id}")

    over = average_over or ("block" if full_steps else "sequence")
    eviction = Eviction(alpha, after, signal, select, keep, pool, noise, full_steps, among, over)
    size, prompt, end = block_length, len(prompt_ids), len(prompt_ids) + max_new_tokens
    canvas = list(prompt_ids)
    cache = Cache(config, -(-end // size) * size, next(iter(weights.values())))
    start = prompt // size * size
    trace = Trace(cache, canvas, committed_end=start)
    if start > 0:
        span = range(start)
        forward(weights, config, canvas[:start], span, [(p // size + 1) * size for p in span], cache)

    every: list[int] = []  # commits of each step of the sequence
    commit: set[int] = set()  # rows of the previous block that ride in the next step
    while start < end and max_new_tokens > 0:  # one block per turn
        stop = start + size
        canvas += [mask_id] * (stop - len(canvas))
        uncached, reached = set(range(start, stop)), start - 1
        yields: list[int] = []  # commits of each step of the block
        while mask_id in canvas[start : min(stop, end)]:  # one step per turn; masks beyond the response need none
            positions = sorted(commit | uncached)
            masked = [p >= start and canvas[p] == mask_id for p in positions]
            limits = [start if p < start else positions[-1] + 1 for p in positions]
            average = eviction.average(yields, every)
            hook = None
            if evict:
                budget = math.inf if len(yields) < full_steps else average
                inside = [p >= start for p in positions]
                number = len(trace.steps)
                hook = EvictRows(eviction, number, positions, masked, limits, budget, reached, inside=inside)
            h = forward(weights, config, [canvas[p] for p in positions], positions, limits, cache, hook)
            kept = hook.kept if hook is not None else list(range(len(positions)))
            reached = max(reached, positions[kept[-1]])
            for layer in range(config.layers):  # no position up to here lacks keys in any layer
                cache.read(layer, reached + 1)

            probability = project(weights, h).softmax(dim=-1)
            confidence = {
                positions[i]: (int(row.argmax()), float(row.max()))
                for i, row in zip(kept, probability, strict=True)
                if masked[i]
            }
            count = 0 if steps is None else max(1, size // steps + (len(yields) < size % steps))
            committed = choose(confidence, threshold, count)
            before = [canvas[p] != mask_id for p in range(start, stop)]
            for position, token in committed:
                if token == mask_id:
                    raise RuntimeError(f"position {position} decoded to the mask id {mask_id}")
                canvas[position] = token

            yields.append(len(committed))
            every.append(len(committed))
            uncached -= {start + i for i in ready_columns(before, block_cache)}
            commit = set()
            trace.committed_end = start
            trace.steps.append(
                Step(
                    start=start,
                    positions=positions,
                    masked=[p for p, m in zip(positions, masked, strict=True) if m],
                    score=hook.score if hook is not None else [],
                    kept=[positions[i] for i in kept],
                    limit=hook.kept_limits[-1] if hook is not None else limits[-1],
                    average=average,
                    reached=reached,
                    confidence=confidence,
                    committed=committed,
                )
            )
            if stopped(canvas, max(start, prompt), stop, mask_id, eos_ids):
                end = 0
                break
        commit = set(range(start, stop)) if recommit else uncached
        start = stop

    output = canvas[prompt : prompt + max_new_tokens]
    cut = next((i for i, token in enumerate(output) if token in eos_ids), len(output))
    trace.tokens = output[:cut]
    return trace
