"""dgraph::rope: rotary position embedding (Su et al., 2021) in the half-split layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.registry import Sample, define
from dgraph.types.shapes import Symbols

CONTRACT = """\
x * cos + rotate_half(x) * sin, with rotate_half(x) = cat(-x[..., D/2:], x[..., :D/2]).
x [..., D], D even; cos and sin broadcast to x ([N, 1, D] for x [N, H, D]) and hold each angle twice
-> the shape of x, in the promoted dtype of x and cos.
Row by row: a padding row influences no other row. Inline: the compiler fuses it."""


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def turns_rows(symbols: Symbols, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """True if values of a graph are heads of rows, [N, H, D], and the angles of their rows, [N, 1, D]."""
    if any(value.dim() != 3 for value in (x, cos, sin)) or len({symbols.row_set(v) for v in (x, cos, sin)}) != 1:
        return False
    return all(value.shape[1:] == (1, x.shape[2]) for value in (cos, sin))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, shape, angle in (
        ("packed rows", (7, 3, 16), (7, 1, 8)),
        ("dense batch", (2, 4, 5, 6), (2, 1, 5, 3)),
        ("no rows", (0, 2, 8), (0, 1, 4)),
    ):
        x = torch.randn(shape, generator=generator)
        theta = torch.rand(angle, generator=generator).mul(6).repeat((1,) * (len(angle) - 1) + (2,))
        args = (x, theta.cos(), theta.sin())
        yield Sample(name, args, tuple(pad_rows(value, 3) for value in args))


OP = define(
    "rope",
    reference,
    samples=samples,
    contract=CONTRACT,
    by_row=("x", "cos", "sin"),
    padding=(None,),
    inline=True,
)
