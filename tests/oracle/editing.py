"""LLaDA2.1's joint threshold for one sequence, block by block in plain Python: tokens are decoded, and edited.

A pass forwards a block after all that came before it. It writes its prediction v_i on masks where p(v_i) is above one
threshold (eq. 1), on the surest mask if none is, and on what was decoded before where v_i differs and p(v_i) is above
another (eq. 2). A block without masks gets a limited number of passes more, until one changes nothing. Tokens of the
prompt stay. The last block is decoded and edited as a whole, wherever the response ends in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.oracle import llada2
from tests.oracle.qwen3 import Cache, Weights, project


@dataclass
class Trace:
    """What `generate` did: the response, passes in all, and how many tokens were written over others."""

    tokens: list[int] = field(default_factory=list)
    passes: int = 0
    edits: int = 0


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
        block, after_masks = range(start, start + size), 0
        while True:
            masks = [p for p in block if canvas[p] == mask_id]
            if not masks and after_masks == max_post_edit_steps:
                break
            after_masks += not masks
            logits = project(weights, forward(start, start + size))
            logits[:, mask_id] = -torch.inf
            sure, token = (values.tolist() for values in logits.softmax(dim=-1).max(dim=-1))
            written = [p for p in masks if sure[p - start] > threshold]
            if masks and not written:
                written = [max(masks, key=lambda p: sure[p - start])]
            edited = [
                p
                for p in block
                if p >= len(prompt) and p not in masks and token[p - start] != canvas[p]
                if sure[p - start] > edit_threshold
            ]
            trace.passes += 1
            trace.edits += len(edited)
            for p in written + edited:
                canvas[p] = token[p - start]
            if not masks and not edited:
                break
        forward(start, start + size)  # later blocks read what the block has become
        if set(eos_ids) & set(canvas[max(start, len(prompt)) : start + size]):
            break
    output = canvas[len(prompt) : end]
    trace.tokens = output[: next((i for i, token in enumerate(output) if token in eos_ids), len(output))]
    return trace
