"""dgraph::rows_norm: root-mean-square normalisation of the live rows, whose number is read on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.registry import Sample, define
from dgraph.ops.rows import rms_norm

CONTRACT = """\
rms_norm(x, weight, eps) for the live rows: the first cu_rows[b] of the N rows of x. The number is read on the device;
one above N counts as N.
x [N, d], rows at any stride; weight [d] or None; cu_rows i32 or i64 [b+1], of which only the last entry is read
-> [N, d], contiguous, in the promoted dtype of weight and x.
Padding rows of x may hold anything, and are left out of the work: the padding rows of the result are not written, and
hold anything too, as those of rows_linear. The reference fills them with NaN, so that who reads them is found.
Statistics in fp32 at least; rounded where rms_norm rounds. Row by row, and deterministic."""


def check_sizes(x: Tensor, weight: Tensor | None) -> None:
    """Refuse x that is not one vector per row, and a weight of another length."""
    if x.dim() != 2 or (weight is not None and weight.shape != x.shape[1:]):
        got = "no weight" if weight is None else list(weight.shape)
        raise InputError(f"dgraph::rows_norm: x must be [N, d] and weight [d], got {list(x.shape)} and {got}.")


def dtype_of(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Dtype of the result, to which x and weight are promoted."""
    return x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)


def reference(x: Tensor, weight: Tensor | None, eps: float, cu_rows: Tensor) -> Tensor:
    check_sizes(x, weight)
    live = min(int(cu_rows[-1]), x.shape[0])
    out = x.new_full(x.shape, torch.nan, dtype=dtype_of(x, weight))
    out[:live] = rms_norm.reference(x[:live], weight, eps)
    return out


def fake(x: Tensor, weight: Tensor | None, eps: float, cu_rows: Tensor) -> Tensor:
    check_sizes(x, weight)
    return x.new_empty(x.shape, dtype=dtype_of(x, weight))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, d in (
        ("one sequence", (5,), 16),
        ("ragged, an empty sequence", (3, 0, 14), 40),
        ("odd size", (2, 1), 33),
        ("no rows", (0, 0), 8),
    ):
        x, cu_rows = torch.randn(sum(counts), d, generator=generator), cu_rows_of(counts)
        weight = torch.randn(d, generator=generator)
        yield Sample(name, (x, weight, 1e-6, cu_rows), (pad_rows(x, 3), weight, 1e-6, cu_rows))
    x, ones, four = torch.randn(4, 48, generator=generator), torch.ones(16), torch.tensor([0, 4])
    padded = (pad_rows(x, 2)[:, 16:32], ones, 1e-5, four)
    yield Sample("columns of a wider matrix", (x[:, 16:32], ones, 1e-5, four), padded)
    yield Sample("no weight", (x, None, 1e-6, four), (pad_rows(x, 2), None, 1e-6, four))
    yield Sample("zeros, a count alone, of more rows than there are", (x * 0, x[0], 1e-5, torch.tensor([9])))


OP = define(
    "rows_norm",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    by_row=("x",),
    count="cu_rows",
    live_form_of="dgraph.rms_norm",
    padding=(None,),
    kernel="dgraph.ops.rows.triton.rows_norm:kernel",
)
