"""dgraph::least_similar: the share of each sequence's rows whose values have turned away most (dLLM-Cache)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of, positions_of
from dgraph.ops.drift import cosine, nearby
from dgraph.ops.registry import Op, Sample, define, register
from dgraph.ops.rows import slots_of

CONTRACT = """\
chosen = full, or among the int(share * n) of the n rows of its sequence that are not full whose v has the lowest cosine
with what v_cache holds for the row; ties: the lower row first. Then v_cache takes v of every live row.
v [N, Hkv, D]; v_cache [pages, page, Hkv, D] of the same dtype, position p of sequence s at
v_cache[page_table[s, p // page], p % page]; full bool[N]; positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1];
share a float in [0, 1], share * n taken in double precision -> bool[N]; padding rows: False.
The cosine is drift's: over all Hkv * D values of a row, in fp32 at least. One that is no number (a slot that was never
written may hold NaN) is below all others.
Padding rows write nothing and may hold anything. A row whose page is not assigned (a negative entry) is an error in
the reference and undefined in a kernel. Deterministic; a kernel may sum a cosine in another order, and so decide
otherwise between rows whose cosines differ by a rounding."""


def reference(
    v: Tensor, v_cache: Tensor, full: Tensor, positions: Tensor, page_table: Tensor, cu_rows: Tensor, share: float
) -> Tensor:
    slots = slots_of("least_similar", positions, page_table, cu_rows, v_cache.shape[1])
    live = slots[0].shape[0]
    similar = ranked(v[:live], v_cache[slots])
    chosen = torch.zeros(v.shape[0], dtype=torch.bool, device=v.device)
    chosen[:live] = full[:live]
    starts = cu_rows.tolist()
    for start, end in itertools.pairwise(starts):
        rows = start + (~full[start:end]).nonzero()[:, 0]
        count = math.floor(share * len(rows))
        chosen[rows[similar[rows].argsort(stable=True)[:count]]] = True
    v_cache[slots] = v[:live]
    return chosen


def ranked(new: Tensor, old: Tensor) -> Tensor:
    """Cosines per row of [R, H, D], with -2 for what is no number."""
    found = cosine(new, old)
    return torch.where(found.isnan(), -2.0, found)


def fake(
    v: Tensor, v_cache: Tensor, full: Tensor, positions: Tensor, page_table: Tensor, cu_rows: Tensor, share: float
) -> Tensor:
    return torch.empty(v.shape[0], dtype=torch.bool, device=v.device)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, starts, page, heads, d, share, ready in (
        ("some rows", (9, 7), (0, 5), 4, 4, 8, 0.25, 0.0),
        ("ragged, an empty sequence, some full", (5, 0, 12, 1), (3, 9, 14, 31), 8, 3, 10, 0.5, 0.3),
        ("everything", (3, 4), (0, 0), 4, 2, 8, 1.0, 0.0),
        ("nothing but full rows", (3, 4), (0, 0), 4, 2, 8, 0.0, 0.5),
        ("a share that rounds down to nothing", (3, 4), (2, 0), 4, 1, 6, 0.2, 0.0),
        ("no rows", (0, 0), (0, 0), 4, 1, 8, 0.25, 0.0),
    ):
        cu_rows, positions = cu_rows_of(counts), positions_of(counts, starts)
        table, pages = page_table_of([c + s for c, s in zip(counts, starts, strict=True)], page, generator)
        v = torch.randn(sum(counts), heads, d, generator=generator)
        cache = torch.full((pages, page, heads, d), torch.nan)
        slots = slots_of("least_similar", positions, table, cu_rows, page)
        cache[slots] = nearby(v, generator)
        if len(v) > 3:  # three ties, of which the share takes some
            v[1:4] = v[1]
            cache[slots[0][1:4], slots[1][1:4]] = -v[1]
            cache[slots[0][0], slots[1][0]] = torch.nan
        full = torch.rand(sum(counts), generator=generator) < ready
        yield Sample(
            name,
            (v, cache.clone(), full, positions, table, cu_rows, share),
            (pad_rows(v, 3), cache, pad_rows(full, 3), pad_rows(positions, 3), table, cu_rows, share),
        )


OP = register(
    Op(
        name="least_similar",
        overload=define(
            "least_similar",
            "(Tensor v, Tensor(a!) v_cache, Tensor full, Tensor positions, Tensor page_table, Tensor cu_rows, "
            "float share) -> Tensor",
            reference,
            fake,
            mutates=("v_cache",),
        ),
        reference=reference,
        samples=samples,
        contract=CONTRACT,
        mutates=("v_cache",),
    )
)
