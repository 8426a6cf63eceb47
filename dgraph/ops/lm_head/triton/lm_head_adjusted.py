"""dgraph::lm_head_adjusted: the kernels of lm_head, after torch ops that adjust each chunk's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.ops.lm_head.lm_head_adjusted import decided_by
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
    sequence: Tensor,
    scale: Tensor,
    addend: Tensor,
    least: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dgraph::lm_head_adjusted; see its contract."""

    def adjust(rows: Tensor, live: Tensor, logits: Tensor) -> Tensor:
        row = torch.where(live, rows, 0)  # rows after the last of a list may hold any number
        of = torch.where(live, sequence[row], 0)
        return decided_by(logits, of, temperature[row], suppress, scale, addend, least)

    return lm_head.decode_candidates(
        h, weight, bias, candidate, temperature, seed, max_num_logits, suppress, packed, adjust=adjust
    )
