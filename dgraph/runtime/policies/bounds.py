"""Rules that commit as many of the best positions as a bound on all of them together allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.plans.papers import ENTROPY_BOUNDED, FAST_DLLM, SDAR, Paper
from dgraph.runtime.policies.base import Candidates, DecodeRule, rank, setting

VARIANTS = ("paper", "dinfer")


@dataclass(frozen=True)
class Factor(DecodeRule):
    """Commit the n most confident, n the largest number with (n + 1) (1 - c_(n)) < factor; at least one.

    c_(1) >= c_(2) >= ... are the confidences of the block (Fast-dLLM's factor-based decoding, arXiv 2505.22618). As n
    grows the left side never falls, so the n allowed positions are the first n. In float64.

    variant "dinfer" is the index rule of dInfer's public code instead: the bound holds with equality too. If only the
    least confident of m >= 2 positions breaks the bound, it is committed as well.
    """

    factor: float = 1.0
    variant: str = "paper"

    papers: ClassVar[tuple[Paper, ...]] = (FAST_DLLM,)
    name: ClassVar[str] = "factor"
    per_request: ClassVar[tuple[str, ...]] = ("factor",)

    def __post_init__(self) -> None:
        finite = math.nextafter(math.inf, 0)
        self.check_number("factor", math.ulp(0.0), finite, "a finite number above 0", "Fast-dLLM's setting is 1.")
        self.check_choice("variant", VARIANTS)

    def choose(self, candidates: Candidates) -> Tensor:
        offered, committable = candidates.offered, candidates.committable
        order = offered.double().sort(dim=1, descending=True, stable=True).values
        n = torch.arange(1, order.shape[1] + 1, dtype=order.dtype, device=order.device)
        factor = setting(self.factor, order)
        if self.variant == "paper":
            allowed = (n + 1) * (1 - order) < factor
        else:
            allowed = (n == 1) | (order >= 1 - factor / (n + 1))
        count = allowed.long().cumprod(dim=1).sum(dim=1)
        if self.variant == "dinfer":
            masks = committable.sum(dim=1)
            count = torch.where(count >= masks - 1, masks, count)
        return (rank(offered) < count.clamp(min=1)[:, None]) & committable


@dataclass(frozen=True)
class EntropyBounded(DecodeRule):
    """Commit the k positions of least entropy, k the largest number whose entropies sum to less than `gamma` (SDAR
    entropy_bounded, JetEngine).

    It is the entropy-bounded sampler of Ben-Hamu et al., arXiv 2505.24857, as SDAR (arXiv 2510.06303) states it. With
    entropies H_(1) <= H_(2) <= ... in nats: k = #{j : H_(1) + ... + H_(j) < gamma}, at least one. Sums are in float64.
    Entropies are those of the distribution that tokens are drawn from, at the row's temperature. SDAR's public code of
    this rule does not run.
    """

    gamma: float = 0.35

    papers: ClassVar[tuple[Paper, ...]] = (ENTROPY_BOUNDED, SDAR)
    name: ClassVar[str] = "entropy_bounded"
    per_request: ClassVar[tuple[str, ...]] = ("gamma",)

    def __post_init__(self) -> None:
        finite = math.nextafter(math.inf, 0)
        self.check_number("gamma", 0, finite, "a finite number of nats, at least 0", "SDAR's setting is 0.35.")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def choose(self, candidates: Candidates) -> Tensor:
        committable = candidates.committable
        entropy = torch.where(committable, candidates.need("entropy", self), math.inf)
        sums = entropy.double().sort(dim=1).values.cumsum(dim=1)
        count = (sums < setting(self.gamma, sums)).sum(dim=1).clamp(min=1)
        return (rank(-entropy) < count[:, None]) & committable
