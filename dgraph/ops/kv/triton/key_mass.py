"""dgraph::key_mass on CUDA: the kernels of dgraph::kv_votes, in which a row without a limit does not vote."""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.ops.kv.key_mass import EVERY_ROW, every_sequence
from dgraph.ops.kv.triton import kv_votes


def kernel(
    q: Tensor,
    k: Tensor,
    flags: Tensor,
    key_positions: Tensor,
    cu_rows: Tensor,
    cu_keys: Tensor,
    limit: Tensor,
    scale: float,
    k_scale: Tensor | None = None,
) -> Tensor:
    """dgraph::key_mass; see its contract."""
    rows = torch.arange(len(q), device=q.device)
    where = rows, key_positions, cu_rows, cu_keys, limit.masked_fill(~flags, 0), *every_sequence(cu_rows)
    return kv_votes.kernel(q, k, *where, scale, *EVERY_ROW, k_scale)
