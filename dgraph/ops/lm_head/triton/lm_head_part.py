"""dgraph::lm_head_part on CUDA: the kernels of lm_head, over a rank's ids as one share of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.ops.lm_head.lm_head_part import LOWEST, NUMBERS, standing_of
from dgraph.ops.lm_head.triton import lm_head


def kernel(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    candidate: Tensor,
    temperature: Tensor,
    seed: Tensor,
    max_num_logits: int,
    suppress: int,
    packed: bool,
    first: Tensor,
    vocab: int,
    current: Tensor | None = None,
    listed: bool | None = None,
) -> Tensor:
    """dgraph::lm_head_part; see its contract. `listed` as for the kernel of lm_head."""
    count = len(candidate)
    numbers = torch.zeros((count, NUMBERS), dtype=torch.float32, device=h.device)
    numbers[:, -1] = -1.0
    standing = torch.full((count + 1,), LOWEST, dtype=torch.float32, device=h.device)

    def measure(rows: Tensor, live: Tensor, logits: Tensor, token: Tensor | None) -> None:
        # Rows after the last of a list may hold any number; their values go to a row that is never read.
        assert current is not None
        row = torch.where(live, rows, 0)
        heat = temperature[row]
        found = standing_of(logits, first, current[row], suppress, vocab) / torch.where(heat > 0, heat, 1.0)
        standing.index_put_((torch.where(live, row, count),), found.clamp(min=LOWEST))

    rows = candidate, temperature, seed, max_num_logits, suppress, packed, listed
    hear = None if current is None else measure
    lm_head.decode(h, weight, bias, *rows, hear, lm_head.NOTHING, lm_head.Share(numbers, first, vocab))
    numbers[:, 6] = torch.where(candidate, standing[:-1], 0.0)
    return numbers
