"""dgraph::rows_quantise on CUDA: each of P programs takes every P-th live row, and holds it in registers."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.families.quantised import KINDS
from dgraph.ops.kv.triton.scales import nearest
from dgraph.ops.products.rows_quantise import check_sizes, fake
from dgraph.ops.rows.triton.rows_norm import PROGRAMS
from dgraph.ops.triton.rows import dense_rows, live_rows, power_of_two, start_of, wait

ROUNDING = {"enable_fp_fusion": False}
"""Launch options of a kernel that calls `rounded`: a product is rounded before a number is added to it."""
LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)
"""Scales below it are not used."""


def kernel(x: Tensor, kind: str, cu_rows: Tensor) -> tuple[Tensor, Tensor]:
    """dgraph::rows_quantise; see its contract."""
    check_sizes(x, kind)
    (n, d), x, (values, scales) = x.shape, dense_rows(x), fake(x, kind, cu_rows)
    if values.numel():
        block = power_of_two(d, 32)
        _quantise_live_rows[(min(n, PROGRAMS),)](
            x, cu_rows, values, scales, n, cu_rows.shape[0] - 1, x.stride(0), d, block, values.dtype == torch.int8,
            KINDS[kind].reach, num_warps=power_of_two(block // 512, 1, 16), **ROUNDING, **start_of(x.device),
        )  # fmt: skip
    return values, scales


@triton.jit
def _quantise_live_rows(
    x_ptr, cu_ptr, values_ptr, scales_ptr, n, b, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    INTEGERS: tl.constexpr, REACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    column, one = tl.arange(0, BLOCK)[None, :], tl.arange(0, 1)
    inside = column < SIZE
    for row in range(tl.program_id(0), live_rows(cu_ptr, b, n), tl.num_programs(0)):
        at = tl.cast(row, tl.int64)
        x = tl.load(x_ptr + at * x_row + column, mask=inside, other=0.0).to(tl.float32)
        numbers, scale = rounded(x, 1, INTEGERS, REACH)
        tl.store(values_ptr + at * SIZE + column, numbers.to(values_ptr.dtype.element_ty), mask=inside)
        tl.store(scales_ptr + at + one, scale)


@triton.jit
def rounded(found, ROWS: tl.constexpr, INTEGERS: tl.constexpr, REACH: tl.constexpr):
    """Rows f32[ROWS, n] as in `dgraph.families.quantised.quantised_rows`: numbers, in fp32, and scales f32[ROWS]."""
    bits = tl.max(tl.abs(found).to(tl.int32, bitcast=True), 1)  # the bits of NaN are above all others
    broken = bits >= 0x7F800000
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full([ROWS], REACH, tl.float32))
    scale = tl.where(scale < LEAST, 1.0, scale)
    by = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)
    numbers = tl.where(broken[:, None], 0.0, found * by[:, None])
    # 1.5 * 2 ** 23, whose last bit is worth 1: ties to even.
    numbers = numbers + 12582912.0 - 12582912.0 if INTEGERS else nearest(numbers)
    return numbers, tl.where(broken, float("nan"), scale)
