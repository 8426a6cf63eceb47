"""Which of the predicted tokens of a step are committed. Vectorised over sequences, on the device, no host
read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dgraph.errors import InputError

THRESHOLD = 0.9
"""Confidence above which a token is committed, unless the caller says otherwise."""


@dataclass(frozen=True)
class Candidates:
    """What a step offers for the current block of b sequences, all [b, B] unless stated.

    token i64: predicted, -1 where there is none; confidence f32: its probability, -inf where nothing can be
    committed (not masked, evicted, or no token); masked bool: not decoded yet; current i64: the block's tokens
    as they were forwarded; step i64[b]: steps of this block that decoded something, from 0; decoded i64[b]:
    tokens that they decoded; start i64[b]: position of the block's first row; prompt i64[b]: index of the
    sequence's prompt among all of the call.
    """

    token: Tensor
    confidence: Tensor
    masked: Tensor
    current: Tensor
    step: Tensor
    decoded: Tensor
    start: Tensor
    prompt: Tensor

    @property
    def committable(self) -> Tensor:
        """bool[b, B]"""
        return self.confidence > -math.inf


class Policy(Protocol):
    """A decode policy."""

    def choose(self, candidates: Candidates) -> Tensor:
        """bool[b, B]: the positions whose token is committed.

        Every sequence with a committable position gets at least one; a position that is not committable,
        none. Runs on the device and reads nothing back, and may be captured in a CUDA graph.
        """
        ...


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Commit what is more confident than `threshold`, at least the single most confident (ties: lower
    position).

    The comparison is strict (SDAR's rule) and in fp32, so threshold=1.0 commits one token per step.
    """

    threshold: float

    def __post_init__(self) -> None:
        value = self.threshold
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise InputError(
                f"ConfidenceThreshold: threshold is a probability in (0, 1], got {value!r}. "
                f"Published settings lie between 0.8 and 0.95; 1.0 decodes one token per step."
            )

    def choose(self, candidates: Candidates) -> Tensor:
        confidence = candidates.confidence
        best = torch.zeros_like(confidence, dtype=torch.bool)
        best.scatter_(1, confidence.argmax(dim=1, keepdim=True), True)
        return ((confidence > self.threshold) | best) & candidates.committable


@dataclass(frozen=True)
class FixedSteps:
    """Denoise a block of B tokens in `steps` steps: step i commits the n_i most confident (ties: lower
    position).

    n_i = B // steps, and one more in the first B % steps steps; at least one. A block that begins with the
    prompt's remainder has fewer masks and needs fewer steps; one whose rows were evicted may need more.
    """

    steps: int

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InputError(
                f"FixedSteps: steps is a number of denoising steps per block, at least 1, got {self.steps!r}."
            )

    def choose(self, candidates: Candidates) -> Tensor:
        confidence, step = candidates.confidence, candidates.step
        b, block = confidence.shape
        count = (block // self.steps + (step < block % self.steps).long()).clamp(min=1)
        order = confidence.argsort(dim=1, descending=True, stable=True)
        columns = torch.arange(block, device=confidence.device).expand(b, block)
        rank = torch.empty_like(order).scatter_(1, order, columns)
        return (rank < count[:, None]) & candidates.committable


def policy_of(threshold: float | None, steps: int | None) -> Policy:
    """The policy that a caller's settings mean: a threshold (0.9 if neither is given) or steps per block.

    Raises `InputError` for both at once, or a value out of range.
    """
    if threshold is not None and steps is not None:
        raise InputError(f"give either threshold ({threshold}) or steps ({steps}), not both.")
    if steps is not None:
        return FixedSteps(steps)
    return ConfidenceThreshold(THRESHOLD if threshold is None else threshold)
