"""dgraph::vocabulary_part on CUDA: the kernels of vocabulary_attention, of which a rank's ids are one share more."""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.ops.triton.vocabulary_attention import Share, Tiling, stream
from dgraph.ops.vocabulary_part import NUMBERS


def kernel(
    h: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seed: Tensor,
    cu_rows: Tensor,
    softcap: float | None,
    suppress: int,
    first: Tensor,
    vocab: int,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """dgraph::vocabulary_part; see its contract."""
    context = torch.empty(h.shape, dtype=torch.float32, device=h.device)
    numbers = torch.empty((len(h), NUMBERS), dtype=torch.float32, device=h.device)
    rows = temperature, seed, cu_rows, softcap, suppress
    stream(h, weight, *rows, context, Share(numbers, first, vocab), tiling)
    return context, numbers
