"""dgraph::round_rows: round rows to 8-bit numbers times one scale per row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.families.quantised import QuantisedRows, quantised_rows
from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
x [..., d], floating; kind "fp8" (e4m3) or "int8" -> the shape and dtype of x: each row in the numbers of the kind that
are nearest to it, times its scale.
The scale of a row is its largest absolute value / the kind's largest number (448, 127), in fp32 (float64 of float64);
1 where that would be below the least normal number, as of zeros. Numbers are rounded half to even; their products with
the scale are rounded once, to the dtype of x. A row that is not finite becomes NaN, all of it. A row that lies on the
grid of its scale stays as it is.
Row by row: a padding row influences no other row. Deterministic. Inline: the compiler fuses it. A product by a weight
that is stored in numbers of the kind takes them and the scales in its place (`dgraph.ir.quantised_operands`)."""


def reference(x: Tensor, kind: str) -> Tensor:
    return QuantisedRows(*quantised_rows(x, kind), x.dtype).dequantised()


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for kind in ("fp8", "int8"):
        for name, shape in (("rows", (7, 33)), ("a padded batch", (2, 3, 16)), ("no rows", (0, 8))):
            x = torch.randn(shape, generator=generator)
            yield Sample(f"{name} as {kind}", (x, kind), (pad_rows(x, 3), kind))
        x = torch.randn(4, 9, generator=generator) * torch.tensor([[1.0], [0.0], [1e-30], [3e30]])
        x[0, 0] = torch.inf
        yield Sample(f"zeros, far from 1, and a row that is not finite as {kind}", (x, kind), (pad_rows(x, 2), kind))


OP = define(
    "round_rows",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("x",),
    padding=(None,),
    inline=True,
)
