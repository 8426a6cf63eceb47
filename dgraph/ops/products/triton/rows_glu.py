"""dgraph::rows_glu on CUDA: the product of rows_linear, whose tiles take gate rows and up rows of the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ops.experts.triton import experts
from dgraph.ops.products.rows_glu import check_sizes
from dgraph.ops.products.triton import eight_bits, product_cases, product_roles, stored_roles
from dgraph.ops.products.triton.rows_linear import Tiling, launch, tiling_for

FEW = 128
"""Most rows of 16 bits that there is room for, at which the library's product and an activation after it are faster. On
an H100 they save up to a tenth (benchmarks/results/products.md). Rows that have tiles of few rows are not among them.
"""


def kernel(
    x: Tensor | QuantisedRows,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    cu_rows: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """dgraph::rows_glu; see its contract. `tiling` overrides its tiles, half of whose columns are gate's."""
    check_sizes(x, weight, bias)
    if isinstance(x, QuantisedRows):
        assert isinstance(weight, QuantisedWeight)
        return eight_bits.launch(x, weight, bias, cu_rows, pair=True)
    if isinstance(weight := stored_roles.taken(weight, x), QuantisedWeight):
        return stored_roles.launch(x, weight, bias, cu_rows, pair=True)
    if tiling is None and x.element_size() == 2 and len(x) <= FEW and not _has_narrow_tiles(x, weight):
        return experts.gate(torch.nn.functional.linear(x, weight, bias), cu_rows, silu=True)
    return launch(x, weight, bias, cu_rows, tiling or tiling_for(x.element_size()), pair=True)


def _has_narrow_tiles(x: Tensor, weight: Tensor) -> bool:
    return len(x) <= product_cases.FEW and product_roles.fits(x, weight)
