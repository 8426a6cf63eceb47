"""Rules that commit tokens above a threshold; they differ in their fallback if too few are above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.plans.papers import DINFER, FAST_DLLM, LLADA2, SDAR, Paper
from dgraph.runtime.policies.base import Candidates, DecodeRule, best, leftmost, rank, setting, share, steps_of
from dgraph.runtime.policies.traits import Traits

THRESHOLD = 0.9
"""Confidence above which a token is committed, unless the caller says otherwise."""
FALLBACKS = ("top", "leftmost")
_USUAL = "Published settings lie between 0.8 and 0.95; 1.0 decodes one token per step."


def above(confidence: Tensor, threshold: float | Tensor, inclusive: bool) -> Tensor:
    """bool[b, B]: c > threshold (a number, or [b]), or c >= threshold; in fp32."""
    bar = setting(threshold, confidence)
    return confidence >= bar if inclusive else confidence > bar


@dataclass(frozen=True)
class ConfidenceThreshold(DecodeRule):
    """Commit tokens that are more confident than `threshold`, at least the single most confident (ties: lower
    position).

    {i : c_i > threshold} (SDAR, arXiv 2510.06303; SGLang LowConfidence), or c_i >= threshold if `inclusive` (Fast-dLLM,
    arXiv 2505.22618); plus the arg max of c. The comparison is in fp32, so the strict rule with threshold 1.0 commits
    one token per step.
    """

    threshold: float
    inclusive: bool = False

    papers: ClassVar[tuple[Paper, ...]] = (SDAR, FAST_DLLM)
    name: ClassVar[str] = "confidence_threshold"
    traits: ClassVar[Traits] = Traits(holds_back=True)
    per_request: ClassVar[tuple[str, ...]] = ("threshold",)

    def __post_init__(self) -> None:
        self.check_threshold(hint=_USUAL)
        if type(self.inclusive) is not bool:
            raise self.refuse("inclusive", "true or false")

    def choose(self, candidates: Candidates) -> Tensor:
        offered = candidates.offered
        sure = above(offered, self.threshold, self.inclusive)
        return (sure | candidates.due(best(offered))) & candidates.committable


@dataclass(frozen=True)
class DynamicThreshold(DecodeRule):
    """Commit tokens above the threshold, or n_s tokens if fewer than n_s are above it.

    H = {i : c_i > threshold}, or c_i >= threshold if `inclusive`. It is committed if |H| >= n_s, else by `fallback`:
    "top" (SDAR low_confidence_dynamic, arXiv 2510.06303; LLaDA2.0, arXiv 2512.15745): the n_s most confident, which H
    is part of. "leftmost" (JetEngine's batched path): the n_s leftmost masks; the rest of H is not committed. n_s is
    that of `FixedSteps` over the block length in `steps` steps; None: one step per position, so that n_s = 1.

    JetEngine closes a block after `steps` steps even if masks remain; here it never does.
    """

    threshold: float = 0.85
    steps: int | None = None
    fallback: str = "top"
    inclusive: bool = False

    papers: ClassVar[tuple[Paper, ...]] = (SDAR, LLADA2)
    name: ClassVar[str] = "dynamic_threshold"
    per_request: ClassVar[tuple[str, ...]] = ("threshold", "steps")

    @property
    def traits(self) -> Traits:
        """See `DecodeRule`; with `steps` it counts those of each block, of which several may be open."""
        return Traits(holds_back=self.steps is None)

    def __post_init__(self) -> None:
        self.check_threshold(hint=_USUAL)
        self.check_steps(self.steps)
        self.check_choice("fallback", FALLBACKS)
        if type(self.inclusive) is not bool:
            raise self.refuse("inclusive", "true or false")

    def choose(self, candidates: Candidates) -> Tensor:
        offered, committable = candidates.offered, candidates.committable
        block = committable.shape[1]
        count = share(block, steps_of(self.steps, block), candidates.step)
        sure = above(offered, self.threshold, self.inclusive) & committable
        few = candidates.due((sure.sum(dim=1) < count)[:, None])
        if self.fallback == "top":
            instead = (rank(offered) < count[:, None]) & committable
        else:
            instead = leftmost(committable, count)
        return torch.where(few, instead, sure)


@dataclass(frozen=True)
class RelativeThreshold(DecodeRule):
    """Commit tokens at or above the threshold, or within `tolerance` of the best (dInfer's threshold decoder).

    c_i >= min(threshold, max_j c_j - tolerance). Where nothing passes the threshold, every position within
    `tolerance` of the most confident is committed: with near-uniform probabilities that is the whole block.
    In float64.
    """

    threshold: float = THRESHOLD
    tolerance: float = 1e-5

    papers: ClassVar[tuple[Paper, ...]] = (DINFER,)
    name: ClassVar[str] = "relative_threshold"
    traits: ClassVar[Traits] = Traits(holds_back=True)
    per_request: ClassVar[tuple[str, ...]] = ("threshold", "tolerance")

    def __post_init__(self) -> None:
        self.check_threshold(hint=_USUAL)
        self.check_number("tolerance", 0, 1, "a difference of probabilities in [0, 1]")

    def choose(self, candidates: Candidates) -> Tensor:
        offered = candidates.offered.double()
        near = offered.amax(dim=1, keepdim=True) - setting(self.tolerance, offered)
        bar = setting(self.threshold, offered)
        due = candidates.due(torch.ones_like(near, dtype=torch.bool))
        return (offered >= torch.where(due, near.minimum(bar), bar)) & candidates.committable
