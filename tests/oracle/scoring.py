"""FOCUS, sections 3 and 4.1-4.2: the importance of masked rows, the budget, and which rows go on.

Plain loops over one sequence's rows. Where the paper is silent or differs from its public code, the rule is
the code's: importance over masked rows only unless asked otherwise, cached placeholders known by reached, no
limit on the constraints.
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
Among = Literal["candidates", "block"]
AverageOver = Literal["block", "sequence"]
Noise = Callable[[int, list[int]], Tensor]


def importance(q: Tensor, k: Tensor, member: Sequence[bool], pool: int = 3) -> Tensor:
    """Eq. 2 over some rows as queries and keys: softmax over the pooled scores, summed over queries and heads.

    q [n, Hq, D] and k [n, Hkv, D] after RoPE -> fp32 [n], 0 on other rows. The max-pool (odd width `pool`,
    stride 1, truncated at both ends) runs along the compacted list of these keys, before the softmax.
    """
    rows = [i for i, m in enumerate(member) if m]
    result = torch.zeros(len(member), dtype=torch.float32, device=q.device)
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


def mean_yield(yields: Sequence[int]) -> float:
    """The mean commits of these steps, in fp32; 1 before the first (4.1)."""
    return float(torch.tensor(sum(yields), dtype=torch.float32) / len(yields)) if yields else 1.0


@dataclass(frozen=True)
class Eviction:
    """How FOCUS evicts: see `generate`. among: queries and keys of Eq. 2, the rows that predict masks or the block's.

    average_over: steps whose commits N_decoded averages, see `average`.
    """

    alpha: float = 1.5
    after: int = 1
    signal: Signal = "delta"
    select: Select = "top"
    keep: int = 0
    pool: int = 3
    noise: Noise | None = None
    full_steps: int = 0
    among: Among = "candidates"
    average_over: AverageOver = "block"

    def average(self, block: Sequence[int], sequence: Sequence[int]) -> float:
        """N_decoded from the commits of each step of the block, and of all steps of the sequence.

        "sequence": all steps count, and blocks end nothing (Eq. 17 to 19, E.3.1). "block": the public code, in which
        each block begins anew and a step that commits nothing does not count.
        """
        return mean_yield(sequence if self.average_over == "sequence" else [n for n in block if n > 0])


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
    inside: list[bool] | None = None  # rows that predict a position of the block; None: all
    first: Tensor | None = None
    score: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    kept_limits: list[int] = field(default_factory=list)

    def __call__(self, layer: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
        e = self.eviction
        inside = [True] * len(self.masked) if self.inside is None else self.inside
        member = self.masked if e.among == "candidates" else inside
        if layer == e.after - 1 and e.signal == "delta":
            self.first = importance(q, k, member, e.pool)
        if layer != e.after:
            return None
        score = importance(q, k, member, e.pool)
        if self.first is not None:
            score = score - self.first
        if e.select == "bottom":
            score = -score
        elif e.noise is not None:
            score = e.noise(self.number, self.positions)
        self.score = (score.cpu() * torch.tensor(self.masked)).tolist()
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
