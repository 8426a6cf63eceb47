"""FOCUS on models that work in two modes, one sequence, plain loops: a block is denoised under eviction, then encoded.

The loop is that of `tests.oracle.two_modes.diffuse`, over a cache: what is encoded writes its keys for good and
predicts the token after it, with which the next block begins. Rows of a block that is denoised predict their own
position, or with a shift the next one; then the row before each mask stands for it in importance, budget and selection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.oracle.focus import BlockCache, choose, ready_columns, stopped
from tests.oracle.qwen3 import Cache, Config, Weights, project
from tests.oracle.qwen3 import forward as qwen3_forward
from tests.oracle.scoring import Eviction, EvictRows


@dataclass(frozen=True)
class Step:
    """One forward pass; positions are absolute and ascending."""

    positions: list[int]
    kept: list[int]
    masked: list[int]  # rows that predict a mask
    committed: list[tuple[int, int]]  # (position of the row that predicts, token)
    score: list[float]  # per row, of a step that may evict


@dataclass
class Trace:
    """What `generate` did; everything before `final` has its final keys and values."""

    cache: Cache
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    final: int = 0


@torch.no_grad()
def generate(
    weights: Weights,
    config: Config,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    block: int,
    mask_id: int,
    eos_ids: Sequence[int],
    threshold: float,
    shift: int,
    causal: bool,
    eviction: Eviction,
    block_cache: BlockCache = "dc+",
    forward: Callable[..., Tensor] = qwen3_forward,
) -> Trace:
    """Decode greedily; causal: rows that are encoded see what comes before them, not their whole block.

    Where blocks are encoded as a whole, a prompt's last, unfinished block is the beginning of the first one.
    """
    end, canvas = len(prompt) + max_new_tokens, list(prompt)
    cache = Cache(config, end + 2 * block, next(iter(weights.values())))
    trace = Trace(cache)
    every: list[int] = []  # tokens that each step decided

    def predicted(h: Tensor) -> list[tuple[int, float]]:
        logits = project(weights, h)
        logits[:, mask_id] = -torch.inf
        return [(int(row.argmax()), float(row.max())) for row in logits.softmax(dim=-1)]

    def encode(begin: int, until: int) -> int:
        """Write the keys of [begin, until) for good; the token after them."""
        rows = range(begin, until)
        limits = [p + 1 if causal else (p // block + 1) * block for p in rows]
        return predicted(forward(weights, config, canvas[begin:until], rows, limits, cache)[-1:])[0][0]

    def follow(begin: int, until: int) -> None:
        """One step that encodes these positions, and decides the next."""
        canvas.append(encode(begin, until))
        rows = list(range(begin, until))
        every.append(1)
        trace.steps.append(Step(rows, rows, [until - 1], [(until - 1, canvas[-1])], []))

    start = len(prompt) if causal else len(prompt) // block * block
    if start == len(prompt):  # what the first step encodes is not prefilled
        first = start - (1 if causal else block)
        if first:
            encode(0, first)
        follow(first, start)
    elif start:
        encode(0, start)

    while True:
        stop = start + block
        canvas += [mask_id] * (stop - len(canvas))
        uncached, reached = set(range(start, stop)), start - 1
        yields: list[int] = []
        while mask_id in canvas[start : min(stop, end)]:  # masks beyond the response need no step
            if stopped(canvas, max(start, len(prompt)), stop, mask_id, eos_ids):
                break
            wanted = {p - shift for p in range(start, stop) if canvas[p] == mask_id}
            positions = sorted(uncached | wanted)
            predicts, holds = [p in wanted for p in positions], [canvas[p] == mask_id for p in positions]
            limits = [positions[-1] + 1] * len(positions)
            average = eviction.average(yields, every)
            inside = [start <= p + shift < stop for p in positions]
            hook = EvictRows(eviction, len(trace.steps), positions, predicts, limits, average, reached, holds, inside)
            h = forward(weights, config, [canvas[p] for p in positions], positions, limits, cache, hook)
            kept = [positions[i] for i in hook.kept]
            reached = max(reached, kept[-1])
            for layer in range(config.layers):  # no position up to here lacks keys in any layer
                cache.read(layer, reached + 1)
            found = {p + shift: best for p, best in zip(kept, predicted(h), strict=True) if p in wanted}
            committed = choose(found, threshold, 0)
            before = [canvas[p] != mask_id for p in range(start, stop)]
            for position, token in committed:
                canvas[position] = token
            yields.append(len(committed))
            every.append(len(committed))
            uncached -= {start + i for i in ready_columns(before, block_cache)}
            pairs = [(position - shift, token) for position, token in committed]
            trace.steps.append(Step(positions, kept, sorted(wanted), pairs, hook.score))
        trace.final = start
        done = stopped(canvas, max(start, len(prompt)), stop, mask_id, eos_ids)
        if done or stop >= end:
            break
        follow(start, stop)
        start = stop

    said = canvas[len(prompt) : end]
    trace.tokens = said[: next((i for i, token in enumerate(said) if token in eos_ids or token == mask_id), len(said))]
    return trace
