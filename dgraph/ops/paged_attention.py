"""dgraph::paged_attention: attention of rows over the paged cache of their sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of
from dgraph.ops.registry import Sample, define
from dgraph.ops.rows import attend, check_heads, groups, padded_length, sequence_of, take

CONTRACT = """\
Row i sees the cache positions [0, limit[i]) of its sequence; position p of sequence s lives at
cache[page_table[s, p // page], p % page].
q [N, Hq, D]; k_cache, v_cache [pages, page, Hkv, D]; page_table i32[b, P]; cu_rows i32[b+1]; limit i32[N]
-> [N, Hq, D] in the dtype of q. Query head h reads KV head h // (Hq / Hkv).
Scores q.k * scale and sums in fp32 at least.
A row with limit 0, and a padding row, gives zeros. Padding rows may hold anything. A slot that no row of the
sequence sees may hold anything, NaN included; table entries past the last page that a row sees are not read.
Deterministic. The reference pads each sequence to lengths that depend on nothing but its own rows and
limits, so that a sequence gives the same bits alone and in any batch."""


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
) -> Tensor:
    check_heads("paged_attention", q, k_cache.transpose(1, 2), 1)
    live = int(cu_rows[-1])
    page = k_cache.shape[1]
    longest = limit.new_zeros(cu_rows.shape[0] - 1).scatter_reduce_(0, sequence_of(cu_rows, live), limit[:live], "amax")
    lengths = longest.tolist()
    if max(lengths, default=0) > page_table.shape[1] * page:
        raise InputError(
            f"dgraph::paged_attention: a row sees {max(lengths)} positions, but the page table holds "
            f"{page_table.shape[1]} pages of {page}. Pass a wider page table."
        )
    out = q.new_zeros(q.shape)
    # Whole pages, and a number of them that depends on the sequence alone.
    keys = [-(-padded_length(length, 64) // page) * page if length else 0 for length in lengths]
    for group in groups(cu_rows, keys):
        slot = torch.arange(group.keys, device=q.device)
        length, end = longest[group.sequences], limit[group.rows]
        if bool((end == length[:, None]).all()):
            end = end[:, :1]  # the common case: a mask per sequence instead of one per row
        k, v = _gather((k_cache, v_cache), page_table[group.sequences], length, slot)
        hidden, blind = slot >= end[:, :, None], limit[group.rows] <= 0
        group.scatter(out, attend(take(q, group.rows), k, v, hidden, blind, scale))
    return out


def _gather(caches: Sequence[Tensor], table: Tensor, length: Tensor, slot: Tensor) -> list[Tensor]:
    """[g, K, Hkv, D] of each cache: the positions of each sequence in order; zeros from its length on."""
    first = slot[:: caches[0].shape[1]]
    width = min(len(first), table.shape[1])
    pages = table.new_zeros(len(table), len(first))
    pages[:, :width] = table[:, :width]
    pages.masked_fill_(first >= length[:, None], 0)
    if bool((pages < 0).any()):
        raise InputError(
            "dgraph::paged_attention: a row sees a position in a page that its sequence does not have (its "
            "page_table entry is negative). Assign and write every page below the limit first."
        )
    unseen = (slot >= length[:, None]).flatten().nonzero().squeeze(1)
    found = [take(cache, pages).flatten(1, 2) for cache in caches]
    for values in found:
        values.flatten(0, 1).index_fill_(0, unseen, 0)  # unwritten slots may hold NaN, which no mask hides
    return found


def fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, limits, page, hq, hkv, d in (
        ("decode step", (4, 4), (20, 12), 8, 4, 2, 16),
        ("ragged, an empty sequence, limits inside a page", (5, 0, 9, 1), (7, 3, 130, 1), 16, 4, 4, 8),
        ("no rows", (0, 0), (0, 0), 4, 2, 1, 8),
        ("limit 0", (2, 3), (0, 5), 4, 3, 1, 10),
    ):
        per_row = torch.tensor(limits).repeat_interleave(torch.tensor(counts)).int()
        yield _sample(name, counts, per_row, page, hq, hkv, d, generator)
    mixed = torch.tensor([8, 8, 12, 12, 0, 3, 5]).int()
    yield _sample("two limits in a sequence", (4, 3), mixed, 4, 4, 2, 8, generator)


def _sample(
    name: str,
    counts: tuple[int, ...],
    limit: Tensor,
    page: int,
    hq: int,
    hkv: int,
    d: int,
    generator: torch.Generator,
) -> Sample:
    cu_rows = cu_rows_of(counts)
    longest = [max([0, *part.tolist()]) for part in limit.split(list(counts))]
    table, pages = page_table_of(longest, page, generator)
    q = torch.randn(len(limit), hq, d, generator=generator)
    k_cache, v_cache = (torch.full((pages, page, hkv, d), float("nan")) for _ in range(2))
    for s, length in enumerate(longest):
        for p in range(length):
            for cache in (k_cache, v_cache):
                cache[table[s, p // page], p % page] = torch.randn(hkv, d, generator=generator)
    scale = d**-0.5
    return Sample(
        name,
        (q, k_cache, v_cache, table, cu_rows, limit, scale),
        (pad_rows(q, 5), k_cache, v_cache, table, cu_rows, pad_rows(limit, 5), scale),
    )


OP = define(
    "paged_attention",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    count="cu_rows",
    padding=(0,),
    kernel="dgraph.ops.triton.paged_attention:kernel",
    tuning="dgraph.ops.triton.candidates:ATTENTION",
)
