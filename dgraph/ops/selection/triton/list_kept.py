"""dgraph::list_kept on CUDA: the kernel of keep_index, with room for every row."""

from __future__ import annotations

from torch import Tensor

from dgraph.ops.selection.triton import keep_index


def kernel(keep: Tensor, cu_rows: Tensor) -> tuple[Tensor, Tensor]:
    """dgraph::list_kept; see its contract."""
    return keep_index.kernel(keep, cu_rows, keep.shape[0])
