"""The two training objectives: next-token prediction, and block diffusion on a clean and a noisy copy.

Block diffusion as SDAR decodes: blocks are aligned to absolute positions, a clean block sees itself and every
earlier clean block of its document (prompt blocks too), a noisy block sees itself and the earlier clean blocks.
Row i predicts its own token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import BLOCK, EOS_PADDING, RESPONSE, TEXT_PROMPT, Batch
from .tokenizer import MASK_ID

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's mask_mod: (row, head, query index, key index) -> bool."""

EOS_PADDING_WEIGHT = 0.2
SMALLEST_RATE = 0.02
"""Lower end of the masking rate t, so that 1 / t stays bounded."""


@dataclass(frozen=True)
class Inputs:
    """One forward's inputs and its loss: the last `targets.shape[1]` rows predict `targets`.

    input_ids, positions i64 [R, T]; targets i64 [R, P]; weights f32 [R, P] (0 where nothing is learnt);
    scale: what the weighted sum of losses is divided by; tasks i64 [R, P] for the log.
    """

    input_ids: Tensor
    positions: Tensor
    visible: Visible
    targets: Tensor
    weights: Tensor
    scale: Tensor
    tasks: Tensor


def loss_weights(kinds: Tensor, with_text_prompts: bool, padding_weight: float = EOS_PADDING_WEIGHT) -> Tensor:
    """f32 weights by token kind: responses 1, end padding as given, open-text prompts 1 if asked, others 0."""
    weights = (kinds == RESPONSE).float() + padding_weight * (kinds == EOS_PADDING)
    return weights + (kinds == TEXT_PROMPT) if with_text_prompts else weights


def next_token(batch: Batch) -> Inputs:
    """Causal language modelling within each document; targets are shifted by one."""
    docs = batch.docs

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (docs[row, query] == docs[row, key]) & (key <= query)

    weights = loss_weights(batch.kinds, with_text_prompts=True)
    weights = F.pad(weights[:, 1:] * (docs[:, 1:] == docs[:, :-1]), (0, 1))
    targets = F.pad(batch.tokens[:, 1:], (0, 1))
    tasks = F.pad(batch.tasks[:, 1:], (0, 1))
    return Inputs(batch.tokens, batch.positions, visible, targets, weights, weights.sum(), tasks)


def block_diffusion(
    batch: Batch, noisy_blocks: int, generator: torch.Generator, padding_weight: float = EOS_PADDING_WEIGHT
) -> Inputs:
    """The rows of `batch` followed by noisy copies of up to `noisy_blocks` of each row's response blocks.

    Where a row has more response blocks, those to learn are drawn at random; where it has fewer, the rest of the
    noisy part carries no weight. Per block t ~ U(0, 1), stratified over the batch; each response token is masked
    with probability t and its loss divided by t. Prompt tokens of a block stay visible.
    """
    rows, length = batch.tokens.shape
    device = batch.tokens.device
    response = (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)
    has_response = response.view(rows, -1, BLOCK).any(-1)
    priority = torch.rand(has_response.shape, generator=generator, device=device) + has_response
    chosen = priority.topk(noisy_blocks, sorted=False).indices.sort().values

    def noisy(x: Tensor) -> Tensor:
        blocks = x.view(rows, -1, BLOCK)
        return blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).flatten(1)

    count = rows * noisy_blocks
    strata = torch.randperm(count, generator=generator, device=device)
    rate = (strata + torch.rand(count, generator=generator, device=device)) / count
    rate = rate.clamp_min(SMALLEST_RATE).view(rows, noisy_blocks).repeat_interleave(BLOCK, 1)
    targets, weights = noisy(batch.tokens), loss_weights(noisy(batch.kinds), False, padding_weight)
    masked = noisy(response) & (torch.rand(rate.shape, generator=generator, device=device) < rate)

    docs = torch.cat((batch.docs, noisy(batch.docs)), 1)
    positions = torch.cat((batch.positions, noisy(batch.positions)), 1)
    blocks = positions // BLOCK

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query_noisy, key_noisy = query >= length, key >= length
        query_block, key_block = blocks[row, query], blocks[row, key]
        earlier = torch.where(query_noisy, key_block < query_block, key_block <= query_block)
        return (docs[row, query] == docs[row, key]) & torch.where(
            key_noisy, query_noisy & (key_block == query_block), earlier
        )

    return Inputs(
        input_ids=torch.cat((batch.tokens, targets.masked_fill(masked, MASK_ID)), 1),
        positions=positions,
        visible=visible,
        targets=targets,
        weights=weights * masked / rate,
        scale=weights.sum(),
        tasks=noisy(batch.tasks),
    )


def dense_mask(visible: Visible, rows: int, length: int, device: torch.device) -> Tensor:
    """`visible` as a bool tensor [rows, 1, length, length]."""
    index = torch.arange(length, device=device)
    row = torch.arange(rows, device=device)[:, None, None]
    return visible(row, torch.zeros_like(row), index[:, None], index)[:, None]


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy f32 [R, P] of the last P rows of hidden [R, T, d] under the output weight [V, d]."""
    logits = F.linear(hidden[:, -targets.shape[1] :], weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
