"""Keys and values in eight bits, in plain PyTorch: the numbers of the format in a table, and the nearest of them."""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

NUMBERS = sorted(
    {(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)} - {480.0}
)
"""What e4m3 can say, from 0 to 448: three bits of fraction, an exponent of at least -6."""
EVEN = {number: i % 2 == 0 for i, number in enumerate(NUMBERS)}


def nearest(value: float) -> float:
    """The nearest number of the format, of two the one whose last bit is 0."""
    size = abs(value)
    at = min(bisect.bisect_left(NUMBERS, size), len(NUMBERS) - 1)
    near = min(NUMBERS[max(at - 1, 0) : at + 1], key=lambda number: (abs(number - size), not EVEN[number]))
    return near if value >= 0 else -near


def rounded(x: Tensor) -> Tensor:
    """Vectors [..., D] as they are read back: over their scale, the largest magnitude / 448, rounded, and times it."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-100)
    over = (x.float() / scale).flatten().tolist()
    return torch.tensor([nearest(value) for value in over]).view(x.shape) * scale
