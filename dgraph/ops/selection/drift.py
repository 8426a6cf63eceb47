"""dgraph::drift: flag the rows whose attention context has changed since an earlier step (DyLLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import pad_rows
from dgraph.ops.padded import slots_of
from dgraph.ops.registry import Sample, define, numeric
from dgraph.ops.selection import drifted
from dgraph.ops.selection.compare_rows import changed_rows, sums_of

CONTRACT = """\
salient = full, or the cosine between a row's context and what c_cache holds for it is below tau; then c_cache takes
the context of every live row.
context [N, H, D]; c_cache [pages, page, H, D] of the same dtype, position p of sequence s at
c_cache[page_table[s, p // page], p % page]; full bool[N]; positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1]
-> bool[N]; padding rows: False.
The cosine is over all H * D values of a row, dot product and norms in fp32 at least, clamped to [-1, 1]: tau above 1
finds every row, tau below -1 none that is not full. Both norms zero: cosine 1. One of them zero: 0. A cosine that is
no number (a slot that was never written may hold NaN) is below any tau.
Padding rows write nothing and may hold anything. A row whose page is not assigned (a negative entry) is an error in
the reference and undefined in a kernel. Deterministic: a row's sums depend on that row alone."""


def reference(
    context: Tensor,
    c_cache: Tensor,
    full: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    tau: float,
) -> Tensor:
    slots = slots_of("drift", positions, page_table, cu_rows, c_cache.shape[1])
    live = slots[0].shape[0]
    sums = torch.zeros(len(context), 3, dtype=numeric(context.dtype), device=context.device)
    sums[:live] = sums_of(context[:live], c_cache[slots])
    c_cache[slots] = context[:live]
    return drifted.reference(sums, full, cu_rows, tau)


def fake(context: Tensor, *rest: Any) -> Tensor:
    return torch.empty(context.shape[0], dtype=torch.bool, device=context.device)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, starts, page, heads, d, tau, share in (
        ("some rows", (9, 7), (0, 5), 4, 4, 8, 0.99, 0.0),
        ("ragged, an empty sequence, a full one", (5, 0, 12, 1), (3, 9, 14, 31), 8, 3, 10, 0.9, 0.4),
        ("everything", (3, 4), (0, 0), 4, 2, 8, 1.01, 0.0),
        ("nothing", (3, 4), (0, 0), 4, 2, 8, -1.01, 0.0),
        ("no rows", (0, 0), (0, 0), 4, 1, 8, 0.99, 0.0),
    ):
        context, cache, positions, table, cu_rows = changed_rows(counts, starts, page, heads, d, generator)
        full = torch.tensor([s == 2 and share > 0 for s, count in enumerate(counts) for _ in range(count)]).bool()
        yield Sample(
            name,
            (context, cache.clone(), full, positions, table, cu_rows, tau),
            (pad_rows(context, 3), cache, pad_rows(full, 3), pad_rows(positions, 3), table, cu_rows, tau),
        )


OP = define(
    "drift",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    mutates=("c_cache",),
    padding=(0,),
    kernel="dgraph.ops.selection.triton.drift:kernel",
)
