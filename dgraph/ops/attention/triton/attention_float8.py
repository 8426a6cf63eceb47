"""Attention over keys and values in float8 on Hopper GPUs.

The matrix units multiply float8 by float8, or two factors of 16 bits. Keys are multiplied as they are stored. A query
in bf16 is the sum of two numbers of float8: its first four bits, and the rest. So its score is the sum of two products,
and as exact. Values are multiplied by weights, which two numbers of float8 would hold as well. But the units read a
right factor of 8 bits along the keys, and values lie along the head. So values become float16 in shared memory, once
for all rows of a tile. Scales are multiplied into scores and weights.

One warp loads blocks of keys, values and their scales into a ring in shared memory; four multiply. Two programs fit on
a multiprocessor, and one computes while the other waits.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as Blocks

from dgraph.ops.attention.triton.attention_roles import HEAD_DIM, queries_at, tile_at
from dgraph.ops.kv.scales import FLOAT8
from dgraph.ops.triton.hopper import layout_of, understood
from dgraph.ops.triton.rows import offsets_block

ROWS, KEYS, STAGES = 64, 64, 3
"""Stacked rows of a tile, keys of a block, blocks in the ring: two programs fit on a multiprocessor."""
REGISTERS = 128
"""Registers of a thread of two such programs, before the multiplying warps take those that the loading warp frees."""
LOADING = gl.constexpr(24)
"""Registers of a thread that loads."""
ONE_LINE = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
"""Layout of a block's scales in shared memory, side by side."""


def fits(q: Tensor, k_cache: Tensor) -> bool:
    """True if the kernel takes such queries [N, H, D] and such a cache of keys, provided that it is read in blocks."""
    return (
        q.dtype == torch.bfloat16
        and k_cache.dtype == FLOAT8
        and q.shape[2] == HEAD_DIM
        and q.shape[1] // k_cache.shape[2] <= ROWS
        and understood(q.device)
    )


def launch(
    q: Tensor,
    blocks: tuple[Blocks, Blocks],
    scales: tuple[Tensor, Tensor],
    page_table: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
    rotation: tuple[Tensor, Tensor] | None,
    out: Tensor,
    shares: tuple[int, Tensor, Tensor],
) -> None:
    """Write attention of q to out, both [N, H, D]; arguments as of `paged_attention.kernel`, which made them dense.

    Args:
        blocks: keys and values, as `paged_attention.blocks_of` sees the caches.
        scales: f32[pages, page, Hkv] of keys and values, by head.
        scale: scale of the scores; not negative.
        shares: number of shares of the keys, and their sums and masses if it is above 1, for `paged_attention` to add
            up.
    """
    (n, heads, d), b = q.shape, cu_rows.shape[0] - 1
    pages, page, kv_heads = scales[0].shape
    group, (splits, part, mass) = heads // kv_heads, shares
    rows = ROWS // group
    keys, values = (TensorDescriptor(x.base, x.shape, x.strides, x.block_shape, layout_of(1)) for x in blocks)
    lines = (x.transpose(1, 2).reshape(pages * kv_heads, page) for x in scales)
    k_lines, v_lines = (TensorDescriptor(x, list(x.shape), [page, 1], [1, KEYS], ONE_LINE) for x in lines)
    cos, sin = rotation or (q, q)
    _attend_in_eight_bits[(kv_heads, splits, b + 1 + n // rows)](
        q, keys, values, k_lines, v_lines, page_table, cu_rows, limit, cos, sin, out, part, mass,
        n, b, page_table.shape[1] * page, q.stride(0), page_table.stride(0), cos.stride(0), sin.stride(0),
        scale * math.log2(math.e),
        page, group, heads, d, rows, ROWS, KEYS, STAGES, splits, offsets_block(b), rotation is not None,
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip


@gluon.jit
def _attend_in_eight_bits(
    q_ptr, k_blocks, v_blocks, k_lines, v_lines, table_ptr, cu_ptr, limit_ptr, cos_ptr, sin_ptr,
    out_ptr, part_ptr, mass_ptr, n, b, keys, q_row, table_row, cos_row, sin_row, scale,
    PAGE: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, OFFSETS: gl.constexpr,
    ROTATED: gl.constexpr,
):  # fmt: skip
    head, split, tile = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    s, first_row, end = tile_at(cu_ptr, n, b, tile, ROWS, OFFSETS)
    if first_row >= end:
        return
    seeing = gl.where(s < b, end, 0)  # padding rows see nothing
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    mine = (m < ROWS) & (first_row + m < end)
    limit = gl.load(limit_ptr + first_row + m, mask=mine & (first_row + m < seeing), other=0)
    longest = gl.minimum(gl.max(limit, 0), keys)
    plain = gl.min(gl.where(mine, limit, longest), 0) // BLOCK_N  # blocks that all rows see wholly
    blocks = gl.cdiv(longest, BLOCK_N)
    share = gl.cdiv(blocks, SPLITS)
    begin = split * share
    stop = gl.minimum(begin + share, blocks)
    table_ptr += s.to(gl.int64) * table_row

    layout: gl.constexpr = k_blocks.layout
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_held = gl.allocate_shared_memory(k_blocks.dtype, [STAGES, BLOCK_N, D], layout)
    v_held = gl.allocate_shared_memory(k_blocks.dtype, [STAGES, BLOCK_N, D], layout)
    k_by_held = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N], k_lines.layout)
    v_by_held = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N], k_lines.layout)
    q_held = gl.allocate_shared_memory(k_blocks.dtype, [2, BLOCK_M, D], layout)
    v_wide = gl.allocate_shared_memory(gl.float16, [1, BLOCK_N, D], wide)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    pointers = (q_ptr, limit_ptr, cos_ptr, sin_ptr, out_ptr, part_ptr, mass_ptr)
    held = (k_held, v_held, k_by_held, v_by_held, full, empty)
    where = (head, split, first_row, end, seeing, begin, stop, plain, longest)
    rest = (n, q_row, cos_row, sin_row, scale)
    sources = (k_blocks, v_blocks, k_lines, v_lines)
    gl.warp_specialize(
        [
            (_multiply_tile, (pointers, held, q_held, v_wide, where, rest, GROUP, HEADS, ROWS, SPLITS, ROTATED)),
            (_load_blocks, (sources, table_ptr, held, head, begin, stop, PAGE, HEADS // GROUP)),
        ],
        [1],
        [LOADING],
    )


@gluon.jit
def _load_blocks(sources, table_ptr, held, head, begin, stop, PAGE: gl.constexpr, KV_HEADS: gl.constexpr):
    """Load blocks of keys, values and scales into the ring, the last first."""
    k_blocks, v_blocks, k_lines, v_lines = sources
    k_held, v_held, k_by_held, v_by_held, full, empty = held
    STAGES: gl.constexpr = k_held.shape[0]
    BLOCK_N: gl.constexpr = k_held.shape[1]
    D: gl.constexpr = k_held.shape[2]
    for i in range(stop - begin):
        key = (stop - 1 - i) * BLOCK_N
        page = gl.load(table_ptr + key // PAGE)
        slot, line = page * PAGE + key % PAGE, page * KV_HEADS + head
        stage = i % STAGES
        came = full.index(stage)
        mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        mbarrier.expect(came, 2 * BLOCK_N * (D + 4))
        tma.async_copy_global_to_shared(k_blocks, [slot, head * D], came, k_held.index(stage))
        tma.async_copy_global_to_shared(k_lines, [line, key % PAGE], came, k_by_held.index(stage))
        tma.async_copy_global_to_shared(v_blocks, [slot, head * D], came, v_held.index(stage))
        tma.async_copy_global_to_shared(v_lines, [line, key % PAGE], came, v_by_held.index(stage))


@gluon.jit
def _multiply_tile(
    pointers, held, q_held, v_wide, where, rest,
    GROUP: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, SPLITS: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """Attend the stacked rows of a tile to their share of the blocks, the last first, as in `attention_roles`."""
    q_ptr, limit_ptr, cos_ptr, sin_ptr, out_ptr, part_ptr, mass_ptr = pointers
    full, empty = held[4], held[5]
    head, split, first_row, end, seeing, begin, stop, plain, longest = where
    n, q_row, cos_row, sin_row, scale = rest
    BLOCK_M: gl.constexpr = q_held.shape[1]
    D: gl.constexpr = q_held.shape[2]
    BLOCK_N: gl.constexpr = held[0].shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])

    by = scale * _load_queries(
        q_held, q_ptr, cos_ptr, sin_ptr, q_row, cos_row, sin_row, head, first_row, end, GROUP, ROWS, ROTATED
    )
    by = gl.convert_layout(by, gl.SliceLayout(1, scores))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))
    row = first_row + m // GROUP
    live = (m // GROUP < ROWS) & (row < end)
    limit = gl.load(limit_ptr + row, mask=live & (row < seeing), other=0)
    acc = gl.zeros([BLOCK_M, D], gl.float32, sums)
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
    count = stop - begin
    some = gl.minimum(stop - gl.maximum(plain, begin), count)  # blocks that not all rows see wholly
    if count > 0:
        # The first block, whose weights are multiplied beside the scores of the next.
        key = (stop - 1) * BLOCK_N
        mbarrier.wait(full.index(0), 0)
        score = _begin_scores(q_held, held[0].index(0))
        _widen(0, key, longest, held, v_wide, True)
        score = warpgroup_mma_wait(0, deps=(score,))
        weight, top, total, _ = _weights_of(0, key, score, limit, longest, by, held, top, total, True)
        mbarrier.arrive(empty.index(0))
        for i in range(1, some):
            key = (stop - 1 - i) * BLOCK_N
            acc, weight, top, total = _next_block(
                i, key, limit, longest, by, q_held, held, v_wide, acc, weight, top, total, True
            )
        for i in range(gl.maximum(some, 1), count):
            acc, weight, top, total = _next_block(
                i, 0, limit, longest, by, q_held, held, v_wide, acc, weight, top, total, False
            )
        acc = warpgroup_mma(weight, v_wide.index(0), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mass = top + gl.log2(gl.where(total > 0, total, 1.0))
    found = acc / gl.expand_dims(gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, sums)), 1)
    m_out = gl.arange(0, BLOCK_M, gl.SliceLayout(1, sums))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, sums)), 0)
    row_out = first_row + m_out // GROUP
    inside = gl.expand_dims((m_out // GROUP < ROWS) & (row_out < end), 1)
    at = gl.expand_dims((row_out.to(gl.int64) * HEADS + head * GROUP + m_out % GROUP) * D, 1) + d
    if SPLITS == 1:
        gl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        rank = split.to(gl.int64) * n * HEADS
        gl.store(mass_ptr + rank + row * HEADS + head * GROUP + m % GROUP, mass, mask=live)
        if count > 0:
            gl.store(part_ptr + rank * D + at, found, mask=inside)


@gluon.jit
def _load_queries(
    q_held, q_ptr, cos_ptr, sin_ptr, q_row, cos_row, sin_row, head, first_row, end,
    GROUP: gl.constexpr, ROWS: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """Load queries into shared memory, each over a power of two and as two numbers of float8; return the powers.

    The powers are f32[BLOCK_M]. A row's largest magnitude becomes 2**7 or more, and less than 2**8. Then the second
    number of a value of at least 2**-2 is exact. The first number has four of the value's eight bits, and the rest is
    at most eight units of the last bit.
    """
    BLOCK_M: gl.constexpr = q_held.shape[1]
    SIDE: gl.constexpr = q_held.shape[2] // 2
    moved: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, moved))
    left, right = queries_at(
        m, q_ptr, cos_ptr, sin_ptr, q_row, cos_row, sin_row, head, first_row, end, GROUP, ROWS, 2 * SIDE, ROTATED
    )
    left, right = left.to(gl.float32), right.to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(left), 1), gl.max(gl.abs(right), 1))
    power = gl.maximum(largest.to(gl.int32, bitcast=True) & 0x7F800000, 40 << 23) - (7 << 23)
    over = gl.expand_dims(((254 << 23) - power).to(gl.float32, bitcast=True), 1)
    _store_in_two(left * over, q_held, 0, SIDE)
    _store_in_two(right * over, q_held, SIDE, SIDE)
    fence_async_shared()
    return power.to(gl.float32, bitcast=True)


@gluon.jit
def _store_in_two(x, q_held, FIRST: gl.constexpr, SIDE: gl.constexpr):
    """Store x as two numbers of float8.

    The first is rounded as in `scales.nearest`. So its conversion is exact, and need not be undone to get the rest.
    """
    exponent = gl.maximum(x.to(gl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    large = ((exponent + (20 << 23)) | 0x400000).to(gl.float32, bitcast=True)
    high = (x + large) - large
    q_held.index(0).slice(FIRST, SIDE, 1).store(high.to(q_held.dtype))
    q_held.index(1).slice(FIRST, SIDE, 1).store((x - high).to(q_held.dtype))


@gluon.jit
def _begin_scores(q_held, k):
    """Begin the products of both numbers of the queries and a block of keys, in one sum."""
    BLOCK_M: gl.constexpr = q_held.shape[1]
    BLOCK_N: gl.constexpr = k.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    score = warpgroup_mma(q_held.index(1), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return warpgroup_mma(q_held.index(0), k.permute((1, 0)), score, is_async=True)


@gluon.jit
def _widen(i, key, longest, held, v_wide, MASKED: gl.constexpr):
    """Widen values of block i to float16; MASKED: zeros from `longest` on, which may never have been written."""
    v_held = held[1]
    BLOCK_N: gl.constexpr = v_held.shape[1]
    moved: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    value = v_held.index(i % v_held.shape[0]).load(moved).to(gl.float16)
    if MASKED:
        there = key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, moved)) < longest
        value = gl.where(gl.expand_dims(there, 1), value, gl.zeros_like(value))
    v_wide.index(0).store(value)
    fence_async_shared()


@gluon.jit
def _weights_of(i, key, score, limit, longest, by, held, top, total, MASKED: gl.constexpr):
    """Weights of block i times the scales of its values, as a left factor; new top and total; factor of earlier sums.

    The top is a bound of log2 of weight times scale, as in `scales.above`.
    """
    k_by_held, v_by_held = held[2], held[3]
    STAGES: gl.constexpr = k_by_held.shape[0]
    BLOCK_M: gl.constexpr = by.shape[0]
    BLOCK_N: gl.constexpr = k_by_held.shape[2]
    D: gl.constexpr = held[0].shape[2]
    scores: gl.constexpr = score.type.layout
    factor: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]), 2)
    k_by = k_by_held.index(i % STAGES).load(scores)
    v_by = v_by_held.index(i % STAGES).load(scores)
    score = score * k_by
    if MASKED:
        position = gl.expand_dims(key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores)), 0)
        score = gl.where(position < gl.expand_dims(limit, 1), score, float("-inf"))
        v_by = gl.where(position < longest, v_by, 0.0)
    largest = gl.max(v_by + gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores), 1).to(gl.int32, bitcast=True)
    higher = gl.maximum(top, gl.max(score, 1) * by + ((largest >> 23) - 126).to(gl.float32))
    base = gl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    p = gl.exp2(score * gl.expand_dims(by, 1) - gl.expand_dims(base, 1))
    fade = gl.exp2(top - base)
    weight = gl.convert_layout((p * v_by).to(gl.float16), factor)
    return weight, higher, total * fade + gl.sum(p, 1), fade


@gluon.jit
def _next_block(
    i, key, limit, longest, by, q_held, held, v_wide, acc, weight, top, total, MASKED: gl.constexpr
):  # fmt: skip
    """Compute scores of block i and products with values of the block before, side by side."""
    full, empty = held[4], held[5]
    STAGES: gl.constexpr = full.shape[0]
    stage = i % STAGES
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    score = _begin_scores(q_held, held[0].index(stage))
    acc = warpgroup_mma(weight, v_wide.index(0), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    coming, top, total, fade = _weights_of(i, key, score, limit, longest, by, held, top, total, MASKED)
    # Named in the wait, so that they are made before it.
    acc, coming, total = warpgroup_mma_wait(0, deps=(acc, coming, total))
    _widen(i, key, longest, held, v_wide, MASKED)
    mbarrier.arrive(empty.index(stage))
    acc *= gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout)), 1)
    return acc, coming, top, total
