"""dgraph::keep_index on CUDA, for a capacity that the host knows.

Without one, the host must read the number of kept rows, and the reference does that. With one, kept rows
beyond the capacity are dropped, where the reference raises.

Flags are single bytes: each program counts those before its rows itself, instead of waiting for another.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.selection.keep_index import reference
from dgraph.ops.triton.rows import power_of_two


def kernel(keep: Tensor, cu_rows: Tensor, capacity: int, block: int = 256) -> tuple[Tensor, Tensor]:
    """dgraph::keep_index; see its contract. `block`: rows that one program lists."""
    if capacity < 0:
        return reference(keep, cu_rows, capacity)
    n, b = keep.shape[0], cu_rows.shape[0] - 1
    index = torch.empty(capacity, dtype=torch.int64, device=keep.device)
    offsets = torch.empty(b + 1, dtype=cu_rows.dtype, device=keep.device)
    tiles = triton.cdiv(max(n, capacity), block)
    _list_kept[(tiles + b + 1,)](
        keep.contiguous(), cu_rows, index, offsets, b, capacity, tiles,
        block, power_of_two(n, block, 4096), num_warps=4,
    )  # fmt: skip
    return index, offsets


@triton.jit
def kept_before(keep_ptr, row, WIDE: tl.constexpr):
    found = 0
    for first in range(0, row, WIDE):
        other = first + tl.arange(0, WIDE)
        found += tl.sum((tl.load(keep_ptr + other, mask=other < row, other=0) != 0).to(tl.int32))
    return found


@triton.jit
def _list_kept(
    keep_ptr, cu_ptr, index_ptr, offsets_ptr, b, capacity, tiles, BLOCK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    if tile >= tiles:
        s = tile - tiles
        found = kept_before(keep_ptr, tl.load(cu_ptr + s), WIDE)
        tl.store(offsets_ptr + s, found.to(offsets_ptr.dtype.element_ty))
        return
    live = tl.load(cu_ptr + b)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    before = kept_before(keep_ptr, tl.minimum(tile * BLOCK, live), WIDE)
    flag = (tl.load(keep_ptr + at, mask=at < live, other=0) != 0) & (at < live)
    place = before + tl.cumsum(flag.to(tl.int32), 0) - 1
    tl.store(index_ptr + place, at.to(tl.int64), mask=flag & (place < capacity))
    total = kept_before(keep_ptr, live, WIDE)
    tl.store(index_ptr + at, tl.full([BLOCK], -1, tl.int64), mask=(at >= total) & (at < capacity))
