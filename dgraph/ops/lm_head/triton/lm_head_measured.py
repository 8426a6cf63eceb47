"""dgraph::lm_head_measured: the kernels of lm_head, and the statistics in torch ops on each chunk's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.ops.lm_head.triton import lm_head
from dgraph.ops.statistics import declared, measure_rows


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
    slot: Tensor,
    current: Tensor,
    state: Tensor,
    statistics: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dgraph::lm_head_measured; see its contract."""
    chosen = declared(statistics)
    measured = torch.zeros((len(candidate) + 1, len(chosen)), dtype=torch.float32, device=h.device)

    def measure(rows: Tensor, live: Tensor, logits: Tensor, token: Tensor | None) -> None:
        assert token is not None, "a program without shares decides tokens"
        # Rows after the last of a list may hold any number; their values go to a row that is never read.
        row = torch.where(live, rows, 0)
        of_rows = temperature[row], suppress, slot[row], current[row]
        values = measure_rows(chosen, logits, token[row], *of_rows, state, live)
        measured.index_put_((torch.where(live, row, len(candidate)),), values)

    found = lm_head.decode_candidates(
        h, weight, bias, candidate, temperature, seed, max_num_logits, suppress, packed, None, measure
    )
    return (*found, measured[:-1].clone())  # an op's results are tensors of their own
