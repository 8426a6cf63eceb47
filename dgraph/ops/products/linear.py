"""dgraph::linear: a linear layer whose weight may be quantised."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.products import stored
from dgraph.ops.registry import Sample, define

CONTRACT = """\
x @ weight.T + bias: x [..., d_in]; weight [d_out, d_in]; bias [d_out] or None -> [..., d_out], in the dtype of x.
It is what a program runs in the place of aten.linear where the weight is quantised, and is in no graph.
Products accumulate in fp32 and are rounded once. Row by row: a padding row influences no other row. Deterministic for a
given number of rows."""


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return stored.multiply(x, weight, bias)


def fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def workspace(device: torch.device, x: Tensor, weight: Tensor, *rest: object) -> int:
    """Bytes of the weight that a GPU dequantises for many rows, see `dgraph.ops.products.stored`."""
    return stored.workspace(device, x, weight)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, shape, d_out, biased in (
        ("rows", (5, 16), 8, False),
        ("odd sizes", (15, 13), 37, True),
        ("no rows", (0, 16), 8, True),
    ):
        x, weight = torch.randn(shape, generator=generator), torch.randn(d_out, shape[-1], generator=generator)
        bias = torch.randn(d_out, generator=generator) if biased else None
        yield Sample(name, (x, weight, bias), (pad_rows(x, 3), weight, bias))
    x, weight = torch.randn((2, 3, 16), generator=generator), torch.randn((8, 16), generator=generator)
    yield Sample("a padded batch", (x, weight, None))


OP = define(
    "linear",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    by_row=("x",),
    padding=(None,),
    kernel="dgraph.ops.products.triton.linear:kernel",
    stored=("weight",),
    rounded=("x",),
    workspace=workspace,
)
