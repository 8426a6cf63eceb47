"""Products by quantised weights on a CPU, in tiles if it has them (AMX), else in vectors; calls `product.cpp`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import LoweringError, warn
from dgraph.families.quantised import KINDS, WHOLE, QuantisedRows, QuantisedWeight
from dgraph.private.inductor import load_cpp

_PARTS = ("product_numbers.cpp", "product.cpp")
_KINDS = {KINDS[name].dtype: number for number, name in enumerate(("fp8", "int8", "int4"))}
_POINTER, _SIZE = c_void_p, c_int64
_ARGUMENTS = (
    *(_POINTER, c_int, _POINTER, _SIZE),  # x, 1 if it is bfloat16, scales of rows, number of rows
    *(_POINTER, c_int, _POINTER, _POINTER),  # values, their kind, scales, zeros
    *(_SIZE, _SIZE, _SIZE, _SIZE),  # rows and columns of the weight, of a block
    *(_POINTER, _POINTER, c_int),  # bias, result, threads
)

_OF_NUMBERS = (
    *(_POINTER, _POINTER, _SIZE),  # x, scales of rows, number of rows
    *(_POINTER, _POINTER, _SIZE, _SIZE, _SIZE),  # values, scales, rows and columns of the weight, rows of a block
    *(_POINTER, _POINTER, c_int, c_int),  # bias, result, 1 if it is bfloat16, threads
)


def serves(x: Tensor, weight: QuantisedWeight) -> bool:
    """True if the kernel takes these operands: on a CPU where it compiled, a contiguous weight, x not in float64."""
    if x.device.type != "cpu" or x.dtype == torch.float64 or weight.values.dim() != 2 or not x.numel():
        return False
    stored = (weight.values, weight.scales, weight.zeros)
    return all(part is None or part.is_contiguous() for part in stored) and _kernels() is not None


def multiply(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Compute x [..., columns] * scales [..., 1] @ weight.T + bias, in the dtype of x, of operands that it serves.

    Sums are in fp32 and rounded once. The result of a row does not depend on the rows beside it. If a scale is of a
    whole row the sum is scaled, else each number. Scaled numbers are rounded to bfloat16 before the product if the CPU
    multiplies that.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        return multiply(x.float(), weight, bias, scales).to(x.dtype)
    kernels = _kernels()
    assert kernels is not None
    rows, columns = weight.shape
    high, wide = (size if size != WHOLE else all_ for size, all_ in zip(weight.block, (rows, columns), strict=True))
    x = x.contiguous()
    added, of_rows = (None if t is None else t.float().contiguous() for t in (bias, scales))
    out = x.new_empty((*x.shape[:-1], rows))
    kernels[0](
        *(x.data_ptr(), x.dtype == torch.bfloat16, _at(of_rows), x.numel() // columns),
        *(weight.values.data_ptr(), _KINDS[weight.values.dtype], weight.scales.data_ptr(), _at(weight.zeros)),
        *(rows, columns, high, wide),
        *(_at(added), out.data_ptr(), torch.get_num_threads()),
    )
    return out


def multiply_numbers(x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None) -> Tensor | None:
    """Compute x [..., columns] @ weight.T + bias of int8 rows by an int8 weight, in the rows' dtype.

    None if this CPU has no tiles, or the kernel does not serve these operands. Sums are in int32; they are scaled by
    the row's scale, then by the weight's, in fp32, and rounded once.
    """
    kernels = _kernels() if serves(x.values, weight) else None
    if kernels is None or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    rows, columns = weight.shape
    values, of_rows = x.values.contiguous(), x.scales.float().contiguous()
    added = None if bias is None else bias.float().contiguous()
    out = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    done = kernels[1](
        *(values.data_ptr(), of_rows.data_ptr(), values.numel() // columns),
        *(weight.values.data_ptr(), weight.scales.data_ptr(), rows, columns),
        *(rows if weight.block[0] == WHOLE else weight.block[0], _at(added), out.data_ptr()),
        *(x.dtype == torch.bfloat16, torch.get_num_threads()),
    )
    return out if done else None


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _kernels() -> tuple[Callable[..., Any], ...] | None:
    """Kernels for rows as they are, and for rows in int8; None if they do not compile, with one warning."""
    source = "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _PARTS)
    try:
        kernels = tuple(load_cpp(source, name) for name in ("multiply", "multiply_numbers"))
    except LoweringError as error:
        warn(
            f"products by quantised weights run in plain torch, which is slower, since their kernel did not compile: "
            f"{error} `dgraph doctor` says what is missing."
        )
        return None
    for kernel, takes, gives in zip(kernels, (_ARGUMENTS, _OF_NUMBERS), (None, c_int), strict=True):
        kernel.argtypes, kernel.restype = takes, gives  # type: ignore[attr-defined]
    return kernels
