"""Products by quantised weights, of rows as they are or in 8 bits: in plain torch, or on a CPU by a kernel."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.families.quantised import KINDS, WHOLE, QuantisedRows, QuantisedWeight, spread, unpacked
from dgraph.ops.products.cpp import product
from dgraph.private.torch import product_of_int8

AT_A_TIME = 2**18
"""Elements of a weight that are dequantised at a time, as many as a core's cache holds."""
MANY_ROWS, MOST_NUMBERS = 128, 2**28
"""Rows above which a GPU dequantises a weight before the product, into memory of its own, and the most numbers of such
a weight. It does not where a kernel is fast for more rows (`dgraph.ops.products.triton.stored_roles`).
"""
_BYTE = 2.0**8
"""Ratio of a float8 to the float16 that has its bits: their exponents count from 7 and from 15."""


def multiply(
    x: Tensor | QuantisedRows, weight: Tensor | QuantisedWeight, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Compute x [..., columns] @ weight.T + bias, by a plain or a quantised weight [rows, columns].

    A quantised weight is taken some rows at a time, so that its numbers go from memory to the product once. If a scale
    is of a whole row, the sum is scaled.

    Args:
        x: as it is; or in the numbers that the weight is stored in, which then has a scale for each row. Sums are in
            int32 for int8, else in fp32, and scaled by the row's scale, then by the weight's.
    """
    if isinstance(x, QuantisedRows):
        assert isinstance(weight, QuantisedWeight)
        return _of_numbers(x, weight, bias)
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if product.serves(x, weight):
        return product.multiply(x, weight, bias)
    rows, columns = weight.shape
    high = rows if weight.block[0] == WHOLE else weight.block[0]
    some = max(1, AT_A_TIME // max(1, columns * high)) * high
    parts = [_product(x, weight.rows(at, min(at + some, rows))) for at in range(0, rows, some)]
    made = parts[0] if len(parts) == 1 else torch.cat(parts, -1) if parts else x.new_empty((*x.shape[:-1], 0))
    return made if bias is None else made.add_(bias)


def workspace(device: torch.device, x: Tensor | QuantisedRows, weight: Tensor | QuantisedWeight) -> int:
    """Bytes of the weight if a GPU may dequantise it first, see `dequantised_first`."""
    return x.element_size() * weight.shape.numel() if device.type == "cuda" and dequantised_first(x, weight) else 0


def dequantised_first(x: Tensor | QuantisedRows, weight: Tensor | QuantisedWeight) -> bool:
    """True if a GPU without a faster kernel dequantises a weight before the product by x [..., columns], not in it."""
    if isinstance(x, QuantisedRows) or isinstance(weight, Tensor):
        return False
    return x.shape[:-1].numel() > MANY_ROWS and weight.shape.numel() <= MOST_NUMBERS


def _of_numbers(x: QuantisedRows, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """Multiply rows by a weight in numbers of the same kind, both with a scale for each row."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.values.dtype == torch.int8 and x.device.type == "cpu":
        if (made := product.multiply_numbers(x, weight, bias)) is not None:
            return made
        sums = product_of_int8(x.values, weight.values).to(wide)
    else:
        rows, more = _numbers(x.values, wide)
        if product.serves(rows, weight):
            return product.multiply(rows.to(x.dtype), weight, bias, x.scales * more)
        each = max(1, AT_A_TIME // max(1, weight.shape[1]))
        parts = [F.linear(rows, _numbers(values, wide)[0]) for values in weight.values.split(each)]
        sums = torch.cat(parts, -1) * (more * more)
    made = sums * x.scales.to(wide) * _of_rows(weight, wide)
    return (made if bias is None else made + bias).to(x.dtype)


def _of_rows(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Scales [rows] of a weight that has one for each row."""
    return spread(weight.scales, weight.block, weight.shape)[:, 0].to(dtype)


def _product(x: Tensor, weight: QuantisedWeight) -> Tensor:
    if weight.zeros is None and weight.scales.shape[-1] == 1 and x.dtype != torch.float16:  # whose sums are too large
        numbers, more = _numbers(weight.values, x.dtype)
        of_rows = _of_rows(weight, torch.promote_types(x.dtype, torch.float32)) * more
        return (F.linear(x, numbers) * of_rows).to(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers, more = _numbers(weight.values, wide)
    if weight.zeros is not None:
        zeros = weight.zeros - KINDS["int4"].zero if weight.values.dtype == torch.uint8 else weight.zeros
        numbers = numbers - spread(zeros, weight.block, numbers.shape)
    return F.linear(x, (numbers * spread(weight.scales * more, weight.block, numbers.shape)).to(x.dtype))


def _numbers(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Stored numbers in a floating dtype, less the usual zero of 4-bit ones, and the factor by which to multiply them.

    A conversion of float8 by torch takes ten times as long on a CPU.
    """
    if values.dtype == torch.float8_e4m3fn:
        bits = values.view(torch.int8).to(torch.int16)
        bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))  # the sign was extended
        return bits.view(torch.float16).float().to(dtype), _BYTE  # the direct way to bfloat16 is slow, too
    if values.dtype != torch.uint8:
        return values.to(dtype), 1.0
    if dtype != torch.float32 or values.device.type != "cpu":
        return unpacked(values).to(dtype) - KINDS["int4"].zero, 1.0
    found = _pairs().index_select(0, values.reshape(-1).int())
    return found.view(torch.float32).view(*values.shape[:-1], -1), 1.0


@functools.cache
def _pairs() -> Tensor:
    """Table i64[256]: for each byte the two float32 that its 4-bit numbers stand for."""
    byte = torch.arange(256, dtype=torch.uint8)
    pairs = unpacked(byte.unsqueeze(1)).float() - KINDS["int4"].zero
    return pairs.contiguous().view(torch.int64).squeeze(1)
