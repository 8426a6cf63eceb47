"""Rows that dgraph::lm_head projects: kernels that list them on the device, and gather them chunk by chunk."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.selection.triton.keep_index import kept_before
from dgraph.ops.triton.rows import dense_rows, power_of_two

TOGETHER = 256
"""Rows that one program lists."""


class Listed(NamedTuple):
    """Masked rows, divided into chunks of one size.

    Attributes:
        rows: i32[N], their numbers, ascending; after the last it holds anything.
        counts: i32[chunks], number of rows of each chunk; all but one chunk are full or empty.
    """

    rows: Tensor
    counts: Tensor

    def chunk(self, i: int, size: int) -> Listed:
        """The rows of chunk i from the first on, and counts of which the last is its own, as rows_linear takes it."""
        return Listed(self.rows[i * size :], self.counts[: i + 1])


def list_candidates(
    candidate: Tensor,
    chunk: int,
    token: Tensor | None,
    confidence: Tensor | None,
    margin: Tensor | None,
    entropy: Tensor | None,
) -> Listed:
    """List the rows of candidate bool[N], N > 0, in chunks of `chunk`.

    If results are given, all [N], those of the other rows are set.
    """
    n = candidate.shape[0]
    found = Listed(*(torch.empty(s, dtype=torch.int32, device=candidate.device) for s in (n, triton.cdiv(n, chunk))))
    _list_rows[(triton.cdiv(n, TOGETHER),)](
        candidate, *found, token, confidence, margin, entropy,
        n, chunk, found.counts.shape[0], TOGETHER, power_of_two(n, TOGETHER, 4096), num_warps=4,
    )  # fmt: skip
    return found


def gathered(h: Tensor, part: Listed, most: int) -> Tensor:
    """Gather the rows of a chunk of h [N, d], `most` at most; rows after its last hold anything."""
    h = dense_rows(h)
    out = torch.empty((most, h.shape[1]), dtype=h.dtype, device=h.device)
    _gather_rows[(most,)](
        h, *part, out, part.counts.shape[0] - 1, h.stride(0), h.shape[1], power_of_two(h.shape[1], 16, 4096),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _list_rows(
    candidate_ptr, index_ptr, counts_ptr, token_ptr, confidence_ptr, margin_ptr, entropy_ptr, n, chunk, chunks,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """List candidates; each program counts those before its own, single bytes, instead of waiting for another."""
    first = tl.program_id(0) * BLOCK
    row = first + tl.arange(0, BLOCK)
    flag = tl.load(candidate_ptr + row, mask=row < n, other=0) != 0
    place = kept_before(candidate_ptr, first, WIDE) + tl.cumsum(flag.to(tl.int32), 0) - 1
    tl.store(index_ptr + place, row, mask=flag)
    if token_ptr is not None:
        other = (row < n) & (flag == 0)
        tl.store(token_ptr + row, tl.full([BLOCK], -1, tl.int64), mask=other)
        lowest = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(confidence_ptr + row, lowest, mask=other)
        tl.store(margin_ptr + row, lowest, mask=other)
        tl.store(entropy_ptr + row, -lowest, mask=other)
    if first < chunks:  # there are no more chunks than rows
        left = kept_before(candidate_ptr, n, WIDE) - row * chunk
        tl.store(counts_ptr + row, tl.minimum(tl.maximum(left, 0), chunk), mask=row < chunks)


@triton.jit(do_not_specialize=["last"])
def _gather_rows(
    h_ptr, index_ptr, counts_ptr, out_ptr, last, h_row, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0)
    if at >= tl.load(counts_ptr + last):
        return
    row = tl.load(index_ptr + at).to(tl.int64)
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(h_ptr + row * h_row + column, mask=column < SIZE)
        tl.store(out_ptr + at.to(tl.int64) * SIZE + column, value, mask=column < SIZE)
