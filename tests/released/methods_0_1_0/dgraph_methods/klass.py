"""KLASS (arXiv 2511.05664): commit what is confident and whose distribution has stopped changing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.ops.statistics import KL, Statistic
from dgraph.runtime.policies import Candidates, Carried, DecodeRule, FixedSteps


@dataclass(frozen=True)
class Klass(DecodeRule):
    """Commit every position that is more confident than `threshold` and stable; if there is none, the most confident.

    A position is stable if D_KL(p now || p one step ago) was below `kl` nats in each of the last `history` steps; so
    none is before its block has had that many steps and one more. With history=0 all are, and the rule is
    `ConfidenceThreshold`.

    Attributes:
        threshold: in (0, 1]; published for LLaDA: 0.6 to 0.9.
        kl: above 0; published for LLaDA: 0.001 to 0.015.
        history: steps; published: 2.
        steps: where none is ready, commit as many as `FixedSteps` with this many steps per block and the schedule
            "masks" does; None: one.
        top: compare the largest probabilities alone, see `KL`; 0: the whole distribution, as published.
    """

    threshold: float = 0.9
    kl: float = 0.01
    history: int = 2
    steps: int | None = None
    top: int = 0

    name: ClassVar[str] = "klass"

    def __post_init__(self) -> None:
        self.check_threshold()
        self.check_number("kl", math.ulp(0.0), math.inf, "a divergence above 0, in nats")
        self.check_steps(self.steps)
        for field in ("history", "top"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 0:
                raise self.refuse(field, "an integer of at least 0")

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset({KL(self.top)})

    @property
    def carries(self) -> tuple[Carried, ...]:
        return (Carried("calm", torch.int64),)

    def choose(self, candidates: Candidates) -> Tensor:
        stable = self._calm(candidates) >= self.history
        ready = stable & (candidates.offered > self.threshold) & candidates.committable
        instead = FixedSteps(self.steps or ready.shape[1], "masks").choose(candidates)
        return torch.where(ready.any(dim=1, keepdim=True), ready, instead)

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        return {"calm": self._calm(candidates)}

    def _calm(self, candidates: Candidates) -> Tensor:
        """i64[b, B]: for how many steps in a row a position has changed by less than `kl`."""
        return torch.where(candidates.need("kl", self) < self.kl, candidates.carried["calm"] + 1, 0)
