"""dgraph::linear on CUDA: by a weight as it is, or as it is stored."""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.ops.triton import stored
from dgraph.quantised import QuantisedRows, QuantisedWeight


def kernel(x: Tensor | QuantisedRows, weight: Tensor | QuantisedWeight, bias: Tensor | None) -> Tensor:
    """dgraph::linear; see its contract."""
    x = x if isinstance(x, Tensor) else x.dequantised()
    if isinstance(weight, Tensor):
        return torch.nn.functional.linear(x, weight, bias)
    made = stored.launch(x.reshape(-1, x.shape[-1]), weight, bias, None)
    return made.view(*x.shape[:-1], made.shape[1])
