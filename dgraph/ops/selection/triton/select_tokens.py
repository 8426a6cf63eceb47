"""dgraph::select_tokens on CUDA: one program per sequence, and one for the padding rows.

A rank is a count of larger scores, and a neighbour is loaded instead of exchanged. So sequences of any length
go through tiles of a fixed size. The float64 sums run in row order, as in the contract.
"""
# mypy: disable-error-code="no-untyped-def, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.triton.rows import power_of_two


def kernel(
    score: Tensor,
    candidate: Tensor,
    positions: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    average: Tensor,
    reached: Tensor,
    alpha: float,
    keep: int,
    masked: Tensor | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dgraph::select_tokens; see its contract. `block`: rows of a tile, by default 16 to 64."""
    if not alpha > 0:
        raise InputError(f"dgraph::select_tokens: alpha must be above 0 (inf keeps everything), got {alpha}.")
    n, b = score.shape[0], cu_rows.shape[0] - 1
    kept = torch.empty(n, dtype=candidate.dtype, device=score.device)
    new_limit = torch.empty(n, dtype=limit.dtype, device=score.device)
    new_reached = torch.empty(b, dtype=reached.dtype, device=score.device)
    _select[(b + 1,)](
        *(x.contiguous() for x in (score, candidate, candidate if masked is None else masked)),
        *(x.contiguous() for x in (positions, cu_rows, limit, average, reached)),
        kept, new_limit, new_reached, n, b, alpha,
        keep, block or power_of_two(-(-n // max(b, 1)), 16, 64),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return kept, new_limit, new_reached


@triton.jit
def _base(
    score_ptr, candidate_ptr, row, start, end, budget, threshold, by_spread, BLOCK: tl.constexpr
):  # fmt: skip
    """Flag each of `row` that is a candidate and in the base selection."""
    inside = row < end
    flag = (tl.load(candidate_ptr + row, mask=inside, other=0) != 0) & inside
    score = tl.load(score_ptr + row, mask=flag, other=0.0)
    ahead = tl.zeros([BLOCK], tl.int32)
    for first in range(start, end, BLOCK):
        other = first + tl.arange(0, BLOCK)
        taken = (tl.load(candidate_ptr + other, mask=other < end, other=0) != 0) & (other < end)
        value = tl.load(score_ptr + other, mask=taken, other=0.0)[None, :]
        before = (value > score[:, None]) | ((value == score[:, None]) & (other[None, :] < row[:, None]))
        ahead += tl.sum((before & taken[None, :]).to(tl.int32), 1)
    return flag & tl.where(by_spread, score.to(tl.float64) >= threshold, ahead < budget)


@triton.jit
def _select(
    score_ptr, candidate_ptr, masked_ptr, positions_ptr, cu_ptr, limit_ptr, average_ptr, reached_ptr,
    kept_ptr, new_limit_ptr, new_reached_ptr, n, b, alpha,
    KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    start = tl.load(cu_ptr + s)
    column = tl.arange(0, BLOCK)
    if s == b:
        for first in range(start, n, BLOCK):
            row = first + column
            tl.store(kept_ptr + row, tl.zeros([BLOCK], tl.int1), mask=row < n)
            tl.store(new_limit_ptr + row, tl.zeros([BLOCK], new_limit_ptr.dtype.element_ty), mask=row < n)
        return
    end = tl.load(cu_ptr + s + 1)

    count = 0
    total = tl.full([], 0.0, tl.float64)
    for i in tl.range(start, end, loop_unroll_factor=8):
        taken = tl.load(candidate_ptr + i) != 0
        count += taken.to(tl.int32)
        total += tl.where(taken, tl.load(score_ptr + i).to(tl.float64), 0.0)
    if KEEP > 0:
        budget = tl.where(tl.load(average_ptr + s) == float("inf"), count, tl.minimum(count, KEEP))
    else:
        wanted = tl.ceil(alpha * tl.maximum(tl.load(average_ptr + s), 1.0))
        budget = tl.minimum(wanted, count.to(tl.float32)).to(tl.int32)
    evict = (budget > 0) & (count > budget)

    threshold = tl.full([], 0.0, tl.float64)
    by_spread = False
    if KEEP <= 0:
        size = tl.maximum(count, 1).to(tl.float64)
        mean = total / size
        spread = tl.full([], 0.0, tl.float64)
        for i in tl.range(start, end, loop_unroll_factor=8):
            apart = tl.load(score_ptr + i).to(tl.float64) - mean
            spread += tl.where(tl.load(candidate_ptr + i) != 0, apart * apart, 0.0)
        threshold = mean + tl.sqrt(spread / size)
        above = 0
        for first in range(start, end, BLOCK):
            row = first + column
            flag = (tl.load(candidate_ptr + row, mask=row < end, other=0) != 0) & (row < end)
            score = tl.load(score_ptr + row, mask=flag, other=0.0)
            above += tl.sum((flag & (score.to(tl.float64) >= threshold)).to(tl.int32))
        by_spread = above >= budget

    # Rows of a sequence ascend in position, so the row at the next position is the next row or none.
    rightmost = tl.full([], -1, tl.int64)
    for first in range(start, end, BLOCK):
        row = first + column
        inside = row < end
        flag = (tl.load(candidate_ptr + row, mask=inside, other=0) != 0) & inside
        position = tl.load(positions_ptr + row, mask=inside, other=0)
        following = tl.load(positions_ptr + row + 1, mask=row + 1 < end, other=-1)
        chosen = _base(score_ptr, candidate_ptr, row, start, end, budget, threshold, by_spread, BLOCK)
        next_chosen = _base(score_ptr, candidate_ptr, row + 1, start, end, budget, threshold, by_spread, BLOCK)
        chosen = flag & (chosen | (next_chosen & (following == position + 1)))
        rightmost = tl.maximum(rightmost, tl.max(tl.where(chosen, position, -1)))
        masked = (tl.load(masked_ptr + row, mask=inside, other=0) != 0) & evict
        tl.store(kept_ptr + row, chosen | (inside & ~masked), mask=inside)
    tl.debug_barrier()

    reached = tl.load(reached_ptr + s).to(tl.int64)
    last = tl.full([], -1, tl.int64)
    for first in range(start, end, BLOCK):
        row = first + column
        inside = row < end
        position = tl.load(positions_ptr + row, mask=inside, other=0)
        kept = (tl.load(kept_ptr + row, mask=inside, other=0) != 0) & inside
        kept = kept | (inside & (position > reached) & (position < rightmost))
        last = tl.maximum(last, tl.max(tl.where(kept, position, -1)))
        tl.store(kept_ptr + row, kept, mask=inside)
    for first in range(start, end, BLOCK):
        row = first + column
        limit = tl.load(limit_ptr + row, mask=row < end, other=0)
        shorter = tl.minimum(limit.to(tl.int64), last + 1).to(new_limit_ptr.dtype.element_ty)
        tl.store(new_limit_ptr + row, shorter, mask=row < end)
    tl.store(new_reached_ptr + s, tl.maximum(reached, last).to(new_reached_ptr.dtype.element_ty))
