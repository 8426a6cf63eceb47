"""dgraph::rows_rope: rotary embedding of the live rows, after an optional head norm; their number is on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.registry import Sample, define
from dgraph.ops.rows import rms_norm, rope

CONTRACT = """\
rope(x, cos, sin), or with a weight rope(rms_norm(x, weight, eps), cos, sin), for the live rows: the first cu_rows[b]
of the N rows of x. The number is read on the device; one above N counts as N.
x [N, H, D], D even, rows and heads at any stride (the keys of a projection of keys and values, say); cos, sin [N, 1, D]
hold each angle twice; cu_rows i32 or i64 [b+1], of which only the last entry is read; weight [D] or None; eps is not
read without a weight -> [N, H, D], contiguous, in the promoted dtype of x, weight and cos.
Padding rows of x, cos and sin may hold anything, and are left out of the work: the padding rows of the result are not
written, and hold anything too, as those of rows_linear. The reference fills them with NaN, so that who reads them is
found. Statistics in fp32 at least; rounded where rms_norm and rope round. Row by row, and deterministic."""


def check_sizes(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None) -> None:
    """Refuse heads of odd length, angles that are not one vector per row, and a weight that is not a head's length."""
    angles = (x.shape[0], 1, x.shape[-1])
    if x.dim() != 3 or x.shape[2] % 2 or cos.shape != angles or sin.shape != angles:
        raise InputError(
            f"dgraph::rows_rope: x must be [N, H, D] with an even D, cos and sin [N, 1, D], got {list(x.shape)}, "
            f"{list(cos.shape)} and {list(sin.shape)}."
        )
    if weight is not None and weight.shape != x.shape[2:]:
        raise InputError(f"dgraph::rows_rope: weight must be [{x.shape[2]}], got {list(weight.shape)}.")


def result_dtype(x: Tensor, cos: Tensor, weight: Tensor | None) -> torch.dtype:
    """Dtype to which x, weight and cos are promoted."""
    normed = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    return torch.promote_types(normed, cos.dtype)


def reference(x: Tensor, cos: Tensor, sin: Tensor, cu_rows: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    check_sizes(x, cos, sin, weight)
    live = min(int(cu_rows[-1]), x.shape[0])
    out = x.new_full(x.shape, torch.nan, dtype=result_dtype(x, cos, weight))
    value = x[:live] if weight is None else rms_norm.reference(x[:live], weight, eps)
    out[:live] = rope.reference(value, cos[:live], sin[:live])
    return out


def fake(x: Tensor, cos: Tensor, sin: Tensor, cu_rows: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    check_sizes(x, cos, sin, weight)
    return x.new_empty(x.shape, dtype=result_dtype(x, cos, weight))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, heads, d, normed in (
        ("one sequence", (5,), 2, 16, False),
        ("ragged, an empty sequence", (3, 0, 14), 4, 8, True),
        ("odd sizes", (2, 1), 3, 6, True),
        ("no rows", (0, 0), 2, 8, False),
    ):
        n, cu_rows = sum(counts), cu_rows_of(counts)
        x = torch.randn(n, heads, d, generator=generator)
        weight = 1 + torch.randn(d, generator=generator) / 8 if normed else None
        cos, sin = _angles(n, d, generator)
        padded = (*(pad_rows(value, 3) for value in (x, cos, sin)), cu_rows, weight, 1e-6)
        yield Sample(name, (x, cos, sin, cu_rows, weight, 1e-6), padded)
    wide, (cos, sin) = torch.randn(4, 5, 16, generator=generator), _angles(4, 8, generator)
    rest = (torch.tensor([0, 4]), torch.ones(8), 1e-5)
    more, *angles = (pad_rows(value, 2) for value in (wide, cos, sin))
    padded = (more[:, 1:3, 8:], *angles, *rest)
    yield Sample("heads of a wider matrix", (wide[:, 1:3, 8:], cos, sin, *rest), padded)
    yield Sample("a count alone, of more rows than there are", (wide[..., :8], cos, sin, torch.tensor([9]), None, 0.0))


def _angles(n: int, d: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    theta = torch.rand(n, 1, d // 2, generator=generator).mul(6).repeat(1, 1, 2)
    return theta.cos(), theta.sin()


OP = define(
    "rows_rope",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    by_row=("x", "cos", "sin"),
    count="cu_rows",
    padding=(None,),
    kernel="dgraph.ops.rows.triton.rows_rope:kernel",
)
