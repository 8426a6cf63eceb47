"""Training objectives: next-token prediction, and block diffusion on a clean and a noisy copy.

Block diffusion is as SDAR decodes: blocks are aligned to absolute positions. A clean block sees itself and every
earlier clean block of its document (prompt blocks too). A noisy block sees itself and the earlier clean blocks. Row i
predicts its own token, or with a shift the token after it; see `Noise`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError

from .data import BLOCK, EOS_PADDING, PROMPT, RESPONSE, TEXT_PROMPT, Batch
from .tokenizer import MASK_ID

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's mask_mod: (row, head, query index, key index) -> bool."""

EOS_PADDING_WEIGHT = 0.2
BLOCKWISE_SHARE = 0.5
SMALLEST_RATE = 0.02
"""Lower end of the masking rate t, so that 1 / t stays bounded."""


@dataclass(frozen=True)
class Noise:
    """Masking of tokens, and the weights of their losses.

    Attributes:
        mask_id: id that stands for a masked token.
        block: rows of a diffusion block, which divides the block that documents are padded to.
        smallest_rate: lower end of the masking rate t.
        padding_weight: weight of the padding after a response; a token of the response has 1.
        by_rate: losses are divided by t, which makes their sum a bound on the likelihood (LLaDA, arXiv 2502.09992,
            equation 3); if not, it is the plain mean over masked tokens.
        complementary: each noisy block comes twice, and the second one masks the tokens that the first one shows. So
            every token is learnt in every step (Fast-dLLM v2, arXiv 2509.26328, section 3).
        shift: 0 where row i predicts token i. 1 where it predicts token i + 1, as the autoregressive model did that a
            diffusion model is made from (Dream, arXiv 2508.15487); the first token of a block is then predicted by
            the last clean row before it (Fast-dLLM v2).
        blockwise: for a bidirectional model, the share of documents that are noised as block-by-block decoding meets
            them: earlier blocks clean, later ones all masked.
        later_weight: in these, weight of tokens in blocks after the current one, which are not decoded yet; 0 learns
            the current block alone.
    """

    mask_id: int = MASK_ID
    block: int = BLOCK
    smallest_rate: float = SMALLEST_RATE
    padding_weight: float = EOS_PADDING_WEIGHT
    by_rate: bool = True
    complementary: bool = False
    shift: int = 0
    blockwise: float = BLOCKWISE_SHARE
    later_weight: float = 1.0


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


NOISE = Noise()


def part_of(inputs: Inputs, rank: int, world: int) -> Inputs:
    """The rows of one of several ranks; their weighted losses are still divided by the scale of all rows.

    Raises:
        InputError: the rows cannot be divided among `world` ranks.
    """
    rows = len(inputs.input_ids)
    if rows % world:
        raise InputError(f"{rows} rows of a batch cannot be divided among {world} ranks; give a multiple of {world}.")
    if world == 1:
        return inputs
    first, end, of_all = rows // world * rank, rows // world * (rank + 1), inputs.visible

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return of_all(row + first, head, query, key)

    given = (inputs.input_ids, inputs.positions, inputs.targets, inputs.weights, inputs.tasks)
    ids, positions, targets, weights, tasks = (each[first:end] for each in given)
    return Inputs(ids, positions, visible, targets, weights, inputs.scale, tasks)


def loss_weights(kinds: Tensor, with_text_prompts: bool, padding_weight: float = EOS_PADDING_WEIGHT) -> Tensor:
    """f32 weights by token kind: responses 1, end padding as given, open-text prompts 1 if asked, others 0."""
    weights = (kinds == RESPONSE).float() + padding_weight * (kinds == EOS_PADDING)
    return weights + (kinds == TEXT_PROMPT) if with_text_prompts else weights


def learning_prompts(batch: Batch) -> Batch:
    """The same, with prompts masked and learnt as responses are: pre-training (LLaDA, arXiv 2502.09992, section 2.2),
    where fine-tuning leaves the prompt as it is (section 2.3).
    """
    return replace(batch, kinds=batch.kinds.masked_fill(batch.kinds == PROMPT, RESPONSE))


def next_token(batch: Batch) -> Inputs:
    """Causal language modelling within each document; targets are shifted by one."""
    docs = batch.docs

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (docs[row, query] == docs[row, key]) & (key <= query)

    weights = loss_weights(batch.kinds, with_text_prompts=True)
    inputs = Inputs(batch.tokens, batch.positions, visible, batch.tokens, weights, weights.sum(), batch.tasks)
    inputs = shifted(inputs, torch.arange(-1, docs.shape[1] - 1, device=docs.device).expand_as(docs), docs)
    return replace(inputs, scale=inputs.weights.sum())


def shifted(inputs: Inputs, before: Tensor, docs: Tensor) -> Inputs:
    """The same, with each token predicted by another row: of all rows of `inputs`, not only the last.

    A token whose row is of another document carries no weight. Where a row predicts a token more than once, the weights
    are added.

    Args:
        inputs: where each of the last P rows predicts its own token.
        before: i64 [R, P], the row in [-1, T) that predicts each token; -1 for none.
        docs: i64 [R, T], the document of every row.
    """
    width = inputs.input_ids.shape[1]
    own = docs[:, width - before.shape[1] :]
    valid = (before >= 0) & (docs.gather(1, before.clamp_min(0)) == own)
    places = before.where(valid, width)  # a last column takes what no row predicts

    def placed(values: Tensor) -> Tensor:
        room = values.new_zeros(values.shape[0], width + 1)
        return room.scatter_(1, places, values)[:, :width]

    weights = torch.zeros_like(docs, dtype=inputs.weights.dtype)
    weights = F.pad(weights, (0, 1)).scatter_add_(1, places, inputs.weights)[:, :width]
    return replace(inputs, targets=placed(inputs.targets), weights=weights, tasks=placed(inputs.tasks))


def block_diffusion(batch: Batch, noisy_blocks: int, generator: torch.Generator, noise: Noise = NOISE) -> Inputs:
    """The rows of `batch` followed by noisy copies of up to `noisy_blocks` of each row's response blocks.

    Where a row has more response blocks, those to learn are drawn at random; where it has fewer, the rest of the
    noisy part carries no weight. Per block t ~ U(0, 1), stratified over the batch; each response token is masked
    with probability t. Prompt tokens of a block stay visible. See `Noise` for other choices.
    """
    rows, length = batch.tokens.shape
    device, size = batch.tokens.device, noise.block
    response = (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)
    has_response = response.view(rows, -1, size).any(-1)
    priority = torch.rand(has_response.shape, generator=generator, device=device) + has_response
    chosen = priority.topk(noisy_blocks, sorted=False).indices.sort().values

    def noisy(x: Tensor) -> Tensor:
        blocks = x.view(rows, -1, size)
        return blocks.gather(1, chosen[:, :, None].expand(-1, -1, size)).flatten(1)

    count = rows * noisy_blocks
    strata = torch.randperm(count, generator=generator, device=device)
    rate = (strata + torch.rand(count, generator=generator, device=device)) / count
    rate = rate.clamp_min(noise.smallest_rate).view(rows, noisy_blocks).repeat_interleave(size, 1)
    masked = noisy(response) & (torch.rand(rate.shape, generator=generator, device=device) < rate)
    if noise.complementary:
        masked = torch.cat((masked, noisy(response) & ~masked), 1)
        rate = torch.cat((rate, (1 - rate).clamp_min(noise.smallest_rate)), 1)
        chosen = chosen.repeat(1, 2)
    targets, weights = noisy(batch.tokens), loss_weights(noisy(batch.kinds), False, noise.padding_weight)
    weights, scale = weighed(weights, masked, rate, noise)

    docs = torch.cat((batch.docs, noisy(batch.docs)), 1)
    positions = torch.cat((batch.positions, noisy(batch.positions)), 1)
    blocks = positions // size
    copy = (torch.arange(docs.shape[1], device=device) - length) // (noisy_blocks * size)  # -1: clean

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query_block, key_block = blocks[row, query], blocks[row, key]
        earlier = torch.where(query >= length, key_block < query_block, key_block <= query_block)
        itself = (copy[query] == copy[key]) & (key_block == query_block)
        return (docs[row, query] == docs[row, key]) & torch.where(key >= length, itself, earlier)

    ids = torch.cat((batch.tokens, targets.masked_fill(masked, noise.mask_id)), 1)
    inputs = Inputs(ids, positions, visible, targets, weights, scale, noisy(batch.tasks))
    if noise.shift == 0:
        return inputs
    before = torch.arange(length - 1, docs.shape[1] - 1, device=device).view(1, -1, size).repeat(rows, 1, 1)
    before[:, :, 0] = chosen * size - 1
    return shifted(inputs, before.flatten(1), docs)


def weighed(weights: Tensor, masked: Tensor, rate: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Weights of the losses of masked tokens, and the divisor of their weighted sum.

    weights f32 [R, P]: weights of the tokens by kind; masked bool [R, P]; rate f32 [R, P]: the chance that each was
    masked.
    """
    if noise.by_rate:
        return weights * masked / rate, weights.sum()
    weights = weights * masked
    return weights, weights.sum().clamp_min(1.0)


def dense_mask(visible: Visible, rows: int, length: int, device: torch.device) -> Tensor:
    """`visible` as a bool tensor [rows, 1, length, length]."""
    index = torch.arange(length, device=device)
    row = torch.arange(rows, device=device)[:, None, None]
    return visible(row, torch.zeros_like(row), index[:, None], index)[:, None]


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy f32 [R, P] of the last P rows of hidden [R, T, d] under the output weight [V, d]."""
    logits = F.linear(hidden[:, -targets.shape[1] :], weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view(targets.shape)
