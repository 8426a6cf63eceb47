"""Dream's rules: a schedule of timesteps, and a budget that is carried over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.plans.papers import DREAM, Paper
from dgraph.runtime.policies.base import Candidates, DecodeRule, rank, setting, steps_of
from dgraph.runtime.policies.thresholds import THRESHOLD
from dgraph.runtime.policies.traits import Traits

ALGORITHMS = ("origin", "maskgit_plus", "topk_margin", "entropy")


@dataclass(frozen=True)
class Dream(DecodeRule):
    """Commit along a schedule of timesteps, by one of Dream's four scores.

    The rule is that of Dream 7B, arXiv 2508.15487. t_i = 1 - i (1 - eps) / steps. Step i of a block (steps that commit
    nothing count) unmasks a share 1 - t_(i+1) / t_i, all in the last. alg "origin": each mask with that probability.
    Else n = floor(share * masks left) positions of the highest score; n may be 0. The score is the confidence
    ("maskgit_plus"), p1 - p2 ("topk_margin"), or sum p log p ("entropy").

    alg_temp None or 0 takes the n highest; a temperature draws n without replacement with probabilities
    proportional to exp(score / alg_temp). It takes the n highest of score / alg_temp plus Gumbel noise, which has the
    same law as Dream's `multinomial`.

    steps counts per block, as in the block-wise forks; None: the block length. The schedule is in float64. Dream's
    batches share one mask count, the mean; here every sequence has its own, so that neighbours change nothing.
    Its 1e-10 inside the logarithm of the entropy is left out, and so is the mask token's share of the softmax. All is
    in fp32, where Dream has the dtype of the logits.

    Ties go to the lower position, as `torch.topk` in Dream's code does on a GPU; on a CPU it takes any. With top-p
    ties are common: an id with more than top_p is the only one left, and such rows have equal scores.
    """

    steps: int | None = None
    alg: str = "entropy"
    alg_temp: float | None = None
    eps: float = 1e-3

    papers: ClassVar[tuple[Paper, ...]] = (DREAM,)
    name: ClassVar[str] = "dream"
    traits: ClassVar[Traits] = Traits(may_wait=True)

    @property
    def per_request(self) -> tuple[str, ...]:
        """The schedule, and the temperature where there is one: without it nothing is drawn."""
        return ("steps", "eps", "alg_temp") if self._draws else ("steps", "eps")

    def __post_init__(self) -> None:
        self.check_steps(self.steps)
        self.check_choice("alg", ALGORITHMS)
        finite = math.nextafter(math.inf, 0)
        if self.alg_temp is not None:
            self.check_number("alg_temp", 0, finite, "a finite temperature, at least 0, or None")
        self.check_number("eps", math.ulp(0.0), math.nextafter(1, 0), "the last timestep, in (0, 1)")

    @property
    def needs(self) -> frozenset[str]:
        read = {"topk_margin": {"margin"}, "entropy": {"entropy"}, "origin": {"noise"}}.get(self.alg, set())
        return frozenset({"forwards"} | read | ({"noise"} if self._draws else set()))

    @property
    def _draws(self) -> bool:
        return isinstance(self.alg_temp, Tensor) or bool(self.alg_temp)

    def choose(self, candidates: Candidates) -> Tensor:
        committable = candidates.committable
        step = candidates.need("forwards", self).double()
        steps = setting(steps_of(self.steps, committable.shape[1]), step)
        part = (1 - setting(self.eps, step)) / steps
        share = 1 - (1 - (step + 1) * part) / (1 - step.minimum(steps - 1) * part)
        last = step >= steps - 1
        if self.alg == "origin":
            return ((candidates.need("noise", self) < share[:, None]) | last[:, None]) & committable
        masks = candidates.masked.sum(dim=1)
        count = torch.where(last, masks, (masks * share).floor().long())
        score = torch.where(committable, self._score(candidates), -math.inf)
        return (rank(score) < count[:, None]) & committable

    def _score(self, candidates: Candidates) -> Tensor:
        if self.alg == "topk_margin":
            score = candidates.need("margin", self)
        elif self.alg == "entropy":
            score = -candidates.need("entropy", self)
        else:
            score = candidates.confidence
        if self.alg_temp is None or not self._draws:
            return score
        score = score.double()
        return score / setting(self.alg_temp, score) + gumbel_of(candidates.need("noise", self))


def gumbel_of(noise: Tensor) -> Tensor:
    """float64: standard Gumbel noise of uniform draws that are multiples of 2**-24; always finite."""
    return -torch.log(-torch.log(noise.double() + 2.0**-25))


@dataclass(frozen=True)
class DreamThreshold(DecodeRule):
    """Commit up to a budget per step, and carry the part that is not confident enough over to the next step (Dream
    confidence_threshold).

    The rule is that of Dream 7B, arXiv 2508.15487. Step i may commit its own q_i tokens and what earlier steps left of
    theirs. q_i spreads the masks that the block began with over `steps` steps (None: the block length), one more in the
    first ones. Among that many of the most confident, tokens below `threshold` wait, but never the most confident of
    all. After the last step the same goes on with the masks that are left. Dream's code asks that the masks divide by
    the steps; here they need not.
    """

    threshold: float = THRESHOLD
    steps: int | None = None

    papers: ClassVar[tuple[Paper, ...]] = (DREAM,)
    name: ClassVar[str] = "dream_threshold"
    per_request: ClassVar[tuple[str, ...]] = ("threshold", "steps")

    def __post_init__(self) -> None:
        self.check_threshold()
        self.check_steps(self.steps)

    def choose(self, candidates: Candidates) -> Tensor:
        offered, committable, masks = candidates.offered, candidates.committable, candidates.masks_at_start
        steps = steps_of(self.steps, committable.shape[1])
        # Budgets up to and including this step, minus the committed tokens: this step's budget and all carried ones.
        done = candidates.step + 1
        budget = (done * (masks // steps) + torch.minimum(done, masks % steps)).minimum(masks) - candidates.decoded
        place = rank(offered)
        sure = (offered >= setting(self.threshold, offered)) | (place == 0)
        return (place < budget.clamp(min=1)[:, None]) & sure & committable
