"""dgraph::least_similar: the share of each sequence's rows whose values have changed most (dLLM-Cache)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of, positions_of
from dgraph.ops.padded import placed_rows, slots_of
from dgraph.ops.registry import Sample, define
from dgraph.ops.selection import compare_rows, least_drifted
from dgraph.ops.selection.compare_rows import in_float8, nearby

CONTRACT = """\
chosen = full, or among the int(share * n) of the n rows of its sequence that adapt whose v has the lowest cosine with
what v_cache holds for the row; ties: the lower row first. Rows that adapt: those that are not full, and of which
`adapt` bool[N], if it is given, is True. Then v_cache takes v of every live row that is full or adapts.
v [N, Hkv, D]; v_cache [pages, page, Hkv, D] of the same dtype, position p of sequence s at
v_cache[page_table[s, p // page], p % page]; full bool[N]; positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1];
v_cache in float8_e4m3fn has v_scale f32[pages, page, Hkv], by head, and is read and written with it as by kv_write;
share a float in [0, 1], share * n taken in double precision -> bool[N]; padding rows: False.
The cosine is drift's: over all Hkv * D values of a row, in fp32 at least. One that is no number (a slot that was never
written may hold NaN) is below all others.
Padding rows write nothing and may hold anything. A row whose position has no page (a negative entry) must be full, and
writes nothing. One that is not full, or a page that the cache does not have, is an error in the reference and undefined
in a kernel. Deterministic; a kernel may sum a cosine in another order, and so decide otherwise between rows whose
cosines differ by a rounding."""


def reference(
    v: Tensor,
    v_cache: Tensor,
    full: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    share: float,
    adapt: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    rows, _ = placed_rows("least_similar", positions, page_table, cu_rows, *v_cache.shape[:2])
    chosen = full.clone()
    chosen[min(int(cu_rows[-1]), len(chosen)) :] = False
    if int(chosen.sum()) + int((~full[rows]).sum()) < int(cu_rows[-1]):
        raise InputError(
            "dgraph::least_similar: a row that is not full has a position without a page, since its page_table "
            "entry is negative. There are no values to compare its own with. Assign the page, or make the row full."
        )
    changes = None if adapt is None else full | adapt
    sums = compare_rows.reference(v, v_cache, positions, page_table, cu_rows, changes, v_scale)
    return least_drifted.reference(sums, full, cu_rows, share, adapt)


def fake(v: Tensor, *rest: Any) -> Tensor:
    return torch.empty(v.shape[0], dtype=torch.bool, device=v.device)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, starts, page, heads, d, share, ready, idle in (
        ("some rows", (9, 7), (0, 5), 4, 4, 8, 0.25, 0.0, None),
        ("ragged, an empty sequence, some full", (5, 0, 12, 1), (3, 9, 14, 31), 8, 3, 10, 0.5, 0.3, None),
        ("everything", (3, 4), (0, 0), 4, 2, 8, 1.0, 0.0, None),
        ("nothing but full rows", (3, 4), (0, 0), 4, 2, 8, 0.0, 0.5, None),
        ("a share that rounds down to nothing", (3, 4), (2, 0), 4, 1, 6, 0.2, 0.0, None),
        ("no rows", (0, 0), (0, 0), 4, 1, 8, 0.25, 0.0, None),
        ("some rows are idle", (9, 0, 7), (0, 2, 5), 4, 4, 8, 0.5, 0.2, 0.4),
        ("all rows are idle", (3, 4), (0, 0), 4, 2, 8, 1.0, 0.0, 1.1),
        ("pages missing", (9, 0, 7), (0, 2, 2), 4, 4, 8, 0.5, 0.2, 0.3),
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
        if name == "pages missing":
            table[:, 0] = -1
            full |= positions < page
        adapt = None if idle is None else torch.rand(sum(counts), generator=generator) >= idle
        padded = None if adapt is None else pad_rows(adapt, 3)
        where = (table, cu_rows, share)
        args = v, cache.clone(), full, positions, *where, adapt
        wider = pad_rows(v, 3), cache, pad_rows(full, 3), pad_rows(positions, 3), *where, padded
        yield Sample(name, args, wider)
        if name in ("some rows", "some rows are idle"):
            yield Sample(f"{name}, float8", in_float8(args), in_float8(wider))


OP = define(
    "least_similar",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    mutates=("v_cache", "v_scale"),
    scales={"v_cache": "v_scale"},
    padding=(0,),
    kernel="dgraph.ops.selection.triton.least_similar:kernel",
)
