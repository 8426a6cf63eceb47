"""dgraph::rows_norm on CUDA: each of P programs takes every P-th live row."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.rows.rows_norm import check_sizes, dtype_of
from dgraph.ops.triton.rows import dense_rows, live_rows, power_of_two

PROGRAMS = 2048
"""Most programs, enough to fill any device. With one for each row of a large capacity, most would find no live row."""


def kernel(x: Tensor, weight: Tensor | None, eps: float, cu_rows: Tensor) -> Tensor:
    """dgraph::rows_norm; see its contract."""
    check_sizes(x, weight)
    (n, d), x, weight = x.shape, dense_rows(x), None if weight is None else weight.contiguous()
    out = torch.empty((n, d), dtype=dtype_of(x, weight), device=x.device)
    if out.numel():
        block = power_of_two(d, 32)
        _norm_rows[(min(n, PROGRAMS),)](
            x, weight, cu_rows, out, n, cu_rows.shape[0] - 1, x.stride(0), eps,
            d, block, num_warps=power_of_two(block // 512, 1, 16),
        )  # fmt: skip
    return out


@triton.jit
def _norm_rows(x_ptr, weight_ptr, cu_ptr, out_ptr, n, b, x_row, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    for row in range(tl.program_id(0), live_rows(cu_ptr, b, n), tl.num_programs(0)):
        at = tl.cast(row, tl.int64)
        x = tl.load(x_ptr + at * x_row + column, mask=inside, other=0.0).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x) / SIZE + eps)
        out = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        if weight_ptr is not None:
            out = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) * out
        tl.store(out_ptr + at * SIZE + column, out, mask=inside)
