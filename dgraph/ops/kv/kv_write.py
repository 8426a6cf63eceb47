"""dgraph::kv_write: store the keys and values of rows in the paged cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of, positions_of, without_pages
from dgraph.ops.kv.scales import FLOAT8, by_head, store
from dgraph.ops.padded import placed_rows
from dgraph.ops.registry import Sample, define

CONTRACT = """\
Position p of sequence s lives at cache[page_table[s, p // page], p % page].
Writes k and v [N, Hkv, D] of every live row to k_cache and v_cache [pages, page, Hkv, D], all of one dtype;
returns nothing.
Caches in float8_e4m3fn have scales k_scale and v_scale f32[pages, page, Hkv], by head (dgraph.ops.kv.scales): a vector
x of a row and a KV head is written as x / s, rounded to the nearest (ties to even), with s = max(max|x| / 448, 2**-100)
in its place among the scales. Both are computed in fp32, from x alone.
positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1]; skip bool[N], or None for no row.
Padding rows write nothing and may hold anything; table entries that no row addresses are not read. The
rows of a step address distinct slots, so the order of the writes does not matter.
A row whose position has no page (a negative entry), or that skip flags, writes nothing. A page that the caches do not
have is an error in the reference and undefined in a kernel."""


def reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    rows, slots = placed_rows("kv_write", positions, page_table, cu_rows, *k_cache.shape[:2])
    if skip is not None:
        kept = (~skip[: len(positions)][rows]).nonzero()[:, 0]
        rows = kept if isinstance(rows, slice) else rows[kept]
        slots = slots[0][kept], slots[1][kept]
    store("kv_write", k[rows], slots, k_cache, k_scale)
    store("kv_write", v[rows], slots, v_cache, v_scale)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    yield from placed_samples(generator)
    for sample in placed_samples(generator):
        if sample.name.startswith("ragged"):
            assert sample.padded is not None
            yield Sample("pages missing", *(without_pages(args, 5) for args in (sample.args, sample.padded)))
    yield from in_float8(placed_samples(generator))
    for sample in [*placed_samples(generator), *in_float8(placed_samples(generator))]:
        if sample.name.startswith("ragged"):
            assert sample.padded is not None
            calls = (
                (*args, *(None,) * (9 - len(args)), torch.arange(len(args[0])) % 3 == 1)
                for args in (sample.args, sample.padded)
            )
            yield Sample(f"{sample.name}, some rows skipped", *calls)


def in_float8(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Convert the caches of some samples to float8; a vector of zeros and one of tiny numbers are among their rows."""
    for sample in samples:
        if sample.name.startswith(("one", "ragged")):
            assert sample.padded is not None
            for args in (sample.args, sample.padded):
                args[0][0, 0], args[1][1, 0] = 0, 1e-40
            yield Sample(f"{sample.name}, float8", *map(_in_float8, (sample.args, sample.padded)))


def _in_float8(args: tuple[Any, ...]) -> tuple[Any, ...]:
    k, v, k_cache, v_cache, *where = args
    scales = (by_head(torch.full(cache.shape[:3], 0.5)) for cache in (k_cache, v_cache))
    return k, v, k_cache.to(FLOAT8), v_cache.to(FLOAT8), *where, *scales


def placed_samples(generator: torch.Generator) -> Iterator[Sample]:
    """Samples in which every position has a page."""
    for name, counts, starts, page, heads, d in (
        ("one sequence", (4,), (0,), 4, 2, 8),
        ("ragged, an empty sequence, blocks across pages", (5, 0, 7, 1), (3, 9, 14, 31), 8, 2, 6),
        ("no rows", (0, 0), (0, 0), 4, 1, 8),
        ("page of one position", (3, 2), (2, 0), 1, 3, 4),
    ):
        lengths = [count + start for count, start in zip(counts, starts, strict=True)]
        table, pages = page_table_of(lengths, page, generator)
        k, v = (torch.randn(sum(counts), heads, d, generator=generator) for _ in range(2))
        caches = [torch.randn(pages, page, heads, d, generator=generator) for _ in range(2)]
        positions, cu_rows = positions_of(counts, starts), cu_rows_of(counts)
        yield Sample(
            name,
            (k, v, *(cache.clone() for cache in caches), positions, table, cu_rows),
            (pad_rows(k, 3), pad_rows(v, 3), *caches, pad_rows(positions, 3), table, cu_rows),
        )


OP = define(
    "kv_write",
    reference,
    samples=samples,
    contract=CONTRACT,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
    scales={"k_cache": "k_scale", "v_cache": "v_scale"},
    added="skip",
    count="cu_rows",
    kernel="dgraph.ops.kv.triton.kv_write:kernel",
)
