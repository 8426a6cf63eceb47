"""dgraph::least_drifted on CUDA: least_similar's choice among cosines whose sums are there."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.selection.triton.least_similar import RANKED, least_of, ranked


def kernel(sums: Tensor, full: Tensor, cu_rows: Tensor, share: float, adapt: Tensor | None = None) -> Tensor:
    """dgraph::least_drifted; see its contract. Nothing is read on the host."""
    n, sums, full = len(full), sums.contiguous(), full.contiguous()
    if not n:
        return full.new_empty(0)
    similar = torch.empty(n, dtype=torch.float32, device=full.device)
    _rank_rows[(triton.cdiv(n, RANKED),)](
        sums, full, full if adapt is None else adapt.contiguous(), similar, n, RANKED, adapt is not None, num_warps=4
    )  # fmt: skip
    return least_of(similar, full, cu_rows, share)


@triton.jit
def _rank_rows(
    sums_ptr, full_ptr, adapt_ptr, similar_ptr, n, BLOCK: tl.constexpr, ADAPT: tl.constexpr
):  # fmt: skip
    """Write similar = the cosine, -2 for NaN, and 2 for a row that does not adapt."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < n
    adapts = tl.load(full_ptr + row, mask=live, other=1) == 0
    if ADAPT:
        adapts = adapts & (tl.load(adapt_ptr + row, mask=live, other=0) != 0)
    dot = tl.load(sums_ptr + 3 * row, mask=live, other=0.0)
    new_sum = tl.load(sums_ptr + 3 * row + 1, mask=live, other=0.0)
    old_sum = tl.load(sums_ptr + 3 * row + 2, mask=live, other=0.0)
    tl.store(similar_ptr + row, tl.where(adapts, ranked(dot, new_sum, old_sum), 2.0), mask=live)
