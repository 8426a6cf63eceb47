"""dgraph::dequantise: a weight from its stored numbers, scales and zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dgraph.families.quantised import WHOLE, Format, dequantised, quantise
from dgraph.ops.registry import Sample, define

CONTRACT = """\
values [..., rows, columns] of float8_e4m3fn or int8, or uint8 [..., rows, columns / 2] of two 4-bit numbers each, that
of an even column in the low half; scales f32 [..., ceil(rows / block[0]), ceil(columns / block[1])], where -1 in block
is all rows or columns; zeros as scales, or None, which is 0, and 8 for 4-bit numbers -> weight [..., rows, columns] of
dtype, contiguous: (values - zeros) * scales, each of the block that the element is in, in fp32 and rounded once.
Deterministic; each element by itself. Inline: the compiler fuses it."""


def reference(values: Tensor, scales: Tensor, zeros: Tensor | None, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    return dequantised(values, scales, zeros, (block[0], block[1]), dtype)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for kind, shape, block, zeros in (
        ("fp8", (6, 10), (1, WHOLE), False),
        ("fp8", (6, 10), (4, 4), False),
        ("fp8", (3, 4, 6), (WHOLE, WHOLE), False),
        ("int8", (5, 7), (1, WHOLE), False),
        ("int8", (4, 9), (1, 3), True),
        ("int4", (5, 8), (1, 4), False),
        ("int4", (2, 4, 10), (1, 4), True),
    ):
        weight = torch.randn(shape, generator=generator)
        found = quantise(weight, Format(kind, block, zeros))
        name = f"{kind} {list(shape)} in blocks of {list(block)}{' with zeros' if zeros else ''}"
        yield Sample(name, (found.values, found.scales, found.zeros, list(block), torch.float32))


OP = define("dequantise", reference, samples=samples, contract=CONTRACT, inline=True)
