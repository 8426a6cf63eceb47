"""dgraph::quantise_rows: round rows to 8-bit numbers with one scale per row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.families.quantised import quantised_rows
from dgraph.ops.products import round_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
x [..., d], floating; kind "fp8" or "int8" -> values [..., d] of float8_e4m3fn or int8, scales [..., 1] in fp32 (float64
of float64): what dgraph::round_rows multiplies.
A row that is not finite has the scale NaN and zeros as its values. The pass QuantisedOperands makes it of
dgraph::round_rows where products take the numbers as they are.
Row by row: a padding row influences no other row. Deterministic. Inline: the compiler fuses it, into the norm or
activation that makes the rows."""


def reference(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return quantised_rows(x, kind)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    # For zero rows, scales have other strides when they are traced, which mean nothing.
    return (sample for sample in round_rows.samples(generator) if len(sample.args[0]))


OP = define(
    "quantise_rows",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("x",),
    padding=(None, None),
    inline=True,
)
