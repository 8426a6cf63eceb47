"""The dense sequences of sparse_attention on CUDA: rows over the key rows of the step.

A program takes a tile of rows of one sequence and one query head, and all keys. Tiles of a head follow each other in
the grid, so that programs which run at a time read the same keys.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.attention.sparse import REPACK, REUSE
from dgraph.ops.attention.triton.attention_tiling import Tiling
from dgraph.ops.attention.triton.sparse_tiles import fold, load_rows, matrices_of
from dgraph.ops.kv.triton.scales import halved, scales_of
from dgraph.ops.triton.rows import dense_rows, offsets_block, power_of_two, sequence_at

_REUSE, _REPACK = tl.constexpr(REUSE), tl.constexpr(REPACK)

SAMPLES = 512
"""Blocks of keys whose ends are compared with the limits at once."""


def dense_tiling(n: int, b: int, d: int, itemsize: int) -> Tiling:
    """The tiling for n rows of b sequences."""
    width, block_m = power_of_two(d, 16), power_of_two(-(-n // max(b, 1)), 16, 128)
    if itemsize > 2:  # products of fp32 run outside of the matrix units, and take many registers
        return Tiling(min(block_m, 32), 32, 1, 4, 1)
    if width > 128:
        return Tiling(block_m, 32, 1, 8 if block_m == 128 else 4, 2)
    return Tiling(block_m, 128, 1, 8, 3) if block_m == 128 else Tiling(block_m, 64, 1, 4, 3)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_positions: Tensor,
    cu_rows: Tensor,
    cu_keys: Tensor,
    limit: Tensor,
    action: Tensor,
    out: Tensor,
    scale: float,
    tiling: Tiling,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Write the rows of the dense sequences to `out`; q must have dense rows, and scale must not be negative."""
    (n, heads, d), (_, kv_heads, _), b = q.shape, k.shape, cu_rows.shape[0] - 1
    k, v = dense_rows(k), dense_rows(v)
    blocks = matrices_of(k, v, tiling.block_n) if tiling.bulk else None
    _attend_rows[(b + n // tiling.block_m, heads)](
        q, k, v, *(blocks or (k, v)), key_positions, cu_rows, cu_keys, limit, action, out, k_scale, v_scale,
        b, q.stride(0), k.stride(0), v.stride(0), scale * math.log2(math.e),
        heads // kv_heads, heads, d, power_of_two(d, 16), tiling.block_m, tiling.block_n, tiling.stages, SAMPLES,
        offsets_block(b), "ieee" if q.dtype == torch.float32 else "tf32", blocks is not None,
        num_warps=tiling.warps,
    )  # fmt: skip


@triton.jit
def _attend_rows(
    q_ptr, k_ptr, v_ptr, k_blocks, v_blocks, at_ptr, cu_ptr, cu_keys_ptr, limit_ptr, action_ptr, out_ptr,
    k_scale_ptr, v_scale_ptr, b, q_row, k_row, v_row, scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SAMPLES: tl.constexpr, OFFSETS: tl.constexpr,
    PRECISION: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    s = sequence_at(cu_ptr, b, tile, BLOCK_M, OFFSETS)
    if s >= b:
        return
    action = tl.load(action_ptr + s)
    start, end = tl.load(cu_ptr + s), tl.load(cu_ptr + s + 1)
    first_row = start + (tile - start // BLOCK_M - s) * BLOCK_M
    if (first_row >= end) | (action == _REUSE) | (action == _REPACK):
        return
    row, d = first_row + tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    live = row < end
    limit = tl.load(limit_ptr + row, mask=live, other=0)
    longest = tl.max(limit)
    shortest = tl.min(tl.where(live, limit, longest))
    begin = tl.load(cu_keys_ptr + s)
    count = tl.load(cu_keys_ptr + s + 1) - begin

    # Positions ascend: every row of the tile sees the first `plain` blocks, and none sees a block from `last` on.
    plain, last = 0, 0
    for block in range(0, tl.cdiv(count, BLOCK_N), SAMPLES):
        key = (block + tl.arange(0, SAMPLES)) * BLOCK_N
        lowest = tl.load(at_ptr + begin + key, mask=key < count, other=0)
        highest = tl.load(at_ptr + begin + key + BLOCK_N - 1, mask=key + BLOCK_N <= count, other=0)
        plain += tl.sum(((highest < shortest) & (key + BLOCK_N <= count)).to(tl.int32))
        last += tl.sum(((lowest < longest) & (key < count)).to(tl.int32))

    q_at = (row.to(tl.int64) * q_row + head * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    column = head // GROUP * D
    k_ptr += begin.to(tl.int64) * k_row + column
    v_ptr += begin.to(tl.int64) * v_row + column
    if k_scale_ptr is not None:
        q, q_by = halved(q)
        by = scale * q_by
    else:
        by = tl.full([BLOCK_M], scale, tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for block in tl.range(0, plain, num_stages=STAGES):
        if BULK:
            k = k_blocks.load([begin + block * BLOCK_N, column]).T
            v = v_blocks.load([begin + block * BLOCK_N, column])
        else:
            k, v = load_rows(k_ptr, v_ptr, block * BLOCK_N, count, k_row, v_row, D, WIDTH, BLOCK_N, False)
        if k_scale_ptr is not None:
            of = begin + block * BLOCK_N + tl.arange(0, BLOCK_N)
            k_by, v_by = scales_of(
                k_scale_ptr, v_scale_ptr, of.to(tl.int64) * (HEADS // GROUP) + head // GROUP, of >= 0
            )
        else:
            k_by, v_by = None, None
        top, total, acc = fold(q, k, v, True, top, total, acc, by, k_by, v_by, PRECISION, False)
    for block in tl.range(plain, last, num_stages=1):
        k, v = load_rows(k_ptr, v_ptr, block * BLOCK_N, count, k_row, v_row, D, WIDTH, BLOCK_N, True)
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        position = tl.load(at_ptr + begin + key, mask=key < count, other=0)
        seen = (key < count)[None, :] & (position[None, :] < limit[:, None])
        if k_scale_ptr is not None:
            of = (begin + key).to(tl.int64) * (HEADS // GROUP) + head // GROUP
            k_by, v_by = scales_of(k_scale_ptr, v_scale_ptr, of, key < count)
        else:
            k_by, v_by = None, None
        top, total, acc = fold(q, k, v, seen, top, total, acc, by, k_by, v_by, PRECISION, True)
    found = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = (row.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
