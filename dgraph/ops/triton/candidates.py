"""Tilings that are worth timing for a shape: the default first, then changes of it that may be faster on a device.

A list is short, because each tiling is compiled. Its tilings fit the kernel. Only a run tells if they fit the device.
The tiles of products are among those that `benchmarks.rows_linear --tilings` times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from dgraph.ops.attention.triton import attention_tiling, partial_attention
from dgraph.ops.attention.triton.attention_tiling import Tiling as AttentionTiling
from dgraph.ops.lm_head.triton import lm_head
from dgraph.ops.products.triton import rows_linear
from dgraph.ops.products.triton.product_cases import ANY
from dgraph.ops.products.triton.rows_linear import Tiles
from dgraph.ops.triton import trials
from dgraph.ops.triton.rows import power_of_two
from dgraph.ops.tuning import AttentionShape, LinearShape, LogitsShape, Shape, Tunable, attention_shape, dtype_name

MOST = 12
"""Most tilings for one shape."""


def itemsize(shape: Shape) -> int:
    """Bytes of a value."""
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return dtype.itemsize


def attention(shape: AttentionShape, multiprocessors: int) -> list[AttentionTiling]:
    """Tilings of paged_attention."""
    sizes = (shape.heads, shape.kv_heads), shape.head_dim, shape.page, shape.keys, itemsize(shape)
    stored = getattr(torch, shape.stored).itemsize
    default = attention_tiling.tiling_for(shape.rows, shape.sequences, *sizes, multiprocessors, stored=stored)
    splits, n, m = default.splits, default.block_n, default.block_m
    changes: list[dict[str, Any]] = [{"splits": 2 * splits}, {"splits": splits // 2}]
    if itemsize(shape) == 2:
        changes += [
            {"block_n": 2 * n},
            {"block_n": n // 2},
            {"warps": 12 - default.warps},
            {"block_n": 2 * n, "warps": 12 - default.warps},
            {"stages": 3},
            {"block_m": m // 2, "warps": 4},
            {"block_m": 2 * m, "block_n": 128, "warps": 8},
            {"bulk": False, "block_n": 128 if m < 128 else 64, "stages": 3},
            {"block_m": m // 2, "warps": 4, "splits": splits // 2},
        ]
    found = [default, *(replace(default, roles=False, **change) for change in ({}, *changes))]
    if default.roles and stored == 1:  # in tiles of their own, whose only choice is the shares
        found[1:1] = [replace(default, **change) for change in changes[:2]]
    return _distinct(tiling for tiling in found if tiling is default or _fits(tiling, shape))


def _fits(tiling: AttentionTiling, shape: AttentionShape) -> bool:
    """True if a tiling differs from others for a shape, and is small enough to have a chance."""
    widest = 64 if power_of_two(shape.head_dim) > 128 else 128
    least = power_of_two(shape.heads // shape.kv_heads, 16)
    return (
        max(least, 16) <= tiling.block_m <= max(least, 128)
        and 16 <= tiling.block_n <= widest
        and 1 <= tiling.splits <= max(1, min(16, shape.keys // 128))
        and not (tiling.bulk and shape.page % tiling.block_n)  # a page that is smaller is read without the copy engine
    )


def partial(shape: AttentionShape, multiprocessors: int) -> list[partial_attention.Tiling]:
    """Tilings of partial_attention."""
    sizes = (shape.heads, shape.kv_heads), shape.head_dim, shape.page, shape.keys, itemsize(shape)
    default = partial_attention.tiling_for(shape.rows, shape.sequences, *sizes, multiprocessors)
    exact = default.exact
    inner: list[dict[str, Any]] = [{"splits": 2 * exact.splits}, {"splits": exact.splits // 2}]
    outer: list[dict[str, Any]] = []
    if itemsize(shape) == 2:
        inner += [{"block_n": 2 * exact.block_n}, {"block_n": exact.block_n // 2}, {"stages": 3}]
        outer = [{"block_n": default.block_n // 2}, {"stages": 2}, {"stages": 3}, {"changes": 16}, {"changes": 64}]
        outer += [{"registers": 0}] if default.registers else []
    found = [default]
    found += [replace(default, exact=tiling) for c in inner if _fits(tiling := replace(exact, **c), shape)]
    found += [replace(default, **change) for change in outer]
    return _distinct(tiling for tiling in found if tiling is default or tiling.block_n >= 16)


def products(shape: LinearShape, multiprocessors: int) -> list[rows_linear.Tiling]:
    """Tilings of rows_linear. A bucket of few rows has none of the tiles for many rows, which never run there."""
    default = rows_linear.tiling_for(itemsize(shape))
    if itemsize(shape) != 2:
        return [default]
    tiled = replace(default, roles=False)
    few, some, many = tiled.tiles
    if shape.rows <= few.up_to:
        tiles = [replace(few, up_to=ANY), Tiles(64, 128, 64, 8, weight_first=True)]
        tiles += [Tiles(64, 64, 128, 6, weight_first=True)]
        return [default, tiled, *(rows_linear.Tiling((one,)) for one in tiles)]
    if shape.rows <= some.up_to:
        last = [replace(some, up_to=ANY), Tiles(128, 64, 64, 8), Tiles(64, 128, 128, 4), Tiles(128, 64, 128, 4)]
        return [
            default,
            tiled,
            *(rows_linear.Tiling((few, one), splits=4 if one is not last[0] else 8) for one in last),
        ]
    return [
        default,
        tiled,
        replace(tiled, splits=4),
        replace(default, group=16),
        replace(tiled, tiles=(few, replace(some, up_to=512), many)),
        replace(tiled, tiles=(few, replace(some, up_to=1280), many)),
    ]


def logits(shape: LogitsShape, multiprocessors: int) -> list[lm_head.Tiling]:
    """Tilings of lm_head's reduction."""
    default = lm_head.tiling_for(shape.rows, shape.vocab)
    sizes = [(default.block, default.warps), (1024, 4), (4096, 8), (2048, 8)]
    shares = (default.splits, 2 * default.splits, default.splits // 2)
    found = [default]
    for block, warps in sizes:
        fits = [s for s in shares if 1 <= s <= min(64, -(-shape.vocab // block))]
        found += [lm_head.Tiling(block, splits, warps) for splits in fits]
    return _distinct(found)


def _distinct(tilings: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(tilings))[:MOST]


def _attention_shapes(q: Any, k_cache: Any, v_cache: Any, page_table: Any, *rest: Any) -> list[Shape]:
    return [attention_shape(q, k_cache, page_table)]


def _partial_shapes(q: Any, k_cache: Any, *rest: Any) -> list[Shape]:
    return [attention_shape(q, k_cache, rest[7])]


def _linear_shapes(x: Any, weight: Any, *rest: Any) -> list[Shape]:
    return [rows_linear.shape_of(x, weight)]


def _logits_shapes(h: Any, weight: Any, *rest: Any) -> list[Shape]:
    rows, chunk = h.shape[0], rest[4]
    sizes = {min(rows, chunk), rows % chunk} if rows > chunk else {rows}
    return [LogitsShape(size, weight.shape[0], dtype_name(h.dtype)) for size in sorted(sizes) if size]


ATTENTION = Tunable(AttentionShape, AttentionTiling, _attention_shapes, attention, trials.attention)
"""Tuning of paged_attention."""
LOGITS = Tunable(LogitsShape, lm_head.Tiling, _logits_shapes, logits, trials.logits)
"""Tuning of lm_head."""
PARTIAL = Tunable(AttentionShape, partial_attention.Tiling, _partial_shapes, partial, trials.partial)
"""Tuning of partial_attention and partial_context."""
PRODUCTS = Tunable(LinearShape, rows_linear.Tiling, _linear_shapes, products, trials.products)
"""Tuning of rows_linear."""
