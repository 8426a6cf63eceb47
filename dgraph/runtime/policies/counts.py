"""Rules that commit a number of tokens per step that is fixed in transition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dgraph.plans.papers import DKV_CACHE, LLADA, SDAR, Paper
from dgraph.runtime.policies.base import Candidates, DecodeRule, first_columns, leftmost, rank, share, steps_of
from dgraph.runtime.policies.traits import Traits

SCHEDULES = ("block", "masks")
REMASKING = ("low_confidence", "random", "random_order")
_DRAWS = {"random": "noise", "random_order": "order"}


@dataclass(frozen=True)
class FixedSteps(DecodeRule):
    """Denoise a block in `steps` steps: step i commits the n_i best (ties: lower position).

    n_i = T // steps, and one more in the first T % steps steps; at least one.

    schedule "block" (SDAR low_confidence_static, arXiv 2510.06303; LMDeploy): T is the block length B. A block that
    begins with the prompt's remainder has fewer masks and needs fewer steps. "masks" (LLaDA, arXiv 2502.09992): T is
    the number of masked positions that the block began with. It then takes `steps` steps, however many of its positions
    the prompt has filled. A block whose rows were evicted may need more with either.

    remasking "low_confidence": the best are the most confident. "random" (LLaDA, JetEngine): they are drawn uniformly
    in each step, and the confidence plays no part. "random_order" (dKV-Cache-Greedy, arXiv 2505.15781): they are drawn
    uniformly too, but the order of all positions of a block is drawn once. So the positions of a step are known before
    it.

    SDAR's public code lets top-n_i run over decoded rows when fewer than n_i masks are left, and overwrites these;
    here it does not.
    """

    steps: int
    schedule: str = "block"
    remasking: str = "low_confidence"

    papers: ClassVar[tuple[Paper, ...]] = (SDAR, LLADA, DKV_CACHE)
    name: ClassVar[str] = "fixed_steps"

    @property
    def per_request(self) -> tuple[str, ...]:
        """The field `steps`, unless it sets how many columns are foreseen: that number is a shape."""
        return () if self.traits.foresees else ("steps",)

    def __post_init__(self) -> None:
        self.check_steps(self.steps, optional=False)
        self.check_choice("schedule", SCHEDULES)
        self.check_choice("remasking", REMASKING)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({_DRAWS[self.remasking]} if self.remasking in _DRAWS else ())

    @property
    def traits(self) -> Traits:
        return Traits(foresees=self.remasking == "random_order")

    def choose(self, candidates: Candidates) -> Tensor:
        committable = candidates.committable
        score = candidates.offered
        if self.remasking in _DRAWS:
            score = torch.where(committable, candidates.need(_DRAWS[self.remasking], self), -math.inf)
        count = self._count(candidates.masked, candidates.step, candidates.decoded)
        return (rank(score) < count[:, None]) & committable

    def foresee(self, masked: Tensor, step: Tensor, decoded: Tensor, order: Tensor) -> Tensor:
        """See `DecodeRule.foresee`."""
        count = self._count(masked, step, decoded).minimum(masked.sum(dim=1))
        return first_columns(torch.where(masked, order, -math.inf), count, -(-masked.shape[1] // self.steps))

    def _count(self, masked: Tensor, step: Tensor, decoded: Tensor) -> Tensor:
        total: Any = masked.sum(dim=1) + decoded if self.schedule == "masks" else masked.shape[1]
        return share(total, steps_of(self.steps, masked.shape[1]), step)


@dataclass(frozen=True)
class Sequential(DecodeRule):
    """Commit the leftmost n_i masks: decoding from left to right (SDAR `sequential`).

    The rule is that of SDAR, arXiv 2510.06303. n_i is that of `FixedSteps` over the block length; steps None: one token
    per step. SDAR's slice starts at the first mask and may run over decoded rows; here only masks that have a token
    count.
    """

    steps: int | None = None

    papers: ClassVar[tuple[Paper, ...]] = (SDAR,)
    name: ClassVar[str] = "sequential"
    traits: ClassVar[Traits] = Traits(foresees=True)

    def __post_init__(self) -> None:
        self.check_steps(self.steps)

    def choose(self, candidates: Candidates) -> Tensor:
        committable = candidates.committable
        block = committable.shape[1]
        return leftmost(committable, share(block, self.steps or block, candidates.step))

    def foresee(self, masked: Tensor, step: Tensor, decoded: Tensor, order: Tensor) -> Tensor:
        """See `DecodeRule.foresee`."""
        block = masked.shape[1]
        steps = self.steps or block
        count = share(block, steps, step).minimum(masked.sum(dim=1))
        columns = torch.arange(block, dtype=order.dtype, device=order.device)
        return first_columns(torch.where(masked, -columns, -math.inf), count, -(-block // steps))
