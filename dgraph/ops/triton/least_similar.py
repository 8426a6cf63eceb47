"""dgraph::least_similar on CUDA: cached values are read and written by kernels, rows are ranked by two stable sorts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.ops.least_similar import ranked
from dgraph.ops.rows import offsets_of, sequence_of
from dgraph.ops.triton import feature_read, feature_write
from dgraph.ops.triton.rows import check_slots


def kernel(
    v: Tensor,
    v_cache: Tensor,
    full: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    share: float,
    adapt: Tensor | None = None,
) -> Tensor:
    """dgraph::least_similar; see its contract. Nothing is read on the host."""
    check_slots("least_similar", v_cache=v_cache)
    (n, heads, dim), (pages, page, *_) = v.shape, v_cache.shape
    if not n:
        return full.new_zeros(0)
    slots = v_cache.as_strided((pages, page, heads * dim), (*v_cache.stride()[:2], 1), v_cache.storage_offset())
    where = (positions, page_table, cu_rows)
    similar = ranked(v, feature_read.kernel(slots, *where).view(n, heads, dim))
    b = cu_rows.shape[0] - 1
    sequence = sequence_of(cu_rows, n)
    live = sequence < b
    free = live & ~full if adapt is None else live & ~full & adapt
    owner = torch.where(free, sequence, b)
    order = similar.argsort(stable=True)
    order = order[owner[order].argsort(stable=True)]  # by sequence, then by cosine, then by row
    first = offsets_of(free, cu_rows)
    count = (share * first.diff().double()).floor().long()
    owner = owner[order]
    rank = torch.arange(n, device=v.device) - first[owner]  # b has the rows behind the last sequence's
    taken = rank < F.pad(count, (0, 1))[owner]
    chosen = torch.zeros_like(full).scatter(0, order, taken)
    feature_write.kernel(v.flatten(1), slots, *where, None if adapt is None else free | full)
    return chosen | (full & live)
