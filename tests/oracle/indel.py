"""LLaDA2.2's joint threshold with insertions and deletions for one sequence, block by block in plain Python lists.

As `tests.oracle.editing`, but that two of the predicted ids change how many positions there are. A block is a list of
cells, each a token or a mask, that knows whether it was there as a mask when the block began. A pass picks which cells
are written, and goes through the list once: a cell that gets the one id is dropped, a cell that gets the other is kept
as it was, with a fresh mask before it. What is too long is cut, what is too short gets masks. The prompt stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tests.oracle import llada2
from tests.oracle.qwen3 import Cache, Weights, project


@dataclass
class Trace:
    """What `generate` did: the response, passes in all, and how many cells were dropped, opened and replaced."""

    tokens: list[int] = field(default_factory=list)
    passes: int = 0
    dropped: int = 0
    opened: int = 0
    edits: int = 0


@dataclass(frozen=True)
class Cell:
    """A position of the block: its token, None for a mask; whether it began as a mask."""

    token: int | None
    original: bool


@torch.no_grad()
def generate(
    weights: Weights,
    config: llada2.Config,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    block_length: int,
    mask_id: int,
    eos_ids: Sequence[int],
    threshold: float,
    edit_threshold: float,
    max_post_edit_steps: int,
    delete_id: int,
    split_id: int,
) -> Trace:
    """Decode greedily; the mask token is never predicted."""
    size, end, trace = block_length, len(prompt) + max_new_tokens, Trace()
    capacity = -(-end // size) * size
    canvas = [*prompt, *[mask_id] * (capacity - len(prompt))]
    cache = Cache(config, capacity, weights["lm_head.weight"])  # type: ignore[arg-type]

    def forward(start: int, stop: int) -> torch.Tensor:
        limits = [(p // size + 1) * size for p in range(start, stop)]
        return llada2.forward(weights, config, canvas[start:stop], range(start, stop), limits, cache)

    first = len(prompt) // size * size
    if first:
        forward(0, first)
    for start in range(first, capacity, size):
        given = max(len(prompt) - start, 0)
        cells = [Cell(None, True) for _ in range(size - given)]
        passes = late = 0
        while True:
            logits = project(weights, forward(start, start + size))[given:]
            logits[:, mask_id] = -torch.inf
            sure, token = (values.tolist() for values in logits.softmax(dim=-1).max(dim=-1))
            logits[:, [delete_id, split_id]] = -torch.inf
            plain = logits.argmax(dim=-1).tolist()
            trace.passes, passes = trace.passes + 1, passes + 1
            masks = [i for i, cell in enumerate(cells) if cell.token is None]
            originals = [i for i in masks if cells[i].original]
            late += not originals
            last = late > max_post_edit_steps or passes > size + max_post_edit_steps
            if last:
                token = [p if t in (delete_id, split_id) else t for t, p in zip(token, plain, strict=True)]
            written = [i for i in masks if sure[i] > threshold]
            required = 1 + len(masks) - len(originals)
            if len(written) < required:
                written = sorted(masks, key=lambda i: -sure[i])[:required]
            if last or not originals:
                written = masks
            edited = [
                i
                for i, cell in enumerate(cells)
                if cell.token is not None and token[i] != cell.token and sure[i] > edit_threshold
            ]
            after: list[Cell] = []
            for i, cell in enumerate(cells):
                if i not in written and i not in edited:
                    after.append(cell)
                elif token[i] == delete_id:
                    trace.dropped += 1
                elif token[i] == split_id:
                    trace.opened += 1
                    after += [Cell(None, False), cell]
                else:
                    trace.edits += i in edited
                    after.append(replace(cell, token=token[i]))
            cells = (after + [Cell(None, False)] * size)[: size - given]
            canvas[start + given : start + size] = [mask_id if c.token is None else c.token for c in cells]
            if last or not (written or edited):
                break
        forward(start, start + size)  # later blocks read what the block has become
        if set(eos_ids) & set(canvas[max(start, len(prompt)) : start + size]):
            break
    output = canvas[len(prompt) : end]
    trace.tokens = output[: next((i for i, token in enumerate(output) if token in eos_ids), len(output))]
    return trace
