"""dgraph::importance on CUDA.

Three kernels: the list of members of each sequence; per sequence and KV head, the attention that each
member receives from the query heads of that KV head, in registers; and the sum over KV heads, in order.
A window of the pool is a maximum over products with the list of keys, each shifted by one place more. So
the columns of a tile exchange nothing.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.padded import check_heads
from dgraph.ops.triton.rows import dense_rows, power_of_two

CHUNK = 128


def kernel(
    q: Tensor, k: Tensor, member: Tensor, cu_rows: Tensor, scale: float, pool: int, block: int | None = None
) -> Tensor:
    """dgraph::importance; see its contract.

    Lists of up to `block` rows (16 to 64, by the mean number of rows per sequence) take one pass; longer
    ones are right too, but every product is taken twice.
    """
    check_heads("importance", q, k, 1)
    if pool < 1 or pool % 2 == 0:
        raise InputError(f"dgraph::importance: pool must be odd and at least 1, got {pool}.")
    (n, heads, d), kv_heads, b = q.shape, k.shape[1], cu_rows.shape[0] - 1
    out = torch.empty(n, dtype=torch.float32, device=q.device)
    if not n:
        return out
    q, k, member = dense_rows(q), dense_rows(k), member.contiguous()
    group = heads // kv_heads
    if block is None:
        block = power_of_two(-(-n // max(b, 1)), 16, 64 if q.element_size() <= 2 else 32)
    stacked = max(power_of_two(group * block, 16, 128 if q.element_size() <= 2 else 32), power_of_two(group))
    rows = torch.empty(n, dtype=torch.int32, device=q.device)
    counts = torch.empty(b, dtype=torch.int32, device=q.device)
    part = torch.empty((kv_heads, n), dtype=torch.float32, device=q.device)
    if b:
        _list_members[(b,)](member, cu_rows, rows, counts, CHUNK, num_warps=4)
        _receive[(b, kv_heads)](
            q, k, cu_rows, rows, counts, part, n, q.stride(0), k.stride(0), scale,
            group, d, power_of_two(d, 16), pool // 2, stacked // group, stacked, block,
            "ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
        )  # fmt: skip
    _add_heads[(triton.cdiv(n, CHUNK),)](part, member, cu_rows, out, n, b, kv_heads, CHUNK, num_warps=4)
    return out


@triton.jit
def _list_members(member_ptr, cu_ptr, rows_ptr, counts_ptr, CHUNK: tl.constexpr):
    """rows[cu[s] : cu[s] + counts[s]] = the members of sequence s, ascending."""
    s = tl.program_id(0)
    start, end = tl.load(cu_ptr + s), tl.load(cu_ptr + s + 1)
    count = 0
    for first in range(start, end, CHUNK):
        row = first + tl.arange(0, CHUNK)
        flag = tl.load(member_ptr + row, mask=row < end, other=0) != 0
        ones = flag.to(tl.int32)
        tl.store(rows_ptr + start + count + tl.cumsum(ones, 0) - 1, row, mask=flag)
        count += tl.sum(ones)
    tl.store(counts_ptr + s, count)


@triton.jit
def _load_queries(
    q_ptr, rows_ptr, count, first, head, q_row,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """Queries [STACKED, WIDTH] of list slots from `first` on, heads of a KV head stacked; and flags of real slots."""
    m, d = tl.arange(0, STACKED), tl.arange(0, WIDTH)
    slot = first + m // GROUP
    live = (m // GROUP < QUERIES) & (slot < count)
    row = tl.load(rows_ptr + slot, mask=live, other=0).to(tl.int64)
    at = (row * q_row + (head * GROUP + m % GROUP) * D)[:, None] + d[None, :]
    return tl.load(q_ptr + at, mask=live[:, None] & (d < D)[None, :], other=0.0), live


@triton.jit
def _pooled(
    q, k_ptr, rows_ptr, count, first, head, k_row, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, STACKED: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Pooled scores [STACKED, BLOCK] of the list slots from `first` on; -inf past the end of the list."""
    d = tl.arange(0, WIDTH)
    column = first + tl.arange(0, BLOCK)
    best = tl.full([STACKED, BLOCK], float("-inf"), tl.float32)
    for window in tl.static_range(2 * HALF + 1):
        slot = column + window - HALF
        inside = (slot >= 0) & (slot < count)
        row = tl.load(rows_ptr + slot, mask=inside, other=0).to(tl.int64)
        at = (row * k_row + head * D)[None, :] + d[:, None]
        k = tl.load(k_ptr + at, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        best = tl.maximum(best, tl.where(inside[None, :], score, float("-inf")))
    return tl.where((column < count)[None, :], best, float("-inf"))


@triton.jit
def _receive(
    q_ptr, k_ptr, cu_ptr, rows_ptr, counts_ptr, part_ptr, n, q_row, k_row, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, QUERIES: tl.constexpr,
    STACKED: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """part[head, row] = softmax of the pooled scores, summed over the queries of members and the head's group."""
    s, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts_ptr + s)
    rows_ptr += tl.load(cu_ptr + s)
    part_ptr += head.to(tl.int64) * n
    column = tl.arange(0, BLOCK)
    if count <= BLOCK:
        mass = tl.zeros([BLOCK], tl.float32)
        for first in range(0, count, QUERIES):
            q, live = _load_queries(q_ptr, rows_ptr, count, first, head, q_row, GROUP, D, WIDTH, QUERIES, STACKED)
            score = _pooled(q, k_ptr, rows_ptr, count, 0, head, k_row, scale, D, WIDTH, HALF, STACKED, BLOCK, PRECISION)
            p = tl.exp(score - tl.max(score, 1)[:, None])
            p = p / tl.sum(p, 1)[:, None]
            mass += tl.sum(tl.where(live[:, None], p, 0.0), 0)
        row = tl.load(rows_ptr + column, mask=column < count, other=0)
        tl.store(part_ptr + row, mass, mask=column < count)
    else:
        for first in range(0, count, QUERIES):
            q, live = _load_queries(q_ptr, rows_ptr, count, first, head, q_row, GROUP, D, WIDTH, QUERIES, STACKED)
            top = tl.full([STACKED], float("-inf"), tl.float32)
            total = tl.zeros([STACKED], tl.float32)
            for key in range(0, count, BLOCK):
                score = _pooled(
                    q, k_ptr, rows_ptr, count, key, head, k_row, scale, D, WIDTH, HALF, STACKED, BLOCK, PRECISION
                )
                higher = tl.maximum(top, tl.max(score, 1))
                total = total * tl.exp(top - higher) + tl.sum(tl.exp(score - higher[:, None]), 1)
                top = higher
            for key in range(0, count, BLOCK):
                score = _pooled(
                    q, k_ptr, rows_ptr, count, key, head, k_row, scale, D, WIDTH, HALF, STACKED, BLOCK, PRECISION
                )
                p = tl.exp(score - top[:, None]) / total[:, None]
                mass = tl.sum(tl.where(live[:, None], p, 0.0), 0)
                row = tl.load(rows_ptr + key + column, mask=key + column < count, other=0)
                # The sum over the tiles of queries goes through memory; only this program writes there.
                tl.debug_barrier()
                before = tl.load(part_ptr + row, mask=(key + column < count) & (first > 0), other=0.0)
                tl.debug_barrier()
                tl.store(part_ptr + row, before + mass, mask=key + column < count)


@triton.jit
def _add_heads(part_ptr, member_ptr, cu_ptr, out_ptr, n, b, heads, CHUNK: tl.constexpr):
    """out = part summed over heads in order; 0 in rows that are no members and in padding rows."""
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = tl.load(cu_ptr + b)
    flag = (tl.load(member_ptr + row, mask=row < n, other=0) != 0) & (row < live)
    mass = tl.zeros([CHUNK], tl.float32)
    for head in range(heads):
        mass += tl.load(part_ptr + head * n + row, mask=flag, other=0.0)
    tl.store(out_ptr + row, mass, mask=row < n)
