"""Attention of many rows on Hopper GPUs, by warps with roles of their own, which Triton does not generate.

One warp loads blocks of keys and values into a ring in shared memory. Two groups of four warps multiply 64 rows of the
stacked matrix each, independently of each other. The softmax of one group runs beside the products of the other, and
beside the product of its own block before. The source is Gluon, the language below Triton.

A block is handed over by barriers in shared memory: `full` says that it came, `empty` that both groups are done.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

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

from dgraph.ops.triton.hopper import layout_of, understood
from dgraph.ops.triton.rows import offsets_block

ROWS, KEYS, STAGES = 128, 128, 2
"""Stacked rows of a tile, keys of a block, blocks of keys and of values in the ring. The registers of two groups of
warps and the shared memory of a multiprocessor hold no more.
"""
HEAD_DIM = 128
"""Head dimension for which the kernel is made and measured."""
MULTIPLYING, LOADING = gl.constexpr(240), gl.constexpr(24)
"""Registers of a thread in either role."""


def fits(q: Tensor, cache: Tensor) -> bool:
    """True if the kernel takes such queries [N, H, D] and such a cache of keys, provided that it is read in blocks."""
    return q.element_size() == 2 and q.shape[2] == HEAD_DIM and q.dtype == cache.dtype and understood(q.device)


def launch(
    q: Tensor,
    blocks: tuple[Blocks, Blocks],
    page: int,
    kv_heads: int,
    page_table: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
    rotation: tuple[Tensor, Tensor] | None,
    out: Tensor,
) -> None:
    """Write attention of q to out, both [N, H, D]; arguments as of `paged_attention.kernel`, which made them dense.

    Args:
        blocks: keys and values, as `paged_attention.blocks_of` sees the caches.
        page, kv_heads: sizes of the caches.
        scale: scale of the scores; not negative.
    """
    (n, heads, d), b = q.shape, cu_rows.shape[0] - 1
    group = heads // kv_heads
    rows = ROWS // group
    keys, values = (TensorDescriptor(x.base, x.shape, x.strides, x.block_shape, layout_of(2)) for x in blocks)
    cos, sin = rotation or (q, q)
    _attend_in_roles[(kv_heads, b + 1 + n // rows)](
        q, keys, values, page_table, cu_rows, limit, cos, sin, out,
        n, b, page_table.shape[1] * page, q.stride(0), page_table.stride(0), cos.stride(0), sin.stride(0),
        scale * math.log2(math.e),
        page, group, heads, d, rows, ROWS // 2, KEYS, STAGES, offsets_block(b), rotation is not None,
        num_warps=4,
    )  # fmt: skip


@gluon.jit
def _attend_in_roles(
    q_ptr, k_blocks, v_blocks, table_ptr, cu_ptr, limit_ptr, cos_ptr, sin_ptr, out_ptr,
    n, b, keys, q_row, table_row, cos_row, sin_row, scale,
    PAGE: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
    HIGH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OFFSETS: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    head, tile = gl.program_id(0), gl.program_id(1)
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    s, first_row, end = tile_at(cu_ptr, n, b, tile, ROWS, OFFSETS)
    if first_row >= end:
        return
    seeing = gl.where(s < b, end, 0)  # padding rows see nothing
    m = gl.arange(0, 2 * HIGH, line)
    mine = (m < ROWS) & (first_row + m < end)
    limit = gl.load(limit_ptr + first_row + m, mask=mine & (first_row + m < seeing), other=0)
    longest = gl.minimum(gl.max(limit, 0), keys)
    shortest = gl.min(gl.where(mine, limit, longest), 0)
    blocks, plain = gl.cdiv(longest, BLOCK_N), shortest // BLOCK_N

    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = k_blocks.layout
    q_held = gl.allocate_shared_memory(dtype, [2, HIGH, D], layout)
    k_held = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
    v_held = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    pointers = (q_ptr, limit_ptr, cos_ptr, sin_ptr, out_ptr)
    held = (q_held, k_held, v_held, full, empty)
    where = (head, first_row, end, seeing, blocks, plain, longest)
    rest = (q_row, cos_row, sin_row, scale)
    table_ptr += s.to(gl.int64) * table_row
    gl.warp_specialize(
        [
            (_multiply_half, (0, pointers, held, where, rest, GROUP, HEADS, ROWS, ROTATED)),
            (_multiply_half, (1, pointers, held, where, rest, GROUP, HEADS, ROWS, ROTATED)),
            (_load_blocks, (k_blocks, v_blocks, table_ptr, held, head, blocks, PAGE)),
        ],
        [4, 1],
        [MULTIPLYING, LOADING],
    )


@gluon.jit
def tile_at(cu_ptr, n, b, tile, ROWS: gl.constexpr, OFFSETS: gl.constexpr):
    """Sequence of a tile of rows, the tile's first row, which may lie beyond the sequence's end, and that end.

    The search is that of `rows.sequence_at`, whose vectors have no layout.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    s = gl.to_tensor(-1)
    for first in range(0, b + 1, OFFSETS):
        i = first + gl.arange(0, OFFSETS, line)
        start = gl.load(cu_ptr + i, mask=i <= b, other=0)
        s += gl.sum(((start // ROWS + i <= tile) & (i <= b)).to(gl.int32), 0)
    start = gl.load(cu_ptr + s)
    end = gl.load(cu_ptr + s + 1, mask=s < b, other=n)
    return s, start + (tile - start // ROWS - s) * ROWS, end


@gluon.jit
def _load_blocks(k_blocks, v_blocks, table_ptr, held, head, blocks, PAGE: gl.constexpr):
    """Load blocks of keys and values into the ring, the last first."""
    _, k_held, v_held, full, empty = held
    STAGES: gl.constexpr = k_held.shape[0]
    BLOCK_N: gl.constexpr = k_held.shape[1]
    D: gl.constexpr = k_held.shape[2]
    BYTES: gl.constexpr = BLOCK_N * D * k_held.dtype.primitive_bitwidth // 8
    for i in range(blocks):
        key = (blocks - 1 - i) * BLOCK_N
        slot = gl.load(table_ptr + key // PAGE) * PAGE + key % PAGE
        stage, turn = i % STAGES, i // STAGES & 1
        mbarrier.wait(empty.index(stage), turn ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        tma.async_copy_global_to_shared(k_blocks, [slot, head * D], full.index(stage), k_held.index(stage))
        mbarrier.wait(empty.index(STAGES + stage), turn ^ 1)
        mbarrier.expect(full.index(STAGES + stage), BYTES)
        tma.async_copy_global_to_shared(v_blocks, [slot, head * D], full.index(STAGES + stage), v_held.index(stage))


@gluon.jit
def _multiply_half(
    half, pointers, held, where, rest,
    GROUP: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """Attend a half of the tile's stacked rows to all blocks.

    The last block comes first. It alone has slots that may never have been written, and those that not all rows see
    follow; so the rest of the loop needs no mask.
    """
    q_ptr, limit_ptr, cos_ptr, sin_ptr, out_ptr = pointers
    q_held, k_held, v_held, full, empty = held
    head, first_row, end, seeing, blocks, plain, longest = where
    q_row, cos_row, sin_row, scale = rest
    HIGH: gl.constexpr = q_held.shape[1]
    D: gl.constexpr = q_held.shape[2]
    STAGES: gl.constexpr = k_held.shape[0]
    BLOCK_N: gl.constexpr = k_held.shape[1]
    dtype: gl.constexpr = q_held.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    moved: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    CHUNK: gl.constexpr = 16

    queries = q_held.index(half)
    _load_queries(
        queries, half, q_ptr, cos_ptr, sin_ptr, q_row, cos_row, sin_row, head, first_row, end, GROUP, ROWS, ROTATED
    )
    m = half * HIGH + gl.arange(0, HIGH, gl.SliceLayout(1, scores))
    row = first_row + m // GROUP
    limit = gl.load(limit_ptr + row, mask=(m // GROUP < ROWS) & (row < seeing), other=0)
    acc = gl.zeros([HIGH, D], gl.float32, sums)
    total = gl.zeros([HIGH], gl.float32, gl.SliceLayout(1, scores))
    if blocks > 0:
        mbarrier.wait(full.index(0), 0)
        nothing = gl.zeros([HIGH, BLOCK_N], gl.float32, scores)
        score = warpgroup_mma(queries, k_held.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        mbarrier.arrive(empty.index(0))
        key = (blocks - 1) * BLOCK_N
        score = _hidden(score, key, limit)
        top = gl.max(score, 1) * scale
        base = gl.where(top == float("-inf"), 0.0, top)  # a row may see nothing so far
        p = gl.exp2(score * scale - gl.expand_dims(base, 1))
        total = gl.sum(p, 1)
        weight = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, sums, 2))
        if longest < blocks * BLOCK_N:
            # Unwritten slots may hold NaN, which no weight of zero hides. Both groups write the same.
            mbarrier.wait(full.index(STAGES), 0)
            for c in gl.static_range(BLOCK_N // CHUNK):
                if key + (c + 1) * CHUNK > longest:
                    part = v_held.index(0).slice(c * CHUNK, CHUNK)
                    slot = key + c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, moved))
                    value = part.load(moved)
                    part.store(gl.where(gl.expand_dims(slot < longest, 1), value, gl.zeros_like(value)))
            fence_async_shared()
        some = gl.maximum(blocks - plain, 1)
        for i in range(1, some):
            key = (blocks - 1 - i) * BLOCK_N
            acc, weight, top, total = _next_block(i, key, limit, queries, held, acc, weight, top, total, scale, True)
        for i in range(some, blocks):
            acc, weight, top, total = _next_block(i, 0, limit, queries, held, acc, weight, top, total, scale, False)
        last = blocks - 1
        mbarrier.wait(full.index(STAGES + last % STAGES), last // STAGES & 1)
        acc = warpgroup_mma(weight, v_held.index(last % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    total = gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, sums))
    queries.store((acc / gl.expand_dims(total, 1)).to(dtype))  # by way of shared memory: whole rows leave at once
    m = half * HIGH + gl.arange(0, HIGH, gl.SliceLayout(1, moved))
    d = gl.arange(0, D, gl.SliceLayout(0, moved))
    row = first_row + m // GROUP
    at = (row.to(gl.int64) * HEADS + head * GROUP + m % GROUP) * D
    live = gl.expand_dims((m // GROUP < ROWS) & (row < end), 1)
    gl.store(out_ptr + gl.expand_dims(at, 1) + gl.expand_dims(d, 0), queries.load(moved), mask=live)


@gluon.jit
def _load_queries(
    queries, half, q_ptr, cos_ptr, sin_ptr, q_row, cos_row, sin_row, head, first_row, end,
    GROUP: gl.constexpr, ROWS: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """Load the queries of a half into shared memory, by way of registers, in which they are rotated."""
    HIGH: gl.constexpr = queries.shape[0]
    SIDE: gl.constexpr = queries.shape[1] // 2
    moved: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = half * HIGH + gl.arange(0, HIGH, gl.SliceLayout(1, moved))
    left, right = queries_at(
        m, q_ptr, cos_ptr, sin_ptr, q_row, cos_row, sin_row, head, first_row, end, GROUP, ROWS, 2 * SIDE, ROTATED
    )
    queries.slice(0, SIDE, 1).store(left)
    queries.slice(SIDE, SIDE, 1).store(right)
    fence_async_shared()


@gluon.jit
def queries_at(
    m, q_ptr, cos_ptr, sin_ptr, q_row, cos_row, sin_row, head, first_row, end,
    GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, ROTATED: gl.constexpr,
):  # fmt: skip
    """Halves [M, D // 2] of the queries of stacked rows m of a tile, rotated if ROTATED; zeros for rows beyond it."""
    SIDE: gl.constexpr = D // 2
    moved: gl.constexpr = m.type.layout.parent
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    d = gl.expand_dims(gl.arange(0, SIDE, gl.SliceLayout(0, moved)), 0)
    row = first_row + m // GROUP
    live = gl.expand_dims((m // GROUP < ROWS) & (row < end), 1)
    at = gl.expand_dims(row.to(gl.int64) * q_row + (head * GROUP + m % GROUP) * 2 * SIDE, 1) + d
    left = gl.load(q_ptr + at, mask=live, other=0.0)
    right = gl.load(q_ptr + at + SIDE, mask=live, other=0.0)
    if ROTATED:
        angle = gl.expand_dims(row.to(gl.int64), 1)
        cos_at, sin_at = angle * cos_row + d, angle * sin_row + d
        left_cos = gl.load(cos_ptr + cos_at, mask=live, other=0.0).to(gl.float32)
        left_sin = gl.load(sin_ptr + sin_at, mask=live, other=0.0).to(gl.float32)
        right_cos = gl.load(cos_ptr + cos_at + SIDE, mask=live, other=0.0).to(gl.float32)
        right_sin = gl.load(sin_ptr + sin_at + SIDE, mask=live, other=0.0).to(gl.float32)
        x, y = left.to(gl.float32), right.to(gl.float32)
        left = (x * left_cos - y * left_sin).to(dtype)
        right = (y * right_cos + x * right_sin).to(dtype)
    return left, right


@gluon.jit
def _hidden(score, key, limit):
    """Scores of the positions from `key` on, -inf for those that a row does not see."""
    BLOCK_N: gl.constexpr = score.shape[1]
    position = key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score.type.layout))
    return gl.where(gl.expand_dims(position, 0) < gl.expand_dims(limit, 1), score, float("-inf"))


@gluon.jit
def _next_block(i, key, limit, queries, held, acc, weight, top, total, scale, MASKED: gl.constexpr):
    """Compute scores of block i and products with values of the block before.

    The softmax of the one runs beside the product of the other.
    """
    _, k_held, v_held, full, empty = held
    STAGES: gl.constexpr = k_held.shape[0]
    BLOCK_N: gl.constexpr = k_held.shape[1]
    HIGH: gl.constexpr = queries.shape[0]
    sums: gl.constexpr = acc.type.layout
    stage, before = i % STAGES, (i - 1) % STAGES
    nothing = gl.zeros([HIGH, BLOCK_N], gl.float32, sums)
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    score = warpgroup_mma(queries, k_held.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(full.index(STAGES + before), (i - 1) // STAGES & 1)
    acc = warpgroup_mma(weight, v_held.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(empty.index(stage))
    if MASKED:
        score = _hidden(score, key, limit)
    higher = gl.maximum(top, gl.max(score, 1) * scale)
    base = gl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    p = gl.exp2(score * scale - gl.expand_dims(base, 1))
    fade = gl.exp2(top - base)
    total = total * fade + gl.sum(p, 1)
    coming = gl.convert_layout(p.to(v_held.dtype), weight.type.layout)
    # Named in the wait, so that they are made before it.
    acc, weight, total = warpgroup_mma_wait(0, deps=(acc, coming, total))
    mbarrier.arrive(empty.index(STAGES + before))
    acc *= gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, sums)), 1)
    return acc, weight, higher, total
