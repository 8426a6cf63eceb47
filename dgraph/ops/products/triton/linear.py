"""dgraph::linear on CUDA: by a weight as it is, or as it is stored; of rows in 8 bits, too."""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ops.products.triton import eight_bits, stored_roles


def kernel(x: Tensor | QuantisedRows, weight: Tensor | QuantisedWeight, bias: Tensor | None) -> Tensor:
    """dgraph::linear; see its contract."""
    if isinstance(x, QuantisedRows):
        assert isinstance(weight, QuantisedWeight)
        made = eight_bits.launch(x.flat(), weight, bias, None)
    elif isinstance(weight := stored_roles.taken(weight, flat := x.reshape(-1, x.shape[-1])), Tensor):
        return torch.nn.functional.linear(x, weight, bias)
    else:
        made = stored_roles.launch(flat, weight, bias, None)
    return made.view(*x.shape[:-1], made.shape[1])
