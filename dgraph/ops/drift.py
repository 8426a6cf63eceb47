"""dgraph::drift: which rows' attention context has changed since an earlier step (DyLLM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of, positions_of
from dgraph.ops.registry import Sample, define, numeric
from dgraph.ops.rows import slots_of

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
    salient = torch.zeros(context.shape[0], dtype=torch.bool, device=context.device)
    salient[:live] = full[:live] | ~(cosine(context[:live], c_cache[slots]) >= tau)
    c_cache[slots] = context[:live]
    return salient


def cosine(new: Tensor, old: Tensor) -> Tensor:
    """Per row of [R, H, D], over all heads; in fp32 at least."""
    wide = numeric(new.dtype)
    a, b = new.flatten(1).to(wide), old.flatten(1).to(wide)
    dot, norms = (a * b).sum(1), ((a * a).sum(1).sqrt(), (b * b).sum(1).sqrt())
    product = norms[0] * norms[1]
    empty = (norms[0] == 0) & (norms[1] == 0)
    ratio = torch.where(product == 0, empty.to(wide), dot / product)
    return ratio.clamp(-1, 1)


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
        cu_rows, positions = cu_rows_of(counts), positions_of(counts, starts)
        table, pages = page_table_of([c + s for c, s in zip(counts, starts, strict=True)], page, generator)
        context = torch.randn(sum(counts), heads, d, generator=generator)
        cache = torch.full((pages, page, heads, d), torch.nan)
        slots = slots_of("drift", positions, table, cu_rows, page)
        cache[slots] = nearby(context, generator)
        if len(context) > 3:
            cache[slots[0][0], slots[1][0]] = 0  # one zero
            context[1] = cache[slots[0][1], slots[1][1]] = 0  # two zeros
            cache[slots[0][2], slots[1][2]] = -context[2]
        full = torch.tensor([s == 2 and share > 0 for s, count in enumerate(counts) for _ in range(count)]).bool()
        yield Sample(
            name,
            (context, cache.clone(), full, positions, table, cu_rows, tau),
            (pad_rows(context, 3), cache, pad_rows(full, 3), pad_rows(positions, 3), table, cu_rows, tau),
        )


def nearby(context: Tensor, generator: torch.Generator) -> Tensor:
    """Contexts that are close to the given ones in every other row, and far from them in the rest."""
    noise = torch.randn(context.shape, generator=generator)
    amount = torch.tensor([0.02, 1.0]).repeat(len(context))[: len(context), None, None]
    return context + amount * noise * context.abs().mean()


OP = define(
    "drift",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    mutates=("c_cache",),
    padding=(0,),
    kernel="dgraph.ops.triton.drift:kernel",
)
