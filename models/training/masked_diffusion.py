"""The training objective of a full bidirectional model: masked diffusion of whole responses, as LLaDA decodes.

Every row of a document sees every other, the prompt is always clean, and row i predicts its own token. A response is
noised in one of two ways. Jointly: each of its tokens is masked with probability t ~ U(0, 1). Or as a decoder that
goes block by block meets it: earlier blocks are clean, later ones all masked, and t rules the current block alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .data import EOS_PADDING, RESPONSE, Batch
from .objective import EOS_PADDING_WEIGHT, SMALLEST_RATE, Inputs, loss_weights
from .tokenizer import MASK_ID

BLOCKWISE_SHARE = 0.5
"""Share of the documents noised as block-by-block decoding meets them."""
START_SHARE = 0.25
"""Share of those whose current block is all masked, as at its first step."""
BLOCK_LENGTHS = (8, 16, 32, 32)
"""Lengths of a decoding block, drawn per document."""


def masked_diffusion(
    batch: Batch,
    generator: torch.Generator,
    blockwise_share: float = BLOCKWISE_SHARE,
    padding_weight: float = EOS_PADDING_WEIGHT,
) -> Inputs:
    """The rows of `batch` with masked responses; the loss of a token is divided by its chance to be masked.

    The scale is the summed weight of the tokens that could have been masked.
    """
    docs = batch.docs
    response = (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)
    chance = mask_chance(batch, response, generator, blockwise_share)
    drawn = torch.rand(chance.shape, generator=generator, device=chance.device)
    masked = response & (drawn < chance)
    weights = loss_weights(batch.kinds, False, padding_weight) * (chance > 0)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return docs[row, query] == docs[row, key]

    return Inputs(
        input_ids=batch.tokens.masked_fill(masked, MASK_ID),
        positions=batch.positions,
        visible=visible,
        targets=batch.tokens,
        weights=weights * masked / chance.clamp_min(SMALLEST_RATE),
        scale=weights.sum(),
        tasks=batch.tasks,
    )


def mask_chance(batch: Batch, response: Tensor, generator: torch.Generator, blockwise_share: float) -> Tensor:
    """f32 [rows, length]: each token's chance to be masked, were it of a response; drawn per document.

    Without reading a size from the device: no document has fewer than eight tokens, and the last place of each table
    is that of padding, whose document is -1. Rates are spread evenly over the documents of a batch.
    """
    length, device = batch.tokens.shape[1], batch.tokens.device
    count = batch.tokens.numel() // 8 + 1

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    golden = torch.arange(count, device=device, dtype=torch.float64) * 0.6180339887498949
    rate = ((golden + uniform()[:1]) % 1).float().clamp_min(SMALLEST_RATE)
    blockwise = uniform() < blockwise_share
    rate = rate.masked_fill(blockwise & (uniform() < START_SHARE), 1.0)
    lengths = torch.tensor(BLOCK_LENGTHS, device=device)
    size = lengths[(uniform() * len(lengths)).long()]

    docs = batch.docs % count
    first = _per_document(batch.positions.where(response, length), docs, count, "amin")
    end = _per_document(batch.positions.where(batch.kinds == RESPONSE, -1), docs, count, "amax") + 1
    last = _per_document(batch.positions.where(response, -1), docs, count, "amax")
    blocks = torch.minimum(end - first, last - first) // size + 1  # those the answer touches
    current = (uniform() * blocks).long()
    block = (batch.positions - first[docs]) // size[docs]
    in_turn = torch.where(block == current[docs], rate[docs], (block > current[docs]).float())
    return torch.where(blockwise[docs], in_turn, rate[docs])


def _per_document(values: Tensor, docs: Tensor, count: int, reduce: str) -> Tensor:
    """`amin` or `amax` of values i64 [rows, length] over each of `count` documents."""
    start = values.new_zeros(count)
    return start.scatter_reduce_(0, docs.flatten(), values.flatten(), reduce, include_self=False)
