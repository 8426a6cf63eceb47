"""dgraph::compare_rows: sums of the cosine between rows and those of an earlier step (DyLLM, dLLM-Cache)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of, positions_of
from dgraph.ops.kv.scales import scaled, store, unscaled
from dgraph.ops.padded import placed_rows, slots_of
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
The three sums of the cosine between a row of `new` and what `cache` holds for it: their product, the square of the new
and the square of the old, over the H * D values of the row; then cache takes the row. A rank that has some of the heads
has a share of each sum: add them over ranks, then decide by dgraph::drifted or dgraph::least_drifted. Heads that
several ranks hold are counted several times, and all alike, which leaves the cosine as it is.
new [N, H, D]; cache [pages, page, H, D] of the same dtype, position p of sequence s at
cache[page_table[s, p // page], p % page]; positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1]; only bool[N], the
rows that take part, or None: all of them -> f32[N, 3] (float64 for float64). Sums in fp32 at least.
A cache in float8_e4m3fn has `scale` f32[pages, page, H], by head, and is read and written with it as by kv_write.
A row that takes no part, one whose position has no page (a negative entry) and a padding row give zeros and write
nothing. Padding rows may hold anything. A slot that was never written may hold NaN: so does the sum, then. A page that
the cache does not have is an error in the reference and undefined in a kernel. Deterministic: a row's sums depend on
that row alone."""


def reference(
    new: Tensor,
    cache: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    only: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    rows, (pages, places) = placed_rows("compare_rows", positions, page_table, cu_rows, *cache.shape[:2])
    if only is not None:
        wanted = only[rows]
        rows = torch.arange(len(only), device=only.device)[rows][wanted]
        pages, places = pages[wanted], places[wanted]
    sums = torch.zeros(len(new), 3, dtype=numeric(new.dtype), device=new.device)
    at = pages, places
    held = unscaled(cache[at], None if scale is None else scale[at], new.dtype)
    sums[rows] = sums_of(new[rows], held)
    store("compare_rows", new[rows], at, cache, scale)
    return sums


def sums_of(new: Tensor, old: Tensor) -> Tensor:
    """Sums [R, 3] of rows [R, H, D]: their product, the square of new and the square of old; in fp32 at least."""
    wide = numeric(new.dtype)
    a, b = new.flatten(1).to(wide), old.flatten(1).to(wide)
    return torch.stack([(a * b).sum(1), (a * a).sum(1), (b * b).sum(1)], 1)


def cosine_of(sums: Tensor) -> Tensor:
    """Cosines [R] in [-1, 1] from sums [R, 3]: 1 if both rows are zeros, 0 if one is, NaN if a sum is NaN."""
    dot, new, old = sums.unbind(1)
    product = new.sqrt() * old.sqrt()
    empty = (new == 0) & (old == 0)
    return torch.where(product == 0, empty.to(sums.dtype), dot / product).clamp(-1, 1)


def fake(new: Tensor, *rest: Any) -> Tensor:
    return new.new_empty((new.shape[0], 3), dtype=numeric(new.dtype))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, starts, page, heads, d, share in (
        ("some rows", (9, 7), (0, 5), 4, 4, 8, None),
        ("ragged, an empty sequence, some take part", (5, 0, 12, 1), (3, 9, 14, 31), 8, 3, 10, 0.6),
        ("none takes part", (3, 4), (0, 0), 4, 2, 8, -1.0),
        ("pages missing", (9, 0, 7), (0, 2, 2), 4, 4, 8, 0.7),
        ("no rows", (0, 0), (0, 0), 4, 1, 8, None),
    ):
        new, cache, *where = changed_rows(counts, starts, page, heads, d, generator)
        positions, table, cu_rows = where
        if name == "pages missing":
            table[:, 0] = -1
        only = None if share is None else torch.rand(len(new), generator=generator) < share
        args = new, cache, *where, only
        more = None if only is None else pad_rows(only, 3)
        padded = pad_rows(new, 3), cache.clone(), pad_rows(positions, 3), table, cu_rows, more
        yield Sample(name, args, padded)
        if name in ("some rows", "pages missing"):
            yield Sample(f"{name}, float8", in_float8(args), in_float8(padded))


def in_float8(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the cache of a call, its second argument, to float8, and append its scales."""
    stored, scale = scaled(args[1])
    return args[0], stored, *args[2:], scale


def changed_rows(
    counts: tuple[int, ...], starts: tuple[int, ...], page: int, heads: int, d: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw rows, a cache that holds rows near them, positions, page_table and cu_rows.

    If there are more than three rows, the first three are special. The cache holds zeros for the first and the opposite
    of the third, and both sides are zeros for the second.
    """
    cu_rows, positions = cu_rows_of(counts), positions_of(counts, starts)
    table, pages = page_table_of([c + s for c, s in zip(counts, starts, strict=True)], page, generator)
    new = torch.randn(sum(counts), heads, d, generator=generator)
    cache = torch.full((pages, page, heads, d), torch.nan)
    slots = slots_of("sample", positions, table, cu_rows, page)
    cache[slots] = nearby(new, generator)
    if len(new) > 3:
        cache[slots[0][0], slots[1][0]] = 0  # one zero
        new[1] = cache[slots[0][1], slots[1][1]] = 0  # two zeros
        cache[slots[0][2], slots[1][2]] = -new[2]
    return new, cache, positions, table, cu_rows


def nearby(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Perturb rows by noise: even ones by 0.02 of the mean magnitude, odd ones by all of it."""
    noise = torch.randn(rows.shape, generator=generator)
    amount = torch.tensor([0.02, 1.0]).repeat(len(rows))[: len(rows), None, None]
    return rows + amount * noise * rows.abs().mean()


OP = define(
    "compare_rows",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    mutates=("cache", "scale"),
    scales={"cache": "scale"},
    padding=(0,),
    kernel="dgraph.ops.selection.triton.compare_rows:kernel",
)
