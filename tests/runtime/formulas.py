"""Sequences of candidates as lists, and the formula of every decoding rule for one of them, with lists and sorting."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from dgraph.runtime.policies import Candidates, JointThresholdInDel, statistics_of

NONE = -math.inf


@dataclass
class Sequence:
    """One sequence's candidates as lists, and its counts."""

    c: list[float]
    masked: list[bool]
    token: list[int]
    current: list[int]
    step: int
    decoded: int
    forwards: int
    margin: list[float]
    entropy: list[float]
    noise: list[float]
    order: list[float]
    editable: list[bool]
    passes: int

    @property
    def block(self) -> int:
        return len(self.c)

    @property
    def open(self) -> list[int]:
        """Positions that can be committed."""
        return [i for i in range(self.block) if self.masked[i] and self.c[i] > NONE]

    def sorted(self, score: list[float] | None = None) -> list[int]:
        """These, best first; ties: lower position."""
        score = self.c if score is None else score
        return sorted(self.open, key=lambda i: (-score[i], i))

    def taken_back_below(self, threshold: float) -> list[int]:
        """Decoded positions that may be edited and for which nothing as sure is predicted."""
        return [i for i in range(self.block) if self.editable[i] and NONE < self.c[i] < single(threshold)]


def draw(rng: random.Random, block: int, edit: bool = False) -> Sequence:
    share, evicted, ties = rng.choice([0.1, 0.5, 0.9, 1.0]), rng.choice([0, 0, 0.3, 1.0]), rng.random() < 0.5

    def value(top: float = 1.0) -> float:
        return single(top * (rng.randint(1, 8) / 8 if ties else rng.random()))

    masked = [rng.random() < share for _ in range(block)]
    given = [(m or edit) and rng.random() >= evicted for m in masked]
    decoded = rng.randint(0, masked.count(False))
    step = rng.randint(1, decoded) if decoded else 0
    return Sequence(
        c=[value() if g else NONE for g in given],
        masked=masked,
        token=[rng.randrange(4) if g else -1 for g in given],
        current=[rng.randrange(4) for _ in given],
        step=step,
        decoded=decoded,
        forwards=step + rng.randint(0, 3),
        margin=[value() if g else NONE for g in given],
        entropy=[value(rng.choice([0.1, 3])) if g else math.inf for g in given],
        noise=[rng.randrange(2**24) / 2**24 for _ in given],
        order=[rng.randrange(2 if ties else 2**24) / 2**24 for _ in given],
        editable=[not m and rng.random() < 0.7 for m in masked],
        passes=rng.randint(0, 4) if not any(masked) else 0,
    )


def single(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def together(sequences: list[Sequence]) -> Candidates:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(s, name) for s in sequences], dtype=dtype)

    whole = {n: column(n, torch.int64) for n in ("token", "current", "step", "decoded", "forwards", "passes")}
    flags = {n: column(n, torch.bool) for n in ("masked", "editable")}
    real = {n: column(n, torch.float32) for n in ("noise", "order")}
    measured = {n: column(n, torch.float32) for n in ("margin", "entropy")}
    (other,) = statistics_of(JointThresholdInDel(delete_id=1, split_id=2))
    measured[other.name] = torch.full_like(measured["margin"], 3.0)
    zeros = torch.zeros(len(sequences), dtype=torch.int64)
    confidence = column("c", torch.float32)
    return Candidates(confidence=confidence, start=zeros, prompt=zeros, measured=measured, **whole, **flags, **real)


def plain(c: list[float], forwards: int) -> Sequence:
    n, flags = len(c), [x > NONE for x in c]
    return Sequence(c, flags, [0] * n, [1] * n, 0, 0, forwards, c, c, [0.5] * n, [0.5] * n, [False] * n, 0)


# -- the formulas: positions that a rule commits -----------------------------------------------------------------


def n_of(total: int, steps: int, step: int) -> int:
    return max(1, total // steps + (1 if step < total % steps else 0))


def fixed_steps(s: Sequence, steps: int, schedule: str = "block", remasking: str = "low_confidence") -> list[int]:
    total = s.block if schedule == "block" else s.masked.count(True) + s.decoded
    order = s.sorted({"random": s.noise, "random_order": s.order}.get(remasking))
    return order[: n_of(total, steps, s.step)]


def sequential(s: Sequence, steps: int | None) -> list[int]:
    return s.open[: n_of(s.block, steps or s.block, s.step)]


def confidence_threshold(s: Sequence, threshold: float, inclusive: bool) -> list[int]:
    passing = [i for i in s.open if s.c[i] > threshold or (inclusive and s.c[i] == threshold)]
    return passing or s.sorted()[:1]


def dynamic_threshold(s: Sequence, threshold: float, steps: int | None, fallback: str) -> list[int]:
    n = n_of(s.block, steps or s.block, s.step)
    high = [i for i in s.open if s.c[i] > threshold]
    if len(high) >= n:
        return high
    return s.sorted()[:n] if fallback == "top" else s.open[:n]


def relative_threshold(s: Sequence, threshold: float, tolerance: float = 1e-5) -> list[int]:
    bar = min(max((s.c[i] for i in s.open), default=0.0) - tolerance, threshold)
    return [i for i in s.open if s.c[i] >= bar]


def factor(s: Sequence, factor: float, variant: str) -> list[int]:
    order = s.sorted()
    if not order:
        return []
    if variant == "paper":
        allowed = [n for n in range(1, len(order) + 1) if (n + 1) * (1 - s.c[order[n - 1]]) < factor]
        return order[: max(allowed, default=1)]
    thresholds = [1 - factor / (n + 1) for n in range(1, len(order) + 1)]
    thresholds[0] = -1.0
    failing = [i for i, p in enumerate(order) if s.c[p] < thresholds[i]]
    index = failing[0] if failing else len(order) - 1
    if index in (0, len(order) - 1):
        index += 1
    return order[:index]


def entropy_bounded(s: Sequence, gamma: float) -> list[int]:
    order = s.sorted([-h for h in s.entropy])
    total, k = 0.0, 0
    for i in order:
        total += s.entropy[i]
        if total >= gamma:
            break
        k += 1
    return order[: min(max(k, 1), len(order))]


def hierarchical(s: Sequence, threshold: float, low_threshold: float, fast_v2: bool) -> list[int]:
    if not s.open:
        return []
    top = s.sorted()[0]
    if fast_v2 and s.c[top] < low_threshold:
        return [top]
    chosen = {top} | {i for i in s.open if s.c[i] > threshold}
    at = 0
    while at < s.block:
        if not s.masked[at]:
            at += 1
            continue
        end = at
        while end < s.block and s.masked[end]:
            end += 1
        inside = max(range(at, end), key=lambda i: (s.c[i], -i))
        if s.c[inside] > low_threshold:
            chosen.add(inside)
        at = end
    return sorted(chosen)


def hierarchical_remask(s: Sequence, threshold: float, low_threshold: float, remask_threshold: float) -> list[int]:
    doubtful = s.taken_back_below(remask_threshold)
    pool = [i for i in range(s.block) if i in doubtful or (s.masked[i] and s.c[i] > NONE)]
    chosen = {i for i in pool if s.c[i] > single(threshold)}
    stretch: list[int] = []
    for i in range(s.block + 1):
        if i < s.block and (s.masked[i] or i in doubtful):
            stretch.append(i)
            continue
        inside = [j for j in stretch if j in pool]
        best = max(inside, key=lambda j: (s.c[j], -j), default=None)
        if best is not None and s.c[best] > single(low_threshold):
            chosen.add(best)
        stretch = []
    rest = sorted((i for i in pool if i not in chosen), key=lambda i: (-s.c[i], i))
    return [*chosen, *rest[: max(0, len(doubtful) + 1 - len(chosen))]]


def dream(s: Sequence, alg: str, alg_temp: float | None, steps: int | None, eps: float = 1e-3) -> list[int]:
    steps = steps or s.block
    last = s.forwards >= steps - 1
    t, after = (1 - i * (1 - eps) / steps for i in (s.forwards, s.forwards + 1))
    if alg == "origin":
        return [i for i in s.open if last or s.noise[i] < 1 - after / t]
    masks = s.masked.count(True)
    n = masks if last else int(masks * (1 - after / t))
    score = {"maskgit_plus": s.c, "topk_margin": s.margin, "entropy": [-h for h in s.entropy]}[alg]
    if alg_temp:
        # Draws without replacement: the order of exponential clocks with rates exp(score / alg_temp).
        clocks = {i: -math.log(s.noise[i] + 2**-25) / math.exp(score[i] / alg_temp) for i in s.open}
        return sorted(s.open, key=lambda i: clocks[i])[:n]
    return s.sorted(score)[:n]


def joint_threshold(s: Sequence, threshold: float, edit_threshold: float, max_post_edit_steps: int) -> list[int]:
    chosen = [i for i in s.open if s.c[i] > threshold] or s.sorted()[:1]
    if any(s.masked) or s.passes < max_post_edit_steps:
        for i in range(s.block):
            changed = s.token[i] >= 0 and s.token[i] != s.current[i]
            if not s.masked[i] and s.editable[i] and changed and s.c[i] > edit_threshold:
                chosen.append(i)
    return chosen
