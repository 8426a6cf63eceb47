"""The decode loop for one sequence with plain Python lists, written from the rules: the session's oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from dgraph.runtime import ConfidenceThreshold, FixedSteps
from tests.runtime.fake import ALPHA, MASK, answer, digest, first_key, importance, second_key


@dataclass
class Step:
    positions: list[int]
    limit: list[int]
    masked: list[int]
    kept: list[int]
    committed: list[tuple[int, int]]
    average: float
    reached: int


@dataclass
class Simulation:
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    keys: list[list[int]] = field(default_factory=list)
    committed_end: int = 0
    decoded: int = 0
    commit_rows: int = 0


def single(x: float) -> float:
    """Rounded to fp32, the precision of the state on the device."""
    return torch.tensor(x, dtype=torch.float32).item()


def choose(
    policy: ConfidenceThreshold | FixedSteps, found: dict[int, tuple[int, int]], step: int, block: int
) -> list[int]:
    order = sorted(found, key=lambda p: (-found[p][1], p))
    if isinstance(policy, FixedSteps):
        return order[: max(1, block // policy.steps + (step < block % policy.steps))]
    return [p for p in order if found[p][1] / 32 > policy.threshold] or order[:1]


class Model:
    """The fake model on dense lists."""

    def __init__(self, room: int):
        self.keys = [[0] * room, [0] * room]

    def sums(self, layer: int) -> list[int]:
        out = [0]
        for place, key in enumerate(self.keys[layer]):
            out.append(out[-1] + key * (place + 1) + (digest(key) ^ 0x55))
        return out

    def forward(
        self,
        canvas: list[int],
        limits: dict[int, int],
        masked: list[int],
        average: float = 1.0,
        reached: int | None = None,
    ) -> tuple[list[int], dict[int, tuple[int, int]], int]:
        """Kept positions, what the masked ones answer, and the new reached (None: nothing is evicted)."""
        for p in limits:
            self.keys[0][p] = first_key(canvas[p], p)
        sums = self.sums(0)
        seen = {p: sums[limit] for p, limit in limits.items()}
        kept = list(limits)
        if reached is not None:
            order = sorted(masked, key=lambda p: (-importance(seen[p], p), p))
            best = set(order[: math.ceil(single(ALPHA * average))])
            best |= {p for p in masked if reached < p < max(best)}
            kept = [p for p in limits if p not in masked or p in best]
            limits = {p: min(limits[p], kept[-1] + 1) for p in kept}
            reached = max(reached, kept[-1])
        for p in kept:
            self.keys[1][p] = second_key(seen[p], canvas[p], p)
        sums = self.sums(1)
        found = {p: answer(sums[limits[p]], p) for p in kept if p in masked}
        return kept, found, -1 if reached is None else reached


def simulate(
    prompt: list[int],
    *,
    max_new_tokens: int,
    block: int,
    policy: ConfidenceThreshold | FixedSteps,
    block_cache: str,
    recommit: bool,
    evict: bool,
    stops: tuple[int, ...],
) -> Simulation:
    end = len(prompt) + max_new_tokens
    room = math.ceil(end / block) * block
    canvas = prompt + [MASK] * (room - len(prompt))
    model, out = Model(room), Simulation()
    start = len(prompt) // block * block
    model.forward(canvas, {p: (p // block + 1) * block for p in range(start)}, [])
    commit: list[int] = []
    undecided = set(range(len(prompt), room))
    while True:
        uncached, reached, yields = list(range(start, start + block)), -1, []
        done = False
        while not done and any(p in undecided for p in range(start, min(start + block, end))):
            masked = [p for p in uncached if p in undecided]
            limits = dict.fromkeys(commit, start) | dict.fromkeys(uncached, uncached[-1] + 1)
            average = single(sum(yields) / len(yields)) if yields else 1.0
            before = reached
            kept, found, after = model.forward(canvas, limits, masked, average, reached if evict else None)
            reached = after if evict else reached
            chosen = choose(policy, found, len(yields), block)
            decoded = [p not in undecided for p in range(start, start + block)]
            for p in chosen:
                canvas[p] = found[p][0]
                undecided.discard(p)
            yields.append(len(chosen))
            out.decoded += len(chosen)
            out.commit_rows += len(commit)
            committed = [(p, found[p][0]) for p in sorted(chosen)]
            out.steps.append(Step(list(limits), list(limits.values()), masked, kept, committed, average, before))
            commit = []
            if block_cache != "off":
                ready = {
                    start + i
                    for i in range(block)
                    if decoded[i] and (block_cache == "dc" or i == block - 1 or decoded[i + 1])
                }
                uncached = [p for p in uncached if p not in ready]
            for p in range(max(start, len(prompt)), start + block):
                if p in undecided:
                    break
                if canvas[p] in stops:
                    done = True
                    break
        out.committed_end = start
        if done or start + block >= end:
            break
        commit = list(range(start, start + block)) if recommit else uncached
        start += block
    said = canvas[len(prompt) : end]
    out.tokens = said[: next((i for i, t in enumerate(said) if t in stops), len(said))]
    out.keys = [layer[: start + block] for layer in model.keys]
    return out
