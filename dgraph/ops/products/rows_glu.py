"""dgraph::rows_glu: a gated linear unit over the live rows, whose number is read on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ops.products import rows_linear, stored
from dgraph.ops.registry import Sample, define

CONTRACT = """\
silu(x @ gate.T + gate_bias) * (x @ up.T + up_bias) for the live rows: the first cu_rows[b] of the N rows of x. The
number is read on the device; one above N counts as N.
x [N, d_in]; weight [2F, d_in], the F rows of gate and then those of up; bias [2F] in the same order, or None; cu_rows
i32 or i64 [b+1], of which only the last entry is read, so that a count of one entry will do -> [N, F], in the dtype
of x.
Padding rows of x may hold anything, and are left out of the work: the padding rows of the result are not written, and
hold anything too, as those of rows_linear. The reference fills them with NaN, so that who reads them is found.
Products accumulate in fp32. The reference rounds both to the dtype of x, and so silu and the result, as eager PyTorch
does; a kernel keeps fp32 and rounds the result once. Deterministic for a given number of live rows."""


def check_sizes(x: Tensor | QuantisedRows, weight: Tensor | QuantisedWeight, bias: Tensor | None) -> None:
    """Refuse inner sizes that differ, and a weight without two equal halves."""
    rows_linear.check_sizes(x, weight, bias, "rows_glu", "[2F, d_in] (gate rows, then up rows)", parts=2)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor) -> Tensor:
    check_sizes(x, weight, bias)
    gate, up = rows_linear.reference(x, weight, bias, cu_rows).chunk(2, 1)
    return F.silu(gate) * up


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor) -> Tensor:
    check_sizes(x, weight, bias)
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


def workspace(device: torch.device, x: Tensor, weight: Tensor, *rest: object) -> int:
    """Bytes that a call allocates beside its result.

    On a GPU: the part of a stored weight that it dequantises for many rows, see `dgraph.ops.products.stored`. On a
    CPU: the products [N, 2F] of `reference`, twice, less the result [N, F], which comes after them.
    """
    if device.type == "cuda":
        return stored.workspace(device, x, weight)
    return 3 * x.element_size() * len(x) * (len(weight) // 2)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    return rows_linear.samples(generator, parts=2)


OP = define(
    "rows_glu",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    by_row=("x",),
    count="cu_rows",
    padding=(None,),
    kernel="dgraph.ops.products.triton.rows_glu:kernel",
    stored=("weight",),
    rounded=("x",),
    workspace=workspace,
)
