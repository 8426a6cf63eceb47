"""dgraph::lm_head_part on CUDA: the kernels of lm_head, over a rank's ids as one share of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.ops.lm_head.lm_head_part import NUMBERS
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
    listed: bool | None = None,
) -> Tensor:
    """dgraph::lm_head_part; see its contract. `listed` as for the kernel of lm_head."""
    numbers = torch.zeros((len(candidate), NUMBERS), dtype=torch.float32, device=h.device)
    numbers[:, -1] = -1.0
    rows = candidate, temperature, seed, max_num_logits, suppress, packed, listed
    lm_head.decode(h, weight, bias, *rows, None, lm_head.NOTHING, lm_head.Share(numbers, first, vocab))
    return numbers
