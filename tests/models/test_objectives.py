"""What else an objective can be: other masks and blocks, plain weights, complementary masks, a shift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.test_training import SMALL, small_batch
from training.data import BLOCK, EOS_PADDING, PROMPT, RESPONSE, Batch
from training.masked_diffusion import masked_diffusion
from training.model import TinyModel
from training.objective import (
    Inputs,
    Noise,
    block_diffusion,
    dense_mask,
    learning_prompts,
    next_token,
    token_losses,
)
from training.tokenizer import USER_ID
from training.trainer import Trainer

CPU = torch.device("cpu")
MASK = USER_ID  # not in these documents
NOISE = Noise(mask_id=MASK, padding_weight=0.5)
Objective = Callable[[Batch, Noise], Inputs]


def by_blocks(batch: Batch, noise: Noise) -> Inputs:
    return block_diffusion(batch, batch.tokens.shape[1] // noise.block, torch.Generator().manual_seed(0), noise)


def whole(batch: Batch, noise: Noise) -> Inputs:
    return masked_diffusion(batch, torch.Generator().manual_seed(0), replace(noise, blockwise=0.0))


def block_by_block(batch: Batch, noise: Noise) -> Inputs:
    return masked_diffusion(batch, torch.Generator().manual_seed(0), replace(noise, blockwise=1.0))


EVERY = pytest.mark.parametrize("objective", [by_blocks, whole, block_by_block])


def response_of(batch: Batch) -> Tensor:
    return (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)


@EVERY
def test_plain_losses_are_a_mean_over_masked_tokens(objective: Objective) -> None:
    inputs = objective(small_batch(), replace(NOISE, by_rate=False))
    masked = inputs.input_ids[:, -inputs.targets.shape[1] :] == MASK
    assert masked.any()
    assert not inputs.weights[~masked].any()
    assert set(inputs.weights[masked].unique().tolist()) <= {0.5, 1.0}
    assert float(inputs.scale) == float(inputs.weights.sum())


@EVERY
def test_prompts_are_learnt_as_responses_are(objective: Objective) -> None:
    batch, plain = small_batch(), replace(NOISE, by_rate=False)
    learnt = learning_prompts(batch)
    assert torch.equal(learnt.kinds == PROMPT, torch.zeros_like(learnt.kinds, dtype=torch.bool))
    assert torch.equal(response_of(learnt), response_of(batch) | (batch.kinds == PROMPT))
    assert torch.equal(learnt.tokens, batch.tokens)
    inputs = objective(learnt, plain)
    masked = inputs.input_ids[:, -inputs.targets.shape[1] :] == MASK
    before = objective(batch, plain)
    assert int(masked.sum()) > int((before.input_ids[:, -before.targets.shape[1] :] == MASK).sum())
    assert set(inputs.weights[masked].unique().tolist()) <= {0.5, 1.0}


@EVERY
def test_complementary_masks_show_every_response_token_once(objective: Objective) -> None:
    batch = small_batch()
    inputs = objective(batch, replace(NOISE, complementary=True))
    alone = objective(batch, NOISE)
    masked = inputs.input_ids[:, -inputs.targets.shape[1] :] == MASK
    dim = 1 if objective is by_blocks else 0
    first, second = masked.chunk(2, dim)
    assert torch.equal(first, alone.input_ids[:, -alone.targets.shape[1] :] == MASK), "the first is what there is alone"
    targets, again = inputs.targets.chunk(2, dim)
    assert torch.equal(targets, again)
    assert first.any()
    assert second.any()
    if objective is block_by_block:
        # Blocks before the current one are clean in both, those after it masked in both.
        assert not ((first | second) & ~response_of(batch)).any()
        assert (first & second).any()
    else:
        assert not (first & second).any()
    if objective is whole:
        assert torch.equal(first | second, response_of(batch))
    assert float(inputs.scale) == pytest.approx(2 * float(alone.scale), rel=1e-6)


@pytest.mark.parametrize("block", [8, BLOCK])
def test_a_noisy_block_sees_its_own_copy_and_the_clean_blocks_before(block: int) -> None:
    """As the decoder does: both copies equal a plain block-causal forward over [clean blocks, noisy block]."""
    torch.manual_seed(0)
    model, batch = TinyModel(SMALL).double(), small_batch()
    inputs = by_blocks(batch, replace(NOISE, block=block, complementary=True))
    length, width = batch.tokens.shape[1], inputs.input_ids.shape[1]
    mask = dense_mask(inputs.visible, *inputs.input_ids.shape, CPU)
    trained = model(inputs.input_ids, inputs.positions, mask)
    checked = 0
    for row in range(batch.tokens.shape[0]):
        for first in range(length, width, block):
            rows = slice(first, first + block)
            if not inputs.weights[row, first - length : first - length + block].any():
                continue
            start = int(inputs.positions[row, first])
            source = _place(batch, row, inputs.targets[row, first - length : first - length + block], start)
            clean = batch.tokens[row, source - start : source]
            ids = torch.cat((clean, inputs.input_ids[row, rows]))[None]
            positions = torch.arange(start + block)[None]
            block_causal = (positions[:, :, None] // block >= positions[:, None] // block)[:, None]
            plain = model(ids, positions, block_causal)[0, start:]
            torch.testing.assert_close(trained[row, rows], plain, rtol=1e-9, atol=1e-9)
            checked += 1
    assert checked > 4


def _place(batch: Batch, row: int, tokens: Tensor, position: int) -> int:
    """Where a block of tokens that begins at a position of its document stands in a row."""
    same = (batch.tokens[row].view(-1, len(tokens)) == tokens).all(-1)
    same &= batch.positions[row, :: len(tokens)] == position
    return int(same.nonzero()[0]) * len(tokens)


@EVERY
@pytest.mark.parametrize("complementary", [False, True])
def test_with_a_shift_the_row_before_predicts(objective: Objective, complementary: bool) -> None:
    batch = small_batch()
    noise = replace(NOISE, complementary=complementary)
    plain, moved = objective(batch, noise), objective(batch, replace(noise, shift=1))
    rows, width = plain.input_ids.shape
    first = width - plain.targets.shape[1]
    assert torch.equal(moved.input_ids, plain.input_ids)
    assert moved.targets.shape == (rows, width)
    docs = batch.docs if objective is not by_blocks else None
    expected = torch.zeros(rows, width)
    for row in range(rows):
        for i in plain.weights[row].nonzero().flatten().tolist():
            at, place = first + i, int(plain.positions[row, first + i])
            if objective is by_blocks and place % BLOCK == 0:
                before = _place(batch, row, plain.targets[row, i : i + BLOCK], place) - 1
            else:
                before = at - 1
            if docs is not None:
                assert docs[row % len(docs), before] == docs[row % len(docs), at]
            assert place == 0 or int(plain.positions[row, before]) == place - 1
            assert moved.targets[row, before] == plain.targets[row, i]
            expected[row, before] += plain.weights[row, i]
    torch.testing.assert_close(moved.weights, expected)
    assert torch.equal(moved.scale, plain.scale)


def test_next_token_is_the_plain_loss_of_a_causal_model() -> None:
    torch.manual_seed(0)
    model, batch = TinyModel(SMALL).double(), small_batch()
    inputs = next_token(batch)
    mask = dense_mask(inputs.visible, *inputs.input_ids.shape, CPU)
    losses = token_losses(model.hidden(inputs.input_ids, inputs.positions, mask), model.lm_head.weight, inputs.targets)
    logits = model(inputs.input_ids, inputs.positions, mask).detach()
    learnt = total = 0.0
    for row in range(2):
        for i in range(1, batch.tokens.shape[1]):
            weight = {RESPONSE: 1.0, EOS_PADDING: 0.2, 4: 1.0}.get(int(batch.kinds[row, i]), 0.0)
            if batch.docs[row, i] == batch.docs[row, i - 1]:
                learnt += weight
                total += weight * float(F.cross_entropy(logits[row, i - 1].float(), batch.tokens[row, i]))
    assert float(inputs.scale) == pytest.approx(learnt, rel=1e-5)
    assert float((losses * inputs.weights).sum()) == pytest.approx(total, rel=1e-4)


@EVERY
def test_a_trainer_makes_logits_of_no_row_without_a_weight(objective: Objective) -> None:
    torch.manual_seed(0)
    model, inputs = TinyModel(SMALL), objective(small_batch(), NOISE)
    trainer = Trainer(model, 1, 1e-3, 0.0, dense=True, compiled=False, autocast=torch.float32)
    asked: list[int] = []

    def watched(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        asked.append(hidden.shape[0] * hidden.shape[1])
        return token_losses(hidden, weight, targets)

    trainer.losses = watched
    mask = dense_mask(inputs.visible, *inputs.input_ids.shape, CPU)
    every = token_losses(model.hidden(inputs.input_ids, inputs.positions, mask), model.lm_head.weight, inputs.targets)
    torch.testing.assert_close(trainer.forward(inputs), every.where(inputs.weights > 0, 0.0))
    assert asked == [int((inputs.weights > 0).sum())]
    assert asked[0] < inputs.targets.numel()
