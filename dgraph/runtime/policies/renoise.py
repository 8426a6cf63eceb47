"""The rule of models without a mask token: draw a canvas again until it does not change (DiffusionGemma)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.plans.papers import ENTROPY_BOUNDED, Paper
from dgraph.runtime.policies.base import Candidates, Carried, DecodeRule, rank, setting
from dgraph.runtime.policies.traits import Traits


@dataclass(frozen=True)
class Renoise(DecodeRule):
    """Keep draws of least entropy, put random tokens elsewhere, and end when the most likely tokens are stable and
    sure.

    Step i of a canvas, from 0, draws each position from the model's distribution at a temperature t_i.
    t_i = t_min + (t_max - t_min) (steps - i) / steps. H_(1) <= H_(2) <= ... are the entropies of these distributions,
    in nats. The draws of the first k positions are kept for the next step, k the largest number with
    H_(1) + ... + H_(k-1) <= bound; at least one. The bound limits the mutual information of these positions (Ben-Hamu
    et al., arXiv 2505.24857). All others get new random tokens, whatever they held. Ties go to the lower position; sums
    are in float64.

    The canvas is done if every position has kept its most likely token for `stability` steps and the mean of H is below
    `confidence`. It is also done after `steps` steps. The most likely tokens of that step are then committed, all at
    once.

    For models of noise="uniform" (DiffusionGemma).
    """

    bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability: int = 1
    confidence: float = 0.005
    steps: int = 48

    papers: ClassVar[tuple[Paper, ...]] = (ENTROPY_BOUNDED,)
    name: ClassVar[str] = "renoise"
    per_request: ClassVar[tuple[str, ...]] = ("bound", "t_min", "t_max", "stability", "confidence", "steps")
    traits: ClassVar[Traits] = Traits(may_wait=True, renoises=True)

    def __post_init__(self) -> None:
        finite = math.nextafter(math.inf, 0)
        self.check_number("bound", 0, finite, "a finite number of nats, at least 0", "DiffusionGemma's setting is 0.1.")
        for field in ("t_min", "t_max"):
            self.check_number(field, math.ulp(0.0), finite, "a finite temperature above 0")
        self.check_number("confidence", 0, finite, "a finite number of nats, at least 0", "0 never stops early.")
        if type(self.stability) is not int or self.stability < 0:
            raise self.refuse("stability", "a number of steps, at least 0")
        self.check_steps(self.steps, optional=False)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy", "forwards"})

    @property
    def carries(self) -> tuple[Carried, ...]:
        return (Carried("best", torch.int64, -1), Carried("same", torch.int64, per="sequence"))

    def heat(self, step: Tensor) -> Tensor:
        """f32[b]: the temperature of step i64[b], from 0, of a canvas."""
        like = step.double()
        low, high, steps = (setting(value, like) for value in (self.t_min, self.t_max, self.steps))
        return (low + (high - low) * ((steps - like) / steps.clamp(min=1))).float()

    def choose(self, candidates: Candidates) -> Tensor:
        entropy, forwards = candidates.need("entropy", self), candidates.need("forwards", self)
        mean = entropy.double().mean(dim=1)
        stable = self._same(candidates) >= setting(self.stability, forwards)
        sure = mean < setting(self.confidence, mean)
        done = (stable & sure) | (forwards + 1 >= setting(self.steps, forwards))
        return done[:, None] & candidates.committable

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        return {"best": candidates.token.clone(), "same": self._same(candidates)}

    def keep(self, candidates: Candidates) -> Tensor:
        """bool[b, B]: positions that hold their draw in the next step; the others get random tokens."""
        entropy = candidates.need("entropy", self)
        ordered = entropy.double().sort(dim=1).values
        before = ordered.cumsum(dim=1) - ordered
        # After positions without a candidate, of infinite entropy, nothing is kept.
        count = ((before <= setting(self.bound, before)) & ordered.isfinite()).sum(dim=1)
        return rank(-entropy) < count[:, None]

    @staticmethod
    def _same(candidates: Candidates) -> Tensor:
        """i64[b]: steps for which the most likely tokens have not changed."""
        same = (candidates.token == candidates.carried["best"]).all(dim=1)
        return torch.where(same, candidates.carried["same"] + 1, 0)
