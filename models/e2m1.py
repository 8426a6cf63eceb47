"""Floats of 4 bits (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two in a byte, with a scale per group.

NVFP4 scales 16 columns by an e4m3 number, and the whole weight by an f32 one; MXFP4 scales 32 columns by a power of two
(OCP Microscaling Formats v1.0, section 5.3). Twice such a number is whole, so a weight is held in int8, with half its
scales: exactly, and multiplied by the kernels of int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.families.quantised import unpacked
from dgraph.families.weights import Made

FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
"""Names of the formats in compressed-tensors."""
WHOLE = "weight_global_scale"
"""The tensor of compressed-tensors with the scale of a whole weight."""
NVFP4, MXFP4 = 16, 32
"""Columns that share a scale."""
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the number of each code."""
_BIAS = 127
"""The exponent that stands for 1 in a scale of MXFP4."""


def doubled(codes: Tensor) -> Made:
    """Twice the numbers of a weight, int8 [rows, columns], from u8 [rows, columns / 2], the even column's lower."""
    shape = codes.shape[0], 2 * codes.shape[1]
    return Made(shape, torch.int8, lambda: torch.tensor(_DOUBLED, dtype=torch.int8)[unpacked(codes).long()])


def halved(scales: Tensor, whole: Tensor | None = None, divides: bool = False) -> Made:
    """Half the scales of a weight, f32 [rows, groups].

    Args:
        scales: of groups: e4m3, or u8 exponents.
        whole: scale of the whole weight, f32 of one element; None for 1.
        divides: True if scales are divided by `whole`, and not multiplied.
    """

    def make() -> Tensor:
        if scales.dtype == torch.uint8:
            return torch.ldexp(torch.tensor(0.5), scales.int() - _BIAS)
        found = scales.float()
        if whole is not None:
            by = whole.float().reshape(())
            found = found / by if divides else found * by
        return found / 2

    return Made(tuple(scales.shape), torch.float32, make)
