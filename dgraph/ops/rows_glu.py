"""dgraph::rows_glu: a gated linear unit over as many rows as a number on the device says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.registry import Op, Sample, define, register

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


def check_sizes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The inner sizes must agree, and the weight must have two halves."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or weight.shape[0] % 2:
        raise InputError(
            f"dgraph::rows_glu: x must be [N, d_in] and weight [2F, d_in] (gate rows, then up rows), got "
            f"{list(x.shape)} and {list(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"dgraph::rows_glu: bias must be [{weight.shape[0]}], got {list(bias.shape)}.")


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor) -> Tensor:
    check_sizes(x, weight, bias)
    live = min(int(cu_rows[-1]), x.shape[0])
    out = x.new_full((x.shape[0], weight.shape[0] // 2), torch.nan)
    gate, up = F.linear(x[:live], weight, bias).chunk(2, 1)
    out[:live] = F.silu(gate) * up
    return out


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor) -> Tensor:
    check_sizes(x, weight, bias)
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, d_in, width, biased in (
        ("one sequence", (5,), 16, 8, False),
        ("ragged, an empty sequence", (3, 0, 14), 24, 40, True),
        ("a row more than a tile", (16, 1), 32, 20, False),
        ("odd sizes", (9, 6), 13, 37, True),
        ("no rows", (0, 0), 16, 8, True),
    ):
        x = torch.randn(sum(counts), d_in, generator=generator)
        weight = torch.randn(2 * width, d_in, generator=generator) * d_in**-0.5
        bias = torch.randn(2 * width, generator=generator) if biased else None
        cu_rows = cu_rows_of(counts)
        yield Sample(name, (x, weight, bias, cu_rows), (pad_rows(x, 3), weight, bias, cu_rows))
    x, weight = (torch.randn(n, 16, generator=generator) for n in (6, 8))
    yield Sample("a count alone, of more rows than there are", (x, weight, None, torch.tensor([9])))


OP = register(
    Op(
        name="rows_glu",
        overload=define(
            "rows_glu", "(Tensor x, Tensor weight, Tensor? bias, Tensor cu_rows) -> Tensor", reference, fake
        ),
        reference=reference,
        samples=samples,
        contract=CONTRACT,
    )
)
