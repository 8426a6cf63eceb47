"""Decode policies on hand-made confidences, and against sorting in Python."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.runtime import Candidates, ConfidenceThreshold, FixedSteps

NONE = -torch.inf


def offer(confidence: Tensor, step: Tensor | None = None) -> Candidates:
    """Candidates of that confidence; tokens are their columns."""
    b, block = confidence.shape
    zeros = torch.zeros(b, dtype=torch.int64)
    token = torch.arange(block).expand(b, block)
    return Candidates(
        token=token,
        confidence=confidence,
        masked=confidence > NONE,
        current=torch.zeros_like(token),
        step=zeros if step is None else step,
        decoded=zeros,
        start=zeros,
        prompt=torch.arange(b),
    )


def test_threshold_is_strict_and_takes_at_least_one() -> None:
    confidence = torch.tensor([[0.5, 0.75, 0.25, NONE], [0.5, 0.5, 0.25, NONE], [NONE, NONE, NONE, NONE]])
    chosen = ConfidenceThreshold(0.5).choose(offer(confidence))
    assert chosen.tolist() == [[False, True, False, False], [True, False, False, False], [False] * 4]
    sure = torch.tensor([[1.0, 1.0]])
    assert ConfidenceThreshold(1.0).choose(offer(sure)).tolist() == [[True, False]]
    assert ConfidenceThreshold(1).choose(offer(sure)).tolist() == [[True, False]]


def test_fixed_steps_spread_the_remainder_over_the_first_steps() -> None:
    confidence = torch.tensor([[0.1, 0.4, 0.3, 0.2, 0.4, 0.1, NONE, 0.0]]).expand(4, 8)
    chosen = FixedSteps(3).choose(offer(confidence, torch.tensor([0, 1, 2, 9])))
    assert chosen.sum(1).tolist() == [3, 3, 2, 2]
    assert chosen[0].nonzero()[:, 0].tolist() == [1, 2, 4]
    assert chosen[2].nonzero()[:, 0].tolist() == [1, 4]
    many = FixedSteps(20).choose(offer(confidence, torch.tensor([0, 7, 8, 30])))
    assert many.sum(1).tolist() == [1, 1, 1, 1]
    assert many[0].nonzero()[:, 0].tolist() == [1]  # ties: lower position
    few = torch.tensor([[NONE, 0.2, NONE, NONE]])
    assert FixedSteps(1).choose(offer(few)).tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("block", [4, 8, 32])
def test_policies_choose_what_sorting_chooses(block: int) -> None:
    rng = random.Random(block)
    for _ in range(50):
        values = [[rng.choice([NONE, rng.randint(1, 8) / 8]) for _ in range(block)] for _ in range(rng.randint(1, 4))]
        steps = [rng.randrange(block) for _ in values]
        threshold, count = rng.randint(1, 8) / 8, rng.randint(1, block + 3)
        confidence, step = torch.tensor(values), torch.tensor(steps)
        by_threshold = ConfidenceThreshold(threshold).choose(offer(confidence, step))
        by_count = FixedSteps(count).choose(offer(confidence, step))
        for row, at, first, second in zip(values, steps, by_threshold, by_count, strict=True):
            order = sorted((i for i, v in enumerate(row) if v > NONE), key=lambda i: (-row[i], i))
            above = [i for i in order if row[i] > threshold] or order[:1]
            assert first.nonzero()[:, 0].tolist() == sorted(above)
            n = max(1, block // count + (at < block % count))
            assert second.nonzero()[:, 0].tolist() == sorted(order[:n])


@pytest.mark.parametrize("value", [0, -0.1, 1.01, float("nan"), True, "0.9", None])
def test_threshold_bounds(value: object) -> None:
    with pytest.raises(InputError, match=r"threshold is a probability in \(0, 1\], got"):
        ConfidenceThreshold(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -3, 2.5, True, None])
def test_step_bounds(value: object) -> None:
    with pytest.raises(InputError, match="denoising steps per block, at least 1, got"):
        FixedSteps(value)  # type: ignore[arg-type]


def test_policies_are_values() -> None:
    assert ConfidenceThreshold(0.9) == ConfidenceThreshold(0.9)
    assert repr(FixedSteps(4)) == "FixedSteps(steps=4)"
    assert len({FixedSteps(4), FixedSteps(4), ConfidenceThreshold(0.9)}) == 2
