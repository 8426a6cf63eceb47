"""dgraph::dequantise_rows: rows from their 8-bit numbers and one scale per row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.families.quantised import ROW_KINDS, QuantisedRows, quantised_rows
from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
values [..., d] of float8_e4m3fn or int8, scales [..., 1] as dgraph::quantise_rows gives them -> [..., d] of dtype,
contiguous: values * scales in fp32 (float64 for float64), rounded once.
A program computes it only where something else than products reads it (`dgraph.ir.quantised_operands`).
Row by row: a padding row influences no other row. Deterministic. Inline: the compiler fuses it."""


def reference(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return QuantisedRows(values, scales, dtype).dequantised()


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for kind in ROW_KINDS:
        for name, shape in (("rows", (7, 33)), ("no rows", (0, 8))):
            values, scales = quantised_rows(torch.randn(shape, generator=generator), kind)
            more = torch.cat([values.view(torch.uint8), values.new_zeros((2, shape[1])).view(torch.uint8)])
            padded = more.view(values.dtype), pad_rows(scales, 2), torch.float32
            yield Sample(f"{name} as {kind}", (values, scales, torch.float32), padded)


OP = define(
    "dequantise_rows",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("values", "scales"),
    padding=(None,),
    inline=True,
)
