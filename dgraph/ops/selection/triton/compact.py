"""dgraph::compact on CUDA: one program per row of the result copies that row of every value, if there is one."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.triton.rows import dense_rows, power_of_two

# Values that one launch copies; more take more launches.
TOGETHER = 12
WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))


def kernel(values: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """dgraph::compact; see its contract."""
    rows = index.shape[0]
    outs = [torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in values]
    index = index.contiguous()
    moved = [(dense_rows(x), out) for x, out in zip(values, outs, strict=True) if out.numel()]
    for at in range(0, len(moved), TOGETHER):
        pairs = [_words(x, out) for x, out in moved[at : at + TOGETHER]]
        widths = tuple(out.shape[1] for _, out in pairs)
        _gather[(rows,)](
            index,
            tuple(x for x, _ in pairs),
            tuple(out for _, out in pairs),
            tuple(x.stride(0) for x, _ in pairs),
            widths,
            tuple(not x.is_floating_point() for x, _ in moved[at : at + TOGETHER]),
            power_of_two(max(widths), 32, 2048),
            num_warps=4,
        )
    return outs


def _words(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """View both as [rows, words], without a copy: the bytes of each row, as the largest integers that divide them."""
    size, step = x.element_size(), x.stride(0)
    width = math.prod(x.shape[1:])
    bounds = (width * size, step * size, x.data_ptr(), out.data_ptr())
    dtype = next(t for w, t in WORDS if all(bound % w == 0 for bound in bounds))
    views = x.as_strided((x.shape[0], width), (step, 1)), out.view(len(out), width)
    return views[0].view(torch.uint8).view(dtype), views[1].view(torch.uint8).view(dtype)


@triton.jit
def _gather(index_ptr, sources, outs, strides, WIDTHS: tl.constexpr, FILLED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(index_ptr + at)
    column = tl.arange(0, BLOCK)
    for i in tl.static_range(len(WIDTHS)):
        source = sources[i] + row * strides[i]
        out = outs[i] + at * WIDTHS[i]
        if (row >= 0) | FILLED[i]:
            for first in range(0, WIDTHS[i], BLOCK):
                inside = first + column < WIDTHS[i]
                word = tl.load(source + first + column, mask=inside & (row >= 0), other=0)
                tl.store(out + first + column, word, mask=inside)
