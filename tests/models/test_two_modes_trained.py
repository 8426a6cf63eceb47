"""A trained model of two modes: its drafts are mostly kept, and its tokens are those of autoregression."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from training import two_modes
from training.two_modes import BLOCK, NUMBERS, losses, progressions, train

FOLDER = Path(__file__).parent / "trained_two_modes"
"""What `python -m training.two_modes` writes."""
NEW = 24


@functools.cache
def trained() -> CompiledModel:
    return dgraph.optimize(dgraph.load(FOLDER, dtype=torch.float32), "dense", backend="eager")


def prompts_of(count: int) -> list[list[int]]:
    """Beginnings of progressions that were not trained on, of 2 to 24 numbers."""
    draw = torch.Generator().manual_seed(11)
    lengths = torch.randint(2, 25, (count,), generator=draw).tolist()
    return [row[:n] for row, n in zip(progressions(count, 24, draw).tolist(), lengths, strict=True)]


def test_a_step_holds_until_it_changes() -> None:
    rows = progressions(200, 40, torch.Generator().manual_seed(3))
    assert rows.min() >= 0
    assert rows.max() < NUMBERS
    steps = (rows[:, 1:] - rows[:, :-1]) % NUMBERS
    changed = (steps[:, 1:] != steps[:, :-1]).float().mean().item()
    assert changed == pytest.approx(two_modes.CHANGE, abs=0.01)
    assert torch.equal(rows, progressions(200, 40, torch.Generator().manual_seed(3)))


def test_a_few_steps_reduce_both_losses() -> None:
    def found(steps: int) -> tuple[float, float]:
        following, denoised = losses(train(steps, 16, 4e-3, 0), 64, torch.Generator().manual_seed(5))
        return following.item(), denoised.item()

    before, after = found(1), found(60)
    assert all(b < a - 0.1 for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.release)])
def test_self_speculation_gives_the_tokens_of_autoregression(count: int) -> None:
    prompts = prompts_of(count)
    mine, plain = (
        trained().generate(input_ids=prompts, max_new_tokens=NEW, policy=policy, max_batch=100)
        for policy in ("self_speculation", "autoregressive")
    )
    assert mine.token_ids == plain.token_ids
    assert plain.stats.sequence_steps == [NEW] * count
    # Of a draft and a step that verifies it, up to 8 tokens come.
    assert sum(mine.stats.sequence_steps) < 0.4 * sum(plain.stats.sequence_steps)


def test_it_goes_on_as_the_progression_does() -> None:
    """In both modes."""
    prompts = [[(first + step * i) % NUMBERS for i in range(12)] for first, step in ((0, 1), (5, 3), (7, 28), (2, 11))]
    wanted = [[(p[-1] + (p[1] - p[0]) * i) % NUMBERS for i in range(1, BLOCK + 1)] for p in prompts]
    for rule in ({"policy": "autoregressive"}, {"threshold": 0.9}):
        assert trained().generate(input_ids=prompts, max_new_tokens=BLOCK, **rule).token_ids == wanted
