"""Independent decoders in plain PyTorch: block diffusion over a cache, and masked diffusion of everything.

Both are greedy and work on one block of masks at a time: a step is one forward, then the most confident masked rows
of the block are committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .data import BLOCK
from .model import KeyValueCache, TinyModel
from .tokenizer import EOS_ID, MASK_ID, PAD_ID


@dataclass
class Decoded:
    """One sequence's response: ids up to its first end token (left out), and counts of its decoding.

    steps: denoising forwards; committed: tokens they committed, end padding too; output: tokens a reader gets,
    the first end token included; blocks: finished blocks.
    """

    ids: list[int] = field(default_factory=list)
    steps: int = 0
    committed: int = 0
    output: int = 0
    blocks: int = 0


def summarize(results: Iterable[Decoded]) -> dict[str, float]:
    """Sums over sequences: tokens committed per step, tokens output per step, steps per block."""
    results = list(results)
    steps = sum(r.steps for r in results)
    return {
        "sequences": len(results),
        "steps": steps,
        "committed_per_step": round(sum(r.committed for r in results) / steps, 3),
        "output_per_step": round(sum(r.output for r in results) / steps, 3),
        "steps_per_block": round(steps / sum(r.blocks for r in results), 3),
    }


@torch.inference_mode()
def decode(
    model: TinyModel,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    threshold: float | None = 0.9,
    block: int = BLOCK,
) -> list[Decoded]:
    """Decode prompts of different lengths, all in one batch, as the model's family does.

    A step commits every masked row whose confidence (the probability of its most likely token) exceeds
    `threshold`, at least the most confident one; `threshold` None commits exactly one row a step. A sequence ends
    with the block that holds an end token.

    block: block length of a full bidirectional model; the blocks of a block-diffusion model are those it was
    trained with.
    """
    whole = model.config.family == "llada"
    device = model.lm_head.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    size = block if whole else BLOCK
    start = lengths.clone() if whole else lengths // size * size
    end = lengths + max_new_tokens
    reach = start + -(-(end - start) // size) * size
    columns = torch.arange(int(reach.max()), device=device)
    tokens = torch.where(columns < reach[:, None], MASK_ID, PAD_ID)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    method = _Everything(model, tokens, reach) if whole else _Cached(model, tokens, start)
    forward, finish = method.forward, method.finish
    results = [Decoded() for _ in prompts]
    offsets = torch.arange(size, device=device)
    active = torch.arange(len(prompts), device=device)
    while len(active):
        positions = start[active, None] + offsets
        masked = tokens[active[:, None], positions] == MASK_ID
        confidence, choice = model.lm_head(forward(active, positions)).float().softmax(-1).max(-1)
        confidence = confidence.masked_fill(~masked, -1.0)
        commit = torch.zeros_like(masked) if threshold is None else confidence > threshold
        commit.scatter_(1, confidence.argmax(1, keepdim=True), True)
        commit &= masked
        tokens[active[:, None], positions] = torch.where(commit, choice, tokens[active[:, None], positions])
        for row, number in zip(active.tolist(), commit.sum(1).tolist(), strict=True):
            results[row].steps += 1
            results[row].committed += number
        complete = ~(masked & ~commit).any(1)
        if not complete.any():
            continue
        finished = active[complete]
        stopped = (tokens[finished[:, None], positions[complete]] == EOS_ID).any(1)
        stopped |= start[finished] + size >= end[finished]
        for row in finished.tolist():
            results[row].blocks += 1
        if len(going_on := finished[~stopped]):
            finish(going_on, start[going_on, None] + offsets)
            start[going_on] += size
        active = active[~torch.isin(active, finished[stopped])]
    for row, (result, prompt) in enumerate(zip(results, prompts, strict=True)):
        response = tokens[row, len(prompt) : len(prompt) + max_new_tokens].tolist()
        result.ids = response[: response.index(EOS_ID)] if EOS_ID in response else response
        result.output = min(len(result.ids) + 1, max_new_tokens)
    return results


class _Cached:
    """Block diffusion: a block sees itself and the cached clean blocks before it, which are forwarded once more."""

    def __init__(self, model: TinyModel, tokens: Tensor, start: Tensor) -> None:
        self.model, self.tokens = model, tokens
        self.cache = KeyValueCache(model.config, tokens.shape[0], tokens.shape[1], model.lm_head.weight)
        if prefix := int(start.max()):
            everyone = torch.arange(len(tokens), device=tokens.device)
            self.forward(everyone, torch.arange(prefix, device=tokens.device).expand(len(tokens), -1))

    def forward(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of `rows` at `positions` [rows, T], whose keys and values enter the cache."""
        limit = (positions // BLOCK + 1) * BLOCK
        length = int(limit.max())
        visible = torch.arange(length, device=positions.device) < limit[:, :, None]
        view = self.cache.select(rows, length)
        return self.model.hidden(self.tokens[rows[:, None], positions], positions, visible[:, None], view)

    def finish(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Fix the keys and values of finished blocks."""
        return self.forward(rows, positions)


class _Everything:
    """Masked diffusion: every step forwards prompt and response whole, the masks of later blocks too."""

    def __init__(self, model: TinyModel, tokens: Tensor, end: Tensor) -> None:
        self.model, self.tokens, self.end = model, tokens, end

    def forward(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of `rows` at `positions` [rows, T]."""
        columns = torch.arange(int(self.end[rows].max()), device=positions.device)
        visible = (columns < self.end[rows, None])[:, None, None]
        tokens = self.tokens[rows, : len(columns)]
        hidden = self.model.hidden(tokens, columns.expand_as(tokens), visible)
        return hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[-1]))

    def finish(self, rows: Tensor, positions: Tensor) -> None:
        """Nothing is kept between steps."""
