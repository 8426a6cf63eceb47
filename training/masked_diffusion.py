"""The training objective of a full bidirectional model: masked diffusion of whole responses, as LLaDA decodes.

Every row of a document sees every other, the prompt is always clean, and row i predicts its own token. A response is
noised in one of two ways. Jointly: each of its tokens is masked with probability t ~ U(0, 1). Blockwise, as a decoder
that goes block by block meets it: earlier blocks are clean, later ones all masked. Then t rules the current block
alone.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from .data import EOS_PADDING, RESPONSE, Batch
from .objective import NOISE, SMALLEST_RATE, Inputs, Noise, loss_weights, shifted, weighed

START_SHARE = 0.25
"""Share of documents noised block by block whose current block is all masked, as at its first step."""
BLOCK_LENGTHS = (8, 16, 32, 32)
"""Lengths of a decoding block, drawn per document."""


def masked_diffusion(batch: Batch, generator: torch.Generator, noise: Noise = NOISE) -> Inputs:
    """The rows of `batch` with masked responses; the rate that `Noise` speaks of is a token's chance to be masked.

    With complementary masks the rows come twice. The block is that of decoding, drawn from `BLOCK_LENGTHS`.
    """
    response = (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)
    chance, later = mask_chance(batch, response, generator, noise.blockwise, noise.smallest_rate)
    drawn = torch.rand(chance.shape, generator=generator, device=chance.device)
    masked = response & (drawn < chance)
    if noise.complementary:
        left_to_chance = (chance > 0) & (chance < 1)  # earlier blocks stay clean, later ones masked
        masked = torch.cat((masked, response & (masked ^ left_to_chance)))
        chance = torch.cat((chance, torch.where(left_to_chance, 1 - chance, chance)))
        later = later.repeat(2, 1)
        batch = Batch(**{field.name: getattr(batch, field.name).repeat(2, 1) for field in fields(batch)})
    docs = batch.docs
    weights = loss_weights(batch.kinds, False, noise.padding_weight) * (chance > 0)
    weights = torch.where(later, noise.later_weight * weights, weights)
    weights, scale = weighed(weights, masked, chance.clamp_min(noise.smallest_rate), noise)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return docs[row, query] == docs[row, key]

    ids = batch.tokens.masked_fill(masked, noise.mask_id)
    inputs = Inputs(ids, batch.positions, visible, batch.tokens, weights, scale, batch.tasks)
    if noise.shift == 0:
        return inputs
    return shifted(inputs, torch.arange(-1, docs.shape[1] - 1, device=docs.device).expand_as(docs), docs)


def mask_chance(
    batch: Batch,
    response: Tensor,
    generator: torch.Generator,
    blockwise: float,
    smallest_rate: float = SMALLEST_RATE,
) -> tuple[Tensor, Tensor]:
    """f32 [rows, length], each token's chance to be masked, were it of a response, drawn per document; and bool of the
    same shape, True in a block after the current one of a document that is noised block by block.

    No size is read from the device: no document has fewer than eight tokens, and the last place of each table
    is that of padding, whose document is -1. Rates are spread evenly over the documents of a batch.
    """
    length, device = batch.tokens.shape[1], batch.tokens.device
    count = batch.tokens.numel() // 8 + 1

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    golden = torch.arange(count, device=device, dtype=torch.float64) * 0.6180339887498949
    rate = ((golden + uniform()[:1]) % 1).float().clamp_min(smallest_rate)
    by_block = uniform() < blockwise
    rate = rate.masked_fill(by_block & (uniform() < START_SHARE), 1.0)
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
    return torch.where(by_block[docs], in_turn, rate[docs]), by_block[docs] & (block > current[docs])


def _per_document(values: Tensor, docs: Tensor, count: int, reduce: str) -> Tensor:
    """`amin` or `amax` of values i64 [rows, length] over each of `count` documents."""
    start = values.new_zeros(count)
    return start.scatter_reduce_(0, docs.flatten(), values.flatten(), reduce, include_self=False)
