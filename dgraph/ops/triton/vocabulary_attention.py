"""dgraph::vocabulary_attention on CUDA.

The sums of a row are as wide as the model, too wide for the registers of one multiprocessor, so a row cannot be kept
there as attention keeps it. Instead ids are taken in chunks whose weight fits in the L2 cache, and each chunk is two
products: `_score_ids` multiplies rows by the chunk, and makes of a tile of logits exp(x - the tile's largest), rounded
to the dtype of h, and six numbers per row; `_weigh_ids` brings the tiles to one maximum, the largest so far, and adds
their product with the same chunk to the sums. The weight comes from memory once, and what is kept of a chunk is
[rows, chunk].

Where the sums of few rows make fewer tiles than there are multiprocessors, each takes a share of every chunk's ids, and
`_finish` adds the shares up in order.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.triton.logits import gumbel
from dgraph.ops.triton.rows import dense_rows, live_rows, power_of_two
from dgraph.ops.vocabulary_part import check

PROGRAMS = 128
"""Tiles that keep a large GPU busy."""
CHUNK = 24 << 20
"""Bytes of a chunk's weight: half of the L2 cache of an H100, whose other half holds what is multiplied with it."""
TOGETHER = tl.constexpr(8)
"""Tiles whose numbers are read at a time."""
BLOCK = 1024
"""Columns of the sums that one program of `_finish` adds up."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of the launches; powers of two but for chunk and splits.

    Attributes:
        rows: of a tile of either product, at least 16.
        ids: columns of a tile of logits.
        columns: of a tile of the sums.
        depth: inner values per iteration; divides `ids`.
        chunk: ids at a time, a multiple of `ids`.
        splits: shares of a chunk's ids.
        stages: iterations in flight.
        warps: of either product.
    """

    rows: int
    ids: int
    columns: int
    depth: int
    chunk: int
    splits: int
    stages: int = 3
    warps: int = 8


def tiling_for(rows: int, width: int, vocab: int, itemsize: int) -> Tiling:
    """The tiling for so many rows of so many values; sizes by reckoning, since none of them was timed."""
    if itemsize == 2:
        high, columns, depth, warps = power_of_two(rows, 16, 128), 256, 64, 8
    else:  # fp32 products run outside of the matrix units, and take many registers
        high, columns, depth, warps = power_of_two(rows, 16, 64), 64, 32, 4
    most, tall = min(CHUNK // (width * itemsize), vocab), -(-rows // high)
    ids = 128 if itemsize == 2 and tall * (most // 128) >= PROGRAMS else 64
    chunk = max(1, most // ids) * ids
    splits = max(1, min(PROGRAMS // (tall * -(-width // columns)), chunk // ids))
    return Tiling(high, ids, columns, depth, chunk, splits, warps=warps)


class Share(NamedTuple):
    """A rank's share of the vocabulary, and where its numbers go; see dgraph::vocabulary_part.

    Attributes:
        numbers: f32[N, 6].
        first: i64[1], the id of the first row of the weight.
        vocab: ids in the whole vocabulary.
    """

    numbers: Tensor
    first: Tensor
    vocab: int


def kernel(
    h: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seed: Tensor,
    cu_rows: Tensor,
    softcap: float | None,
    suppress: int,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dgraph::vocabulary_attention; see its contract. `tiling` overrides the sizes chosen for the shape."""
    n = len(h)
    best, token = (torch.empty(n, dtype=torch.int64, device=h.device) for _ in range(2))
    confidence, entropy = (torch.empty(n, dtype=torch.float32, device=h.device) for _ in range(2))
    soft = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    found = best, confidence, token, entropy
    stream(h, weight, temperature, seed, cu_rows, softcap, suppress, soft, None, tiling, found)
    return best, confidence, token, entropy, soft


def workspace(h: Tensor, weight: Tensor) -> int:
    """Bytes of the sums, of one chunk, and of the numbers of its tiles."""
    (n, width), vocab = h.shape, len(weight)
    tiling = tiling_for(max(n, 1), width, vocab, h.element_size())
    chunk = h.element_size() * tiling.chunk + 4 * 6 * (tiling.chunk // tiling.ids + 2)
    return n * (4 * tiling.splits * width + chunk)


def stream(
    h: Tensor,
    weight: Tensor,
    temperature: Tensor,
    seed: Tensor,
    cu_rows: Tensor,
    softcap: float | None,
    suppress: int,
    soft: Tensor,
    share: Share | None,
    tiling: Tiling | None = None,
    found: tuple[Tensor, Tensor, Tensor, Tensor] | tuple[None, None, None, None] = (None, None, None, None),
) -> None:
    """Write the results `found` (best, confidence, token, entropy) and soft [N, d]; or the numbers of a share, and its
    context as `soft`.
    """
    numbers, first, in_all = share or (None, None, len(weight))
    check(h, weight, temperature, seed, softcap, in_all)
    (n, width), vocab = h.shape, len(weight)
    if not n:
        return
    h, weight = dense_rows(h), dense_rows(weight)
    sizes = tiling_for(n, width, vocab, h.element_size()) if tiling is None else tiling
    temperature, seed, counts = temperature.contiguous(), seed.contiguous(), (cu_rows, cu_rows.shape[0] - 1, n)
    tiles = sizes.chunk // sizes.ids
    shares = torch.empty((n, sizes.chunk), dtype=h.dtype, device=h.device)
    of_tiles = torch.empty((6, tiles, n), dtype=torch.float32, device=h.device)
    running = torch.empty((2, 6, n), dtype=torch.float32, device=h.device)
    sums = torch.empty((sizes.splits, n, width), dtype=torch.float32, device=h.device)
    high, across = triton.cdiv(n, sizes.rows), triton.cdiv(width, sizes.columns)
    options = {"num_warps": sizes.warps}
    precision = "ieee" if h.dtype == torch.float32 else "tf32"
    for i, start in enumerate(range(0, vocab, sizes.chunk)):
        here = triton.cdiv(min(sizes.chunk, vocab - start), sizes.ids)
        _score_ids[(high, here)](
            h, weight, temperature, seed, *counts, first, shares, of_tiles, softcap or 0.0,
            start, sizes.chunk, tiles, vocab, in_all, suppress, h.stride(0), weight.stride(0),
            width, sizes.rows, sizes.ids, sizes.depth, sizes.stages, softcap is not None, precision, **options,
        )  # fmt: skip
        before, after = running[i % 2], running[(i + 1) % 2]
        # One program more in each row of tiles: it brings the numbers of the tiles together.
        _weigh_ids[(high, across + 1, sizes.splits)](
            shares, weight, *counts, first, of_tiles, before, after, sums,
            start, sizes.chunk, tiles, here, vocab, in_all, weight.stride(0),
            i == 0, width, sizes.rows, sizes.ids, sizes.columns, sizes.depth, sizes.stages, sizes.splits, precision,
            **options,
        )  # fmt: skip
        last = after
    _finish[(n, triton.cdiv(width, BLOCK))](
        last, sums, *counts, *found, numbers, soft, width, sizes.splits, BLOCK, num_warps=4
    )


@triton.jit
def _capped(z, softcap):
    """softcap * tanh(z / softcap), to within 2e-7 of the cap."""
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * (z / softcap)) + 1.0))


@triton.jit(do_not_specialize=["b", "n", "start"])
def _score_ids(
    h_ptr, w_ptr, temperature_ptr, seed_ptr, cu_ptr, b, n, first_ptr, share_ptr, tiles_ptr, softcap,
    start, chunk, tiles, vocab, ids_in_all, suppress, h_row, w_row,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, IDS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of a chunk's logits: exp(x - largest), and six numbers per row."""
    tile = tl.program_id(1)
    live = live_rows(cu_ptr, b, n)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < live:
        column = tile * IDS + tl.arange(0, IDS)
        here = row < live
        h_at = h_ptr + row.to(tl.int64)[:, None] * h_row
        w_at = w_ptr + (start + column).to(tl.int64)[:, None] * w_row
        real = start + column < vocab
        acc = tl.zeros([ROWS, IDS], tl.float32)
        for k in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
            depth = k + tl.arange(0, DEPTH)
            h = tl.load(h_at + depth[None, :], mask=here[:, None] & (depth < WIDTH)[None, :], other=0.0)
            w = tl.load(w_at + depth[None, :], mask=real[:, None] & (depth < WIDTH)[None, :], other=0.0)
            acc = tl.dot(h, w.T, acc, input_precision=PRECISION)
        ids = start + column
        if first_ptr is not None:
            ids += tl.load(first_ptr).to(tl.int32)
        if CAPPED:
            acc = _capped(acc, softcap)
        temperature = tl.load(temperature_ptr + row, mask=here, other=0.0)
        drawn = temperature > 0
        divisor = tl.zeros([ROWS, IDS], tl.float32) + tl.where(drawn, temperature, 1.0)[:, None]
        x = tl.where((real & (ids < ids_in_all) & (ids != suppress))[None, :], tl.div_rn(acc, divisor), float("-inf"))
        largest = tl.max(x, 1)
        number = tl.zeros([ROWS, IDS], tl.int32) + ids[None, :]
        none = tl.full([ROWS, IDS], 2147483647, tl.int32)
        some = x > float("-inf")
        best = tl.min(tl.where((x == largest[:, None]) & some, number, none), 1)
        winner, token = largest, best
        if tl.max(temperature) > 0:
            seed = tl.load(seed_ptr + row, mask=here, other=0)
            low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
            key = x + tl.where(drawn[:, None], gumbel(low[:, None], high[:, None], number.to(tl.uint32)), 0.0)
            winner = tl.max(key, 1)
            token = tl.min(tl.where((key == winner[:, None]) & some, number, none), 1)
        top = tl.maximum(largest, -1e30)
        gap = tl.minimum(top[:, None] - x, 1e30)
        share = tl.exp(-gap)
        at = share_ptr + row.to(tl.int64)[:, None] * chunk + column[None, :]
        tl.store(at, share.to(share_ptr.dtype.element_ty), mask=here[:, None])
        mine = tiles_ptr + tile * n + row
        tl.store(mine, best.to(tl.float32), mask=here)
        tl.store(mine + tiles * n, top, mask=here)
        tl.store(mine + 2 * tiles * n, tl.sum(share, 1), mask=here)
        tl.store(mine + 3 * tiles * n, tl.sum(gap * share, 1), mask=here)
        tl.store(mine + 4 * tiles * n, tl.maximum(winner, -1e30), mask=here)
        tl.store(mine + 5 * tiles * n, token.to(tl.float32), mask=here)


@triton.jit
def _gather_numbers(tiles_ptr, before_ptr, after_ptr, row, here, n, tiles, count, highest, BEGIN: tl.constexpr):
    """The numbers after a chunk, of rows whose largest x is known: those before it, and those of its tiles in order."""
    best, token = tl.full(highest.shape, 2.0**31, tl.float32), tl.full(highest.shape, 2.0**31, tl.float32)
    key = tl.full(highest.shape, -1e30, tl.float32)
    total, spread = tl.zeros(highest.shape, tl.float32), tl.zeros(highest.shape, tl.float32)
    if not BEGIN:
        risen = highest - tl.load(before_ptr + n + row, mask=here, other=-1e30)
        total = tl.load(before_ptr + 2 * n + row, mask=here, other=0.0)
        spread = (tl.load(before_ptr + 3 * n + row, mask=here, other=0.0) + total * risen) * tl.exp(-risen)
        total *= tl.exp(-risen)
        best = tl.where(risen == 0, tl.load(before_ptr + row, mask=here, other=0.0), best)
        key = tl.load(before_ptr + 4 * n + row, mask=here, other=-1e30)
        token = tl.load(before_ptr + 5 * n + row, mask=here, other=0.0)
    for first in range(0, count, TOGETHER):
        tile = first + tl.arange(0, TOGETHER)
        inside = (tile < count)[:, None] & here[None, :]
        at = tiles_ptr + tile[:, None] * n + row[None, :]
        top = tl.load(at + tiles * n, mask=inside, other=-1e30)
        gap = highest[None, :] - top
        fade = tl.exp(-gap)
        mass = tl.load(at + 2 * tiles * n, mask=inside, other=0.0)
        total += tl.sum(mass * fade, 0)
        spread += tl.sum((tl.load(at + 3 * tiles * n, mask=inside, other=0.0) + mass * gap) * fade, 0)
        # Ids rise with the tiles: of equals the lowest is the first, and what was found before is lower still.
        ids = tl.load(at, mask=inside, other=2.0**31)
        best = tl.minimum(best, tl.min(tl.where(gap == 0, ids, 2.0**31), 0))
        keys = tl.load(at + 4 * tiles * n, mask=inside, other=-1e30)
        winner = tl.max(keys, 0)
        tokens = tl.load(at + 5 * tiles * n, mask=inside, other=2.0**31)
        token = tl.where(winner > key, tl.min(tl.where(keys == winner[None, :], tokens, 2.0**31), 0), token)
        key = tl.maximum(key, winner)
    tl.store(after_ptr + row, best, mask=here)
    tl.store(after_ptr + n + row, highest, mask=here)
    tl.store(after_ptr + 2 * n + row, total, mask=here)
    tl.store(after_ptr + 3 * n + row, spread, mask=here)
    tl.store(after_ptr + 4 * n + row, key, mask=here)
    tl.store(after_ptr + 5 * n + row, token, mask=here)


@triton.jit(do_not_specialize=["b", "n", "start", "count"])
def _weigh_ids(
    share_ptr, w_ptr, cu_ptr, b, n, first_ptr, tiles_ptr, before_ptr, after_ptr, sums_ptr,
    start, chunk, tiles, count, vocab, ids_in_all, w_row,
    BEGIN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, IDS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the sums after a chunk, of one share of its ids; the last program of a row of tiles: its numbers."""
    across, split = tl.program_id(1), tl.program_id(2)
    live = live_rows(cu_ptr, b, n)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < live
    if tl.program_id(0) * ROWS < live:
        highest = tl.full([ROWS], -1e30, tl.float32)
        if not BEGIN:
            highest = tl.load(before_ptr + n + row, mask=here, other=-1e30)
        earlier = highest
        for first in range(0, count, TOGETHER):
            tile = first + tl.arange(0, TOGETHER)
            inside = (tile < count)[:, None] & here[None, :]
            tops = tl.load(tiles_ptr + (tiles + tile[:, None]) * n + row[None, :], mask=inside, other=-1e30)
            highest = tl.maximum(highest, tl.max(tops, 0))
        if across == tl.num_programs(1) - 1:
            if split == 0:
                _gather_numbers(tiles_ptr, before_ptr, after_ptr, row, here, n, tiles, count, highest, BEGIN)
        else:
            column = across * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < WIDTH
            at = sums_ptr + (split * n + row).to(tl.int64)[:, None] * WIDTH + column[None, :]
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            if not BEGIN:
                acc = tl.load(at, mask=here[:, None] & inside[None, :], other=0.0) * tl.exp(earlier - highest)[:, None]
            real = vocab - start
            if first_ptr is not None:
                real = tl.minimum(real, ids_in_all - tl.load(first_ptr).to(tl.int32) - start)
            each = tl.cdiv(count, SPLITS) * IDS
            share_at = share_ptr + row.to(tl.int64)[:, None] * chunk
            for k in tl.range(split * each, tl.minimum((split + 1) * each, count * IDS), DEPTH, num_stages=STAGES):
                depth = k + tl.arange(0, DEPTH)
                top = tl.load(tiles_ptr + (tiles + k // IDS) * n + row, mask=here, other=-1e30)
                share = tl.load(share_at + depth[None, :], mask=here[:, None], other=0.0)
                share = (share.to(tl.float32) * tl.exp(top - highest)[:, None]).to(share.dtype)
                w_at = w_ptr + (start + depth).to(tl.int64)[:, None] * w_row + column[None, :]
                w = tl.load(w_at, mask=(depth < real)[:, None] & inside[None, :], other=0.0)
                acc = tl.dot(share, w, acc, input_precision=PRECISION)
            tl.store(at, acc, mask=here[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["b", "n"])
def _finish(
    running_ptr, sums_ptr, cu_ptr, b, n, best_ptr, confidence_ptr, token_ptr, entropy_ptr, numbers_ptr, soft_ptr,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row's sums, from those of all shares; the first part also writes what was found."""
    row, part = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    soft = tl.zeros([BLOCK], tl.float32)
    best, token = tl.full([], -1, tl.int64), tl.full([], -1, tl.int64)
    confidence, entropy = tl.full([], float("-inf"), tl.float32), tl.full([], float("inf"), tl.float32)
    live = row < live_rows(cu_ptr, b, n)
    if live:
        for split in range(SPLITS):
            at = sums_ptr + (split * n + row).to(tl.int64) * WIDTH + column
            soft += tl.load(at, mask=column < WIDTH, other=0.0)
        mass = tl.load(running_ptr + 2 * n + row)
        if numbers_ptr is None:
            soft /= mass
            best = tl.load(running_ptr + row).to(tl.int64)
            confidence = 1.0 / mass
            token = tl.load(running_ptr + 5 * n + row).to(tl.int64)
            entropy = tl.log(mass) + tl.load(running_ptr + 3 * n + row) / mass
    at = soft_ptr + row.to(tl.int64) * WIDTH + column
    tl.store(at, soft.to(soft_ptr.dtype.element_ty), mask=column < WIDTH)
    if part == 0:
        if numbers_ptr is None:
            tl.store(best_ptr + row, best)
            tl.store(confidence_ptr + row, confidence)
            tl.store(token_ptr + row, token)
            tl.store(entropy_ptr + row, entropy)
        else:
            i = tl.arange(0, 8)
            value = tl.load(running_ptr + i * n + row, mask=live & (i < 6), other=0.0)
            value = tl.where((i == 5) & (live == 0), -1.0, value)
            tl.store(numbers_ptr + row * 6 + i, value, mask=i < 6)
