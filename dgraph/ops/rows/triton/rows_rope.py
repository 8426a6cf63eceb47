"""dgraph::rows_rope on CUDA: each of P programs takes every P-th live row, all heads of it at once."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.rows.rows_rope import check_sizes, result_dtype
from dgraph.ops.rows.triton.rows_norm import PROGRAMS
from dgraph.ops.triton.rows import live_rows, power_of_two


def kernel(x: Tensor, cos: Tensor, sin: Tensor, cu_rows: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """dgraph::rows_rope; see its contract."""
    check_sizes(x, cos, sin, weight)
    x, cos, sin = (value if value.stride(2) == 1 else value.contiguous() for value in (x, cos, sin))
    n, heads, d = x.shape
    out = torch.empty((n, heads, d), dtype=result_dtype(x, cos, weight), device=x.device)
    if out.numel():
        blocks = power_of_two(heads), power_of_two(d // 2)
        normed = x if weight is None else weight.contiguous()
        _rotate_rows[(min(n, PROGRAMS),)](
            x, cos, sin, cu_rows, normed, out, n, cu_rows.shape[0] - 1, *x.stride()[:2], cos.stride(0), sin.stride(0),
            eps, heads, d // 2, weight is not None, torch.promote_types(x.dtype, normed.dtype) == x.dtype, *blocks,
            num_warps=power_of_two(blocks[0] * blocks[1] // 512, 1, 8),
        )  # fmt: skip
    return out


@triton.jit
def _rotate_rows(
    x_ptr, cos_ptr, sin_ptr, cu_ptr, weight_ptr, out_ptr, n, b, x_row, x_head, cos_row, sin_row, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    within = column < HALF
    inside = (head < HEADS) & within
    for row in range(tl.program_id(0), live_rows(cu_ptr, b, n), tl.num_programs(0)):
        at = tl.cast(row, tl.int64)
        source = x_ptr + at * x_row + head * x_head + column
        low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            mean = tl.sum(low * low + high * high, 1, keep_dims=True) / (2 * HALF)
            factor = tl.rsqrt(mean + eps)
            low = _weighted(low * factor, weight_ptr + column, within, x_ptr, ROUNDED)
            high = _weighted(high * factor, weight_ptr + HALF + column, within, x_ptr, ROUNDED)
        cos, sin = cos_ptr + at * cos_row + column, sin_ptr + at * sin_row + column
        first = _times(low, cos, within, out_ptr) - _times(high, sin, within, out_ptr)
        second = _times(high, cos + HALF, within, out_ptr) + _times(low, sin + HALF, within, out_ptr)
        out = out_ptr + (at * HEADS + head) * (2 * HALF) + column
        tl.store(out, first, mask=inside)
        tl.store(out + HALF, second, mask=inside)


@triton.jit
def _weighted(normed, weight_ptr, within, x_ptr, ROUNDED: tl.constexpr):
    """The normed value, rounded to the dtype of x, times the weight, rounded to it too if that is the result's."""
    weight = tl.load(weight_ptr, mask=within, other=0.0).to(tl.float32)
    value = weight * normed.to(x_ptr.dtype.element_ty).to(tl.float32)
    return value.to(x_ptr.dtype.element_ty).to(tl.float32) if ROUNDED else value


@triton.jit
def _times(value, angle_ptr, within, out_ptr):
    """The product, rounded to the dtype of the result."""
    angle = tl.load(angle_ptr, mask=within, other=0.0).to(tl.float32)
    return (value * angle).to(out_ptr.dtype.element_ty).to(tl.float32)
