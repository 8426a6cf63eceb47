"""dgraph::rows_quantise: round the live rows, whose number is on the device, to 8-bit numbers with a scale per row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.families.quantised import KINDS, ROW_KINDS, quantised_rows
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
dgraph::quantise_rows for the live rows: the first cu_rows[b] of the N rows of x. The number is read on the device; one
above N counts as N.
x [N, d], floating, rows at any stride; kind "fp8" or "int8"; cu_rows i32 or i64 [b+1], of which only the last entry is
read -> values [N, d] of float8_e4m3fn or int8, scales [N, 1] in fp32 (float64 of float64).
Padding rows of x may hold anything, and are left out of the work: the padding rows of the result are not written, and
hold anything too. The reference gives them the scale NaN, so that who reads them is found.
On a GPU the pass QuantisedOperands makes it of dgraph::round_rows where products count their rows by a list.
Row by row, and deterministic."""


def check_sizes(x: Tensor, kind: str) -> None:
    """Refuse x that is not one vector per row, and a kind to which rows are not rounded."""
    if x.dim() != 2 or kind not in ROW_KINDS:
        raise InputError(
            f"dgraph::rows_quantise: x must be [N, d] and kind one of {', '.join(ROW_KINDS)}, got {list(x.shape)} and "
            f"{kind!r}."
        )


def reference(x: Tensor, kind: str, cu_rows: Tensor) -> tuple[Tensor, Tensor]:
    live, (values, scales) = min(int(cu_rows[-1]), len(x)), fake(x, kind, cu_rows)
    values[:live], scales[:live] = quantised_rows(x[:live], kind)
    values[live:], scales[live:] = 0, torch.nan
    return values, scales


def fake(x: Tensor, kind: str, cu_rows: Tensor) -> tuple[Tensor, Tensor]:
    check_sizes(x, kind)
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape, dtype=KINDS[kind].dtype), x.new_empty((x.shape[0], 1), dtype=wide)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for kind in ROW_KINDS:
        for name, counts, d in (
            ("one sequence", (5,), 16),
            ("ragged, an empty sequence", (3, 0, 6), 24),
            ("odd size", (2, 1), 33),
            ("no rows", (0, 0), 8),
        ):
            x, cu_rows = torch.randn(sum(counts), d, generator=generator), cu_rows_of(counts)
            yield Sample(f"{name} as {kind}", (x, kind, cu_rows), (pad_rows(x, 3), kind, cu_rows))
        x = torch.randn(5, 30, generator=generator) * torch.tensor([[1.0], [0.0], [1e-30], [3e30], [1.0]])
        many, five = torch.tensor([9]), torch.tensor([0, 5])
        yield Sample(f"a count alone, of more rows than there are, as {kind}", (x.clone(), kind, many))
        x[4, 10] = torch.inf
        padded = pad_rows(x, 2)[:, 8:24], kind, five
        yield Sample(f"columns of a wider matrix, far from 1, not finite as {kind}", (x[:, 8:24], kind, five), padded)


OP = define(
    "rows_quantise",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    by_row=("x",),
    count="cu_rows",
    live_form_of="dgraph.quantise_rows",
    padding=(None, None),
    kernel="dgraph.ops.products.triton.rows_quantise:kernel",
)
