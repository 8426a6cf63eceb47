"""Prophet (arXiv 2508.19982): once the answer has converged, commit all that is left of it at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.ops.statistics import RowLogits, Statistic
from dgraph.plans.papers import Paper
from dgraph.runtime.policies import Candidates, DecodeRule, FixedSteps, steps_of


@dataclass(frozen=True)
class Gap(Statistic):
    """The difference of the two largest logits, z / T at the row's temperature T (1 where it is 0)."""

    name: ClassVar[str] = "gap"
    filler: ClassVar[float] = 0.0

    def measure(self, rows: RowLogits) -> Tensor:
        """See `Statistic.measure`."""
        largest = rows.logits.topk(2).values
        return largest[:, 0] - largest[:, 1]


@dataclass(frozen=True)
class Prophet(DecodeRule):
    """Decode as `FixedSteps` with the schedule "masks" does, until the mean gap of the block's masks is large enough.

    All masks of the block are then committed. The gap that suffices falls with progress, the share of the block's steps
    that are done: `early`, `middle` and `late` for its thirds. The paper looks at the rows of the answer in the whole
    response; with block_length = max_new_tokens these are the block's.

    Attributes:
        early, middle, late: gaps of logits, at least 0; inf never leaves early. Published: 7.5, 5.0 and 2.5.
        steps: steps of a block; None: one for each of its positions.
    """

    early: float = 7.5
    middle: float = 5.0
    late: float = 2.5
    steps: int | None = None

    name: ClassVar[str] = "prophet"
    papers: ClassVar[tuple[Paper, ...]] = (
        Paper("Diffusion Language Models Know the Answer Before Decoding", "2508.19982", "algorithm 1"),
    )

    def __post_init__(self) -> None:
        for field in ("early", "middle", "late"):
            self.check_number(field, 0, math.inf, "a gap of two logits, at least 0")
        self.check_steps(self.steps)

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset({Gap()})

    def choose(self, candidates: Candidates) -> Tensor:
        committable, steps = candidates.committable, steps_of(self.steps, candidates.token.shape[1])
        gap = torch.where(committable, candidates.need("gap", self), 0.0).sum(1) / committable.sum(1).clamp(min=1)
        done = 3 * candidates.step / steps
        bar = torch.where(done < 1, self.early, torch.where(done < 2, self.middle, self.late))
        usual = FixedSteps(self.steps or candidates.token.shape[1], "masks").choose(candidates)
        return usual | (committable & (gap >= bar)[:, None])
