"""FOCUS, sections 3 and 4.1-4.2: the importance of masked rows, the budget, and which rows go on.

Plain loops over one sequence's rows. Where the paper is silent or differs from its public code, the rule is
the code's: importance over masked rows only, cached placeholders known by reached, no limit on the
constraints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Signal = Literal["delta", "importance"]
Select = Literal["top", "random", "bottom"]
Noise = Callable[[int, list[int]], Tensor]


def importance(q: Tensor, k: Tensor, masked: Sequence[bool], pool: int = 3) -> Tensor:
    """Eq. 2 over masked queries and keys: softmax over the pooled scores, summed over queries and heads.

    q [n, Hq, D] and k [n, Hkv, D] after RoPE -> fp32 [n], 0 on rows that are not masked. The max-pool (odd
    width `pool`, stride 1, truncated at both ends) runs along the compacted list of masked keys, before the
    softmax.
    """
    rows = [i for i, m in enumerate(masked) if m]
    result = torch.zeros(len(masked), dtype=torch.float32, device=q.device)
    group, reach = q.shape[1] // k.shape[1], pool // 2
    for head in range(q.shape[1] if rows else 0):
        scores = (q[rows, head].float() @ k[rows, head // group].float().T) * q.shape[-1] ** -0.5
        pooled = torch.stack(
            [scores[:, max(0, j - reach) : j + reach + 1].amax(dim=1) for j in range(len(rows))], dim=1
        )
        result[rows] += pooled.softmax(dim=1).sum(dim=0)
    return result


def select_rows(
    score: Sequence[float],
    masked: Sequence[bool],
    positions: Sequence[int],
    *,
    average: float,
    reached: int,
    alpha: float,
    keep: int = 0,
    holds: Sequence[bool] | None = None,
) -> list[int]:
    """The rows S that go on (section 4.2): indices into the step's rows, ascending. Lists are per row.

    holds: the rows that hold a mask, where `masked` are those that predict one (rows predict the next position). What
    holds a token is never evicted, and a mask that predicts none may be.
    """
    holds = masked if holds is None else holds
    rows = [i for i, m in enumerate(masked) if m]
    if keep > 0 and math.isinf(average):
        keep = len(rows)
    budget = min(len(rows), keep) if keep > 0 else min(len(rows), history_budget(alpha, average, len(rows)))
    if budget == len(rows):
        return list(range(len(masked)))

    base: set[int] = set()
    if keep <= 0:  # N_sigma, Eq. 5: mean plus population deviation
        mean = sum(score[i] for i in rows) / len(rows)
        deviation = math.sqrt(sum((score[i] - mean) ** 2 for i in rows) / len(rows))
        base = {i for i in rows if score[i] >= mean + deviation}
    if len(base) < budget:
        base = set(sorted(rows, key=lambda i: (-score[i], i))[:budget])

    chosen = set(base)
    for left, right in pairwise(rows):  # AR context: one hop, from the base selection only
        if right in base and positions[right] == positions[left] + 1:
            chosen.add(left)
    rightmost = max(positions[i] for i in chosen)  # placeholder integrity
    chosen |= {i for i, m in enumerate(holds) if m and reached < positions[i] < rightmost}
    return [i for i, m in enumerate(holds) if not m or i in chosen]


def history_budget(alpha: float, average: float, most: int) -> int:
    """ceil(alpha * average) in fp32, the precision of the device's state; `most` where either is infinite."""
    if math.isinf(alpha) or math.isinf(average):
        return most
    return int(torch.ceil(torch.tensor(alpha, dtype=torch.float32) * max(average, 1.0)))


@dataclass(frozen=True)
class Eviction:
    """How FOCUS evicts: see `generate`."""

    alpha: float = 1.5
    after: int = 1
    signal: Signal = "delta"
    select: Select = "top"
    keep: int = 0
    pool: int = 3
    noise: Noise | None = None
    full_steps: int = 0


@dataclass
class EvictRows:
    """The hook of one step: scores the rows in the early layers, drops rows at layer `after`."""

    eviction: Eviction
    number: int  # of the step, from 0
    positions: list[int]
    masked: list[bool]
    limits: list[int]
    average: float
    reached: int
    holds: list[bool] | None = None  # see `select_rows`
    first: Tensor | None = None
    score: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    kept_limits: list[int] = field(default_factory=list)

    def __call__(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        e = self.eviction
        if layer == e.after - 1 and e.signal == "delta":
            self.first = importance(q, k, self.masked, e.pool)
        if layer != e.after:
            return None
        score = importance(q, k, self.masked, e.pool)
        if self.first is not None:
            score = score - self.first
        if e.select == "bottom":
            score = -score
        elif e.noise is not None:
            score = e.noise(self.number, self.positions).cpu() * torch.tensor(self.masked)
        self.score = score.tolist()
        self.kept = select_rows(
            self.score,
            self.masked,
            self.positions,
            average=self.average,
            reached=self.reached,
            alpha=e.alpha,
            keep=e.keep,
            holds=self.holds,
        )
        # Nothing right of the last kept row is visible from here on, not even a cached tail of the block; with full
        # steps before, everything that was forwarded is.
        end = self.positions[-1 if e.full_steps else self.kept[-1]] + 1
        self.kept_limits = [min(self.limits[i], end) for i in self.kept]
        return torch.tensor(self.kept, device=q.device), torch.tensor(self.kept_limits, device=q.device)
