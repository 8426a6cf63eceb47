"""Linear layers over 8-bit numbers, in plain PyTorch: rows and weights rounded, each row over its own scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

LARGEST = {"fp8": 448.0, "int8": 127.0}


def rounded(x: Tensor, kind: str, scales: torch.dtype | None = None) -> Tensor:
    """Rows [..., d] as they are read: over their scale, the largest magnitude / the largest number, rounded, and times
    it. `tests.oracle.float8` has the numbers of e4m3 in a table, to which torch's conversion is compared there.

    scales: their dtype; None for that of the rows.
    """
    most = x.to(scales or x.dtype).abs().amax(-1, keepdim=True)
    scale = (most / LARGEST[kind]).clamp(min=2.0**-100).to(x.dtype)
    over = x / scale
    return scale * (over.round() if kind == "int8" else over.to(torch.float8_e4m3fn).to(x.dtype))


def linear_in(kind: str, but: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    """A linear layer of which rows and weight are rounded; weights of which `but` holds are taken as they are.

    Scales of weights are stored, and so in fp32.
    """

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if but(weight):
            return linear(x, weight, bias)
        return linear(rounded(x, kind), rounded(weight, kind, torch.float32), bias)

    return layer
