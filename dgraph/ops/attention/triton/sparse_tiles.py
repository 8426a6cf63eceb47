"""Helpers that the kernels of sparse_attention share: blocks of rows, and the running softmax over them."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgraph.ops.kv.triton.scales import above
from dgraph.ops.triton.rows import power_of_two


def matrices_of(k: Tensor, v: Tensor, block_n: int) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """k and v, [rows, D] or [rows, heads, D], for bulk copies of `block_n` rows of one head.

    None if they cannot be read so. The values of each row must be contiguous.
    """
    rows, d = k.shape[0], k.shape[-1]
    if k.device.type == "cuda" and torch.cuda.get_device_capability(k.device) < (9, 0):
        return None
    if d != power_of_two(d, 16) or not block_n <= rows < 1 << 31:
        return None
    found = []
    for x in (k, v):
        if (x.stride(0) * x.element_size() | x.data_ptr()) % 16:
            return None
        columns = x[0].numel()
        flat = x.as_strided((rows, columns), (x.stride(0), 1))
        found.append(TensorDescriptor(flat, [rows, columns], [x.stride(0), 1], [block_n, d]))
    return found[0], found[1]


@triton.jit
def load_rows(
    k_ptr, v_ptr, first, count, k_row, v_row,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys [WIDTH, BLOCK_N] and values [BLOCK_N, WIDTH] of the rows from `first` on; with MASKED zeros from `count`."""
    row, d = first + tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    k_at = row.to(tl.int64)[None, :] * k_row + d[:, None]
    v_at = row.to(tl.int64)[:, None] * v_row + d[None, :]
    if MASKED:  # rows after them are of another head or sequence, and may hold NaN
        seen = row < count
        k = tl.load(k_ptr + k_at, mask=seen[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_ptr + v_at, mask=seen[:, None] & (d < D)[None, :], other=0.0)
    elif WIDTH == D:
        k, v = tl.load(k_ptr + k_at), tl.load(v_ptr + v_at)
    else:
        k = tl.load(k_ptr + k_at, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_ptr + v_at, mask=(d < D)[None, :], other=0.0)
    return k, v


@triton.jit
def load_slots(
    k_ptr, v_ptr, page, slot, inside, k_page, k_slot, v_page, v_slot,
    D: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys [WIDTH, N] and values [N, WIDTH] at slots of pages i64[N]; with MASKED zeros unless `inside`."""
    d = tl.arange(0, WIDTH)
    k_at = (page * k_page + slot * k_slot)[None, :] + d[:, None]
    v_at = (page * v_page + slot * v_slot)[:, None] + d[None, :]
    if MASKED:
        k = tl.load(k_ptr + k_at, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_ptr + v_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif WIDTH == D:
        k, v = tl.load(k_ptr + k_at), tl.load(v_ptr + v_at)
    else:
        k = tl.load(k_ptr + k_at, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_ptr + v_at, mask=(d < D)[None, :], other=0.0)
    return k, v


@triton.jit
def fold(
    q, k, v, seen, top, total, acc, by, k_by, v_by, PRECISION: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Add one block of keys to the largest score, the sum of the weights and the weighted values of each row.

    With MASKED a row need not see all of them, or any. by: factor of each row's scores. k_by, v_by: scales as
    `scales_of` gives them, or None.
    """
    if k_by is not None:
        score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * k_by[None, :]
    else:
        score = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        score = tl.where(seen, score, float("-inf"))
    if v_by is not None:
        top, old = tl.maximum(top, above(score, by, v_by)), top
    else:
        top, old = tl.maximum(top, tl.max(score, 1) * by), top
    base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    p = tl.exp2(score * by[:, None] - base[:, None])
    fade = tl.exp2(old - base)
    total = total * fade + tl.sum(p, 1)
    if v_by is not None:
        p, v = p * v_by[None, :], v.to(q.dtype)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return top, total, acc
