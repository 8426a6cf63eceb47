"""dgraph::kv_pack on CUDA.

Scores become integers of the same order, pooled, without the window, one run per head (`_rank`). The kernels of
kv_pack_sizes choose the number that each head keeps, and list their rows. `_copy` moves the keys and values of listed
rows, if there are any to move, and writes their positions; to repack, it looks rows up by position.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.attention.sparse import REPACK, SELECT
from dgraph.ops.kv.kv_pack import check_moved, check_options, check_own
from dgraph.ops.kv.triton.kv_pack_sizes import PLAN, ROUNDS, count_joint, divide, list_best, share
from dgraph.ops.kv.triton.scales import check_scales, quantised
from dgraph.ops.triton.rows import dense_rows, offsets_block, power_of_two, sequence_at

INFINITE = tl.constexpr(0x7F800000)  # bits of +inf
CHOOSING, RENEWING = tl.constexpr(SELECT), tl.constexpr(REPACK)
COPIED = 64  # entries that one program copies


def kernel(
    score: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_positions: Tensor,
    cu_keys: Tensor,
    window: Tensor,
    action: Tensor,
    k_pack: Tensor | None,
    v_pack: Tensor | None,
    pack_count: Tensor,
    pack_index: Tensor,
    pack_start: Tensor,
    layer: int,
    ratio: float,
    pairs: int,
    heads: str,
    floor: float,
    pool: int,
    pooling: str,
    recent: int,
    first: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_pack_scale: Tensor | None = None,
    v_pack_scale: Tensor | None = None,
    tile: int | None = None,
) -> None:
    """dgraph::kv_pack; see its contract. `tile`: candidates that a count takes at once, by default 256 to 8192."""
    check_options(ratio, pairs, heads, floor, pool, pooling, recent)
    check_moved(k, v, k_pack, v_pack)
    own = pack_count.shape[1]
    check_own(score, own, first)
    for name, x in (("k_pack", k_pack), ("v_pack", v_pack), ("pack_count", pack_count)):
        if x is not None and x.stride(-1) != 1:
            raise InputError(f"dgraph::kv_pack: the last dimension of {name} must be contiguous, got {x.stride()}.")
    (m, count), b, entries = score.shape, cu_keys.shape[0] - 1, len(pack_index)
    d, strides = 1, (0, 0, 0, 0)
    if k is not None and v is not None and k_pack is not None and v_pack is not None:
        check_scales("kv_pack", k=(k, k_scale), v=(v, v_scale))
        check_scales("kv_pack", k_pack=(k_pack, k_pack_scale), v_pack=(v_pack, v_pack_scale))
        k, v, entries, d = dense_rows(k), dense_rows(v), len(k_pack), k.shape[2]
        strides = k.stride(0), v.stride(0), k_pack.stride(0), v_pack.stride(0)
    if not b or not count:
        return
    width, offsets = power_of_two(count), offsets_block(b)
    rows, tile = power_of_two(4096 // width, 16, 256), tile or power_of_two(-(-m // b), 256, 8192)
    warps = 16 if tile > 2048 else 4
    score, window, starts = (dense_rows(x) for x in (score, window, pack_start[layer]))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=score.device)

    plan, keys, listed = empty(b, 4), empty(count, m), empty(own, m)
    sizes = pack_count if first is None else empty(b, count)
    _outline[(b,)](
        key_positions, cu_keys, window, action, sizes, plan, pairs,
        sizes.stride(0), count, width, ratio, 256, num_warps=4,
    )  # fmt: skip
    tiles = triton.cdiv(m, rows) + b
    sums = empty(tiles, count, dtype=torch.float64) if heads == "mass" else None
    _rank[(tiles,)](
        score, cu_keys, plan, keys, sums, m, b, recent, score.stride(0),
        count, width, pool // 2, pooling == "mean", rows, offsets, num_warps=4,
    )  # fmt: skip
    if heads == "mass":
        share[(b,)](
            sums, cu_keys, plan, sizes, sizes.stride(0), count, width, floor, rows, 64,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    elif heads == "adaptive":
        rounds = ROUNDS.value
        counts, bounds = empty(rounds + 1, b, count, 16), empty(rounds, b)
        for turn in range(rounds + 1):
            count_joint[(b, count, 5 if turn < rounds else 1)](
                keys, cu_keys, plan, counts, bounds, m, b, turn,
                count, width, tile, num_warps=warps,
            )  # fmt: skip
        divide[(b,)](
            counts[rounds], plan, sizes, sizes.stride(0), count, width, floor,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if first is not None:
        _own[(b,)](sizes, first, action, pack_count, count, pack_count.stride(0), own, power_of_two(own), num_warps=1)
    list_best[(b, own)](keys, cu_keys, plan, sizes, first, listed, m, sizes.stride(0), tile, num_warps=warps)
    _copy[(triton.cdiv(m, COPIED) + b, own)](
        k, v, key_positions, cu_keys, action, pack_count, starts, listed, k_pack, v_pack, pack_index,
        k_scale, v_scale, k_pack_scale, v_pack_scale,
        m, b, *strides, pack_count.stride(0),
        entries, len(pack_index), power_of_two(own), d, power_of_two(d), COPIED, offsets, num_warps=8,
    )  # fmt: skip


@triton.jit
def _rows_below(positions_ptr, start, end, bound, PROBES: tl.constexpr):
    """Count the rows of [start, end) with a position below `bound`; positions ascend, and PROBES are read at once."""
    first, size = start, end - start
    while size > 0:
        step = tl.cdiv(size, PROBES)
        at = tl.arange(0, PROBES) * step
        position = tl.load(positions_ptr + first + at, mask=at < size, other=0)
        below = tl.sum(((position < bound) & (at < size)).to(tl.int32))
        last = tl.minimum(below * step, size)
        skipped = tl.where(below > 0, (below - 1) * step + 1, 0)
        first += skipped
        size = tl.where(below > 0, last - skipped, 0)
    return first - start


@triton.jit(do_not_specialize=["pairs"])
def _outline(
    positions_ptr, cu_ptr, window_ptr, action_ptr, count_ptr, plan_ptr, pairs, count_row,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """The plan of a sequence, with no candidates if it does not choose; and B for each head."""
    s = tl.program_id(0)
    plan_ptr += s * PLAN
    if tl.load(action_ptr + s) != CHOOSING:
        tl.store(plan_ptr, 0)
        tl.store(plan_ptr + 3, 0)
        return
    start, end = tl.load(cu_ptr + s), tl.load(cu_ptr + s + 1)
    below = _rows_below(positions_ptr, start, end, tl.load(window_ptr + 2 * s), PROBES)
    until = tl.maximum(_rows_below(positions_ptr, start, end, tl.load(window_ptr + 2 * s + 1), PROBES), below)
    n = end - start - (until - below)
    if RATIO > 0:
        budget = tl.floor(n.to(tl.float64) * tl.full([], RATIO, tl.float64)).to(tl.int32)
    else:
        budget = tl.minimum(n, pairs).to(tl.int32)
    tl.store(plan_ptr, n)
    tl.store(plan_ptr + 1, below)
    tl.store(plan_ptr + 2, until - below)
    tl.store(plan_ptr + 3, budget)
    head = tl.arange(0, WIDTH)
    tl.store(count_ptr + s.to(tl.int64) * count_row + head, tl.zeros([WIDTH], tl.int32) + budget, mask=head < HEADS)


@triton.jit
def _scores(score_ptr, row, head, inside, score_row):
    at = row.to(tl.int64)[:, None] * score_row + head[None, :]
    return tl.load(score_ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["recent"])
def _rank(
    score_ptr, cu_ptr, plan_ptr, keys_ptr, sums_ptr, m, b, recent, score_row,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, MEAN: tl.constexpr,
    ROWS: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """keys[h, cu[s] + c]: candidate c in the order of its rank; sums[tile, h]: of scores as they came."""
    tile = tl.program_id(0)
    s = sequence_at(cu_ptr, b, tile, ROWS, OFFSETS)
    if s == b:
        return
    start = tl.load(cu_ptr + s)
    first = (tile - start // ROWS - s) * ROWS
    n = tl.load(plan_ptr + s * PLAN)
    if first >= n:
        return
    below, cut = tl.load(plan_ptr + s * PLAN + 1), tl.load(plan_ptr + s * PLAN + 2)
    c, head = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pooled = tl.full([ROWS, WIDTH], 0.0 if MEAN else float("-inf"), tl.float32)
    for shift in range(-HALF, HALF + 1):
        near = c + shift
        inside = ((near >= 0) & (near < n))[:, None] & (head < HEADS)[None, :]
        score = _scores(score_ptr, start + near + tl.where(near >= below, cut, 0), head, inside, score_row)
        if MEAN:
            pooled += score
        else:
            pooled = tl.maximum(pooled, tl.where(inside, score, float("-inf")))
    if sums_ptr is not None:
        inside = (c < n)[:, None] & (head < HEADS)[None, :]
        score = _scores(score_ptr, start + c + tl.where(c >= below, cut, 0), head, inside, score_row)
        tl.store(sums_ptr + tile * HEADS + head, tl.sum(score.to(tl.float64), 0), mask=head < HEADS)
    if MEAN:
        size = tl.minimum(c + HALF, n - 1) - tl.maximum(c - HALF, 0) + 1
        pooled = tl.div_rn(pooled, tl.broadcast_to(tl.maximum(size, 1).to(tl.float32)[:, None], [ROWS, WIDTH]))
    bits = tl.where(pooled == 0, 0.0, pooled).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(((c < below) & (c >= below - recent))[:, None], INFINITE, key)
    at = head.to(tl.int64)[None, :] * m + (start + c)[:, None]
    tl.store(keys_ptr + at, key, mask=(c < n)[:, None] & (head < HEADS)[None, :])


@triton.jit
def _own(
    sizes_ptr, first_ptr, action_ptr, count_ptr, sizes_row, count_row, OWN: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Copy the sizes of this rank's heads from those of all heads, if the sequence chooses."""
    s, head = tl.program_id(0), tl.arange(0, WIDTH)
    if tl.load(action_ptr + s) == CHOOSING:
        size = tl.load(sizes_ptr + s * sizes_row + tl.load(first_ptr) + head, mask=head < OWN, other=0)
        tl.store(count_ptr + s.to(tl.int64) * count_row + head, size, mask=head < OWN)


@triton.jit
def _rows_at(positions_ptr, position, start, end):
    """Row of [start, end) at each `position`, or one after which it would be."""
    last = position - tl.load(positions_ptr + start).to(tl.int32) + start  # unless positions are left out
    last = tl.maximum(tl.minimum(last, end - 1), start)
    row = tl.where(tl.load(positions_ptr + last) == position, last, start)
    while tl.max(last - row) > 0:
        middle = (row + last) // 2
        below = tl.load(positions_ptr + middle) < position
        row = tl.where(below, middle + 1, row)
        last = tl.maximum(tl.where(below, last, middle), row)
    return row


@triton.jit
def _copy(
    k_ptr, v_ptr, positions_ptr, cu_ptr, action_ptr, count_ptr, starts_ptr, listed_ptr,
    k_pack_ptr, v_pack_ptr, index_ptr, k_by_ptr, v_by_ptr, k_pack_by_ptr, v_pack_by_ptr,
    m, b, k_row, v_row, k_entry, v_entry, count_row, entries, indices,
    WIDTH: tl.constexpr, D: tl.constexpr, D_WIDTH: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Copy keys, values and positions of BLOCK entries of a head, which has no more of them than its sequence rows."""
    tile, head = tl.program_id(0), tl.program_id(1)
    s = sequence_at(cu_ptr, b, tile, BLOCK, OFFSETS)
    if s == b:
        return
    todo = tl.load(action_ptr + s)
    if (todo != CHOOSING) & ((todo != RENEWING) | (k_ptr is None)):
        return
    start, end = tl.load(cu_ptr + s), tl.load(cu_ptr + s + 1)
    first = (tile - start // BLOCK - s) * BLOCK
    count_ptr += s.to(tl.int64) * count_row
    size = tl.load(count_ptr + head)
    if (first >= size) | (start >= end):
        return
    other = tl.arange(0, WIDTH)
    entry = first + tl.arange(0, BLOCK)
    at = tl.load(starts_ptr + s) + tl.sum(tl.load(count_ptr + other, mask=other < head, other=0)) + entry
    live = (entry < size) & (at < entries)
    if todo == CHOOSING:
        row = tl.load(listed_ptr + head.to(tl.int64) * m + start + entry, mask=live, other=0)
        position = tl.load(positions_ptr + row, mask=live, other=0).to(tl.int32)
        tl.store(index_ptr + at, position, mask=live & (at < indices))
    else:
        position = tl.load(index_ptr + at, mask=live & (at < indices), other=-1)
        row = _rows_at(positions_ptr, position, start, end)
        live = live & (tl.load(positions_ptr + row) == position)
    if k_ptr is not None:
        d = tl.arange(0, D_WIDTH)
        inside = live[:, None] & (d < D)[None, :]
        source, target, column = row.to(tl.int64)[:, None], at.to(tl.int64)[:, None], d[None, :]
        key = tl.load(k_ptr + source * k_row + head * D + column, mask=inside)
        if k_pack_by_ptr is not None:
            key, by = _stored(key, k_by_ptr, row, head, inside, live)
            tl.store(k_pack_by_ptr + at, by, mask=live)
        tl.store(k_pack_ptr + target * k_entry + column, key, mask=inside)
        value = tl.load(v_ptr + source * v_row + head * D + column, mask=inside)
        if v_pack_by_ptr is not None:
            value, by = _stored(value, v_by_ptr, row, head, inside, live)
            tl.store(v_pack_by_ptr + at, by, mask=live)
        tl.store(v_pack_ptr + target * v_entry + column, value, mask=inside)


@triton.jit
def _stored(x, by_ptr, row, head, inside, live):
    """Vectors of `_copy` as a packed cache in float8 holds them, and their scales: as they came, or rounded now."""
    if by_ptr is not None:
        return x, tl.load(by_ptr + row.to(tl.int64) * tl.num_programs(1) + head, mask=live)
    else:
        return quantised(tl.where(inside, x, 0.0).to(tl.float32))
