"""dgraph::rms_norm: root-mean-square normalisation (Zhang and Sennrich, 2019) as Qwen3 computes it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
weight * (xf * rsqrt(mean(xf^2) + eps)).to(x.dtype), with xf = x in fp32 (float64 stays float64) and the
mean over the last dimension; without a weight, what it would be multiplied with. x [..., d]; weight [d] or
None -> the shape of x, in the promoted dtype of weight and x. Row by row: a padding row influences no other
row. Inline: the compiler fuses it."""


def reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.to(numeric(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = normed.to(x.dtype)
    return normed if weight is None else weight * normed


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, shape in (
        ("hidden rows", (7, 33)),
        ("heads", (5, 3, 16)),
        ("batch of one row", (1, 1, 8)),
        ("no rows", (0, 8)),
    ):
        x = torch.randn(shape, generator=generator)
        weight = torch.randn(shape[-1], generator=generator)
        yield Sample(name, (x, weight, 1e-6), (pad_rows(x, 3), weight, 1e-6))
    bare = torch.randn(4, 3, 8, generator=generator)
    yield Sample("no weight", (bare, None, 1e-6), (pad_rows(bare, 2), None, 1e-6))
    zeros = torch.zeros(2, 8)
    yield Sample("zeros", (zeros, torch.ones(8), 1e-5), (pad_rows(zeros, 1), torch.ones(8), 1e-5))


OP = define(
    "rms_norm",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("x",),
    padding=(None,),
    inline=True,
)
