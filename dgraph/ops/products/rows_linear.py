"""dgraph::rows_linear: a linear layer over the live rows, whose number is read on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ops.draws import cu_rows_of, pad_rows
from dgraph.ops.products import stored
from dgraph.ops.registry import Sample, define

CONTRACT = """\
x @ weight.T + bias for the live rows: the first cu_rows[b] of the N rows of x. The number is read on the
device; one above N counts as N.
x [N, d_in]; weight [d_out, d_in]; bias [d_out] or None; cu_rows i32 or i64 [b+1], of which only the last
entry is read, so that a count of one entry will do -> [N, d_out], in the dtype of x.
Padding rows of x may hold anything, and are left out of the work: the padding rows of the result are not
written, and hold anything too. Who reads the result must not let them reach a live row; every op of dgraph
keeps to that. The reference fills them with NaN, so that who does not is found.
Products accumulate in fp32 and are rounded once. Deterministic for a given number of live rows."""


def check_sizes(
    x: Tensor | QuantisedRows,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    op: str = "rows_linear",
    sizes: str = "[d_out, d_in]",
    parts: int = 1,
) -> None:
    """Refuse inner sizes that differ, and a weight that does not have `parts` equal parts.

    op, sizes: for the message of the InputError.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or weight.shape[0] % parts:
        raise InputError(
            f"dgraph::{op}: x must be [N, d_in] and weight {sizes}, got {list(x.shape)} and {list(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"dgraph::{op}: bias must be [{weight.shape[0]}], got {list(bias.shape)}.")


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor) -> Tensor:
    check_sizes(x, weight, bias)
    live = min(int(cu_rows[-1]), x.shape[0])
    made = stored.multiply(x[:live], weight, bias)
    out = made.new_full((x.shape[0], weight.shape[0]), torch.nan)
    out[:live] = made
    return out


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor) -> Tensor:
    check_sizes(x, weight, bias)
    return x.new_empty((x.shape[0], weight.shape[0]))


def workspace(device: torch.device, x: Tensor, weight: Tensor, *rest: object) -> int:
    """Bytes that a call allocates beside its result.

    On a GPU: the part of a stored weight that it dequantises for many rows, see `dgraph.ops.products.stored`. On a
    CPU: the product before it is copied to the live rows.
    """
    return stored.workspace(device, x, weight) if device.type == "cuda" else x.element_size() * len(x) * len(weight)


def samples(generator: torch.Generator, parts: int = 1) -> Iterator[Sample]:
    """Samples of a weight whose rows hold `parts` results side by side."""
    for name, counts, d_in, d_out, biased in (
        ("one sequence", (5,), 16, 8, False),
        ("ragged, an empty sequence", (3, 0, 14), 24, 40, True),
        ("a row more than a tile", (16, 1), 32, 20, False),
        ("odd sizes", (9, 6), 13, 37, True),
        ("no rows", (0, 0), 16, 8, True),
    ):
        x = torch.randn(sum(counts), d_in, generator=generator)
        weight = torch.randn(parts * d_out, d_in, generator=generator) * d_in**-0.5
        bias = torch.randn(parts * d_out, generator=generator) if biased else None
        cu_rows = cu_rows_of(counts)
        yield Sample(name, (x, weight, bias, cu_rows), (pad_rows(x, 3), weight, bias, cu_rows))
    x, weight = (torch.randn(n, 16, generator=generator) for n in (6, 8))
    yield Sample("a count alone, of more rows than there are", (x, weight, None, torch.tensor([9])))


OP = define(
    "rows_linear",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    by_row=("x",),
    count="cu_rows",
    live_form_of="linear",
    padding=(None,),
    kernel="dgraph.ops.products.triton.rows_linear:kernel",
    tuning="dgraph.ops.triton.candidates:PRODUCTS",
    stored=("weight",),
    rounded=("x",),
    workspace=workspace,
)
