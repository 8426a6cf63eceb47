"""Helpers of kernels that read or write keys and values in float8; see `dgraph.ops.kv.scales`."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.kv import scales
from dgraph.ops.triton.rows import power_of_two

LARGEST, LEAST = tl.constexpr(scales.LARGEST), tl.constexpr(scales.LEAST)


def check_scales(op: str, **pairs: tuple[Tensor, Tensor | None]) -> None:
    """Refuse stored vectors without scales, and scales that are not one for each vector.

    Scales must lie by head in a paged cache, which has four dimensions, and else be contiguous.

    Raises:
        InputError: naming the op and the argument.
    """
    for name, (stored, scale) in pairs.items():
        scales.check_scale(op, stored, scale)
        if scale is None or stored.dim() == 4:
            continue
        if scale.shape != stored.shape[:-1] or not scale.is_contiguous():
            raise InputError(
                f"dgraph::{op}: the scales of {name} {list(stored.shape)} must be contiguous "
                f"{list(stored.shape[:-1])}, got {list(scale.shape)} with strides {scale.stride()}."
            )


def heads_of(heads: int, d: int, scale: Tensor | None) -> tuple[int, int, int, int]:
    """Sizes that `store_scaled` takes for the vectors of a row: heads, heads at a time, head_dim and the power of two
    above it; zeros where there are no scales.
    """
    if scale is None:
        return 0, 0, 0, 0
    width = power_of_two(d, 16)
    return heads, power_of_two(heads, 1, max(1, 4096 // width)), d, width


@triton.jit
def quantised(x):
    """Vectors f32[R, WIDTH] over their scales, rounded to numbers of float8e4nv; and the scales f32[R]."""
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), tl.full([x.shape[0]], LARGEST, tl.float32)), LEAST)
    return nearest(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))), scale


@triton.jit
def nearest(x):
    """Round f32 values up to LARGEST to numbers of float8e4nv, ties to even.

    It adds and subtracts a number so large that its last bit is worth as much as that of float8. Then the conversion,
    which not every back end rounds to even, is exact.
    """
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)  # at least that of 2 ** -6
    large = ((exponent + (20 << 23)) | 0x400000).to(tl.float32, bitcast=True)
    return (x + large) - large


@triton.jit
def scales_at(page, place, PAGE: tl.constexpr, HEADS: tl.constexpr):
    """Place of a slot's first scale; those of the next heads follow every PAGE places."""
    return page * (PAGE * HEADS) + place


@triton.jit
def store_scaled(
    from_ptr, to_ptr, scale_ptr, inside,
    PAGE: tl.constexpr, HEADS: tl.constexpr, SOME: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the HEADS vectors of a row to a slot in float8, SOME at a time, and their scales; only if `inside`."""
    d = tl.arange(0, WIDTH)
    for first in range(0, HEADS, SOME):
        head = first + tl.arange(0, SOME)
        live = inside & (head < HEADS)
        at = head[:, None] * D + d[None, :]
        there = live[:, None] & (d < D)[None, :]
        stored, scale = quantised(tl.load(from_ptr + at, mask=there, other=0.0).to(tl.float32))
        tl.store(to_ptr + at, stored.to(to_ptr.dtype.element_ty), mask=there)
        tl.store(scale_ptr + head * PAGE, scale, mask=live)


@triton.jit
def load_scaled(
    stored_ptr, scale_ptr, inside, first,
    PAGE: tl.constexpr, HEADS: tl.constexpr, SOME: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Vectors f32[SOME, WIDTH] of a slot from head `first` on, times their scales; zeros unless `inside`."""
    head, d = first + tl.arange(0, SOME), tl.arange(0, WIDTH)
    live = inside & (head < HEADS)
    there = live[:, None] & (d < D)[None, :]
    stored = tl.load(stored_ptr + head[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
    return stored * tl.load(scale_ptr + head * PAGE, mask=live, other=0.0).to(tl.float32)[:, None]


@triton.jit
def halved(q):
    """Queries [M, D] in bf16 as float16 over a power of two for each row, and these f32[M]; others as they are, and 1.

    Keys in float8 are converted to the dtype of queries, and GPUs convert float8 to float16 alone. With bf16 each
    number takes a second conversion, by the unit that also computes exp2. A row's largest magnitude becomes 2**14 or
    more (if it was at least 2**-87), so that numbers down to its 2**-21th part keep all bits.
    """
    if q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        exponent = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000
        power = tl.maximum(exponent, 40 << 23) - (14 << 23)
        found = (wide * ((254 << 23) - power).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
        by = power.to(tl.float32, bitcast=True)
    else:
        found, by = q, tl.full([q.shape[0]], 1.0, tl.float32)
    return found, by


@triton.jit
def above(score, by, v_by):
    """A bound f32[M] of log2 of the weights times the scales of values, for scores [M, N] times `by`.

    Relative to it, the factors by which values are multiplied are at most 1, and near 1 where they count. So they fit
    into float16, whatever the scales are.
    """
    # By each row, in the layout of the scores: a maximum of v_by alone would make all warps meet.
    largest = tl.max(tl.broadcast_to(v_by[None, :], score.shape), 1).to(tl.int32, bitcast=True)
    return tl.max(score, 1) * by + ((largest >> 23) - 126).to(tl.float32)


@triton.jit
def load_scales(
    k_ptr, v_ptr, table_ptr, key, longest,
    PAGE: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load scales as `scales_of` does, of the positions from `key` on, with pointers from a KV head on.

    With MASKED they are zeros from `longest` on.
    """
    n = tl.arange(0, BLOCK_N)
    position = key + n
    seen = position < longest if MASKED else position >= 0
    if PAGE % BLOCK_N == 0:  # neighbours, read as such
        at = scales_at(tl.load(table_ptr + key // PAGE).to(tl.int64), key % PAGE, PAGE, HEADS) + n
    else:
        page = tl.load(table_ptr + position // PAGE, mask=seen, other=0).to(tl.int64)
        at = scales_at(page, position % PAGE, PAGE, HEADS)
    return scales_of(k_ptr, v_ptr, at, seen)


@triton.jit
def scales_of(k_ptr, v_ptr, at, seen):
    """Scales of keys and of values at places `at`, in f32; zeros unless `seen`."""
    k, v = tl.load(k_ptr + at, mask=seen, other=0.0), tl.load(v_ptr + at, mask=seen, other=0.0)
    return k.to(tl.float32), v.to(tl.float32)
