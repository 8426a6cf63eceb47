"""dgraph::kv_votes on CUDA.

Four kernels, and two passes over the keys:

 1. per sequence: its voters, which are neighbours among its rows, and the number of keys that each of them sees;
 2. the log of the sum of the weights, for tiles of voters and shares of the keys. The query heads of a KV head are
    stacked with the voters as rows of one matrix;
 3. the shares of these sums, added up in order;
 4. per tile of keys: the weights of all voters, added up in order. Keys are the rows of this matrix, so that the sum
    over voters stays within a row.

The number of voters is known on the device alone. So in the second and third kernel as many programs as run at a time
share the tiles. Few voters get many shares of the keys. A tile of keys without voters ends at once.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.ops.attention.sparse import SELECT
from dgraph.ops.attention.triton.attention_tiling import multiprocessors
from dgraph.ops.kv.triton.scales import check_scales
from dgraph.ops.padded import check_heads
from dgraph.ops.triton.rows import dense_rows, offsets_block, power_of_two, sequence_at

CHUNK = 512
LEAST_TILES = 64


@dataclass(frozen=True)
class Tiling:
    """Sizes of the launches.

    Attributes:
        block_m: rows of the stacked matrix of a tile of the first pass; a tile holds block_m // (Hq / Hkv) voters.
        block_n: keys per iteration of the first pass.
        keys: keys of a tile of the second pass.
        block_v: rows of the stacked matrix per iteration of the second pass.
        warps, stages: warps and pipeline stages of both passes.
        resident: programs of the first pass on a multiprocessor.
    """

    block_m: int
    block_n: int
    keys: int
    block_v: int
    warps: int
    stages: int
    resident: int = 2


def tiling_for(n: int, b: int, group: int, d: int, itemsize: int) -> Tiling:
    """The tiling for n query rows of b sequences, `group` query heads per KV head."""
    least = power_of_two(group, 16)
    if itemsize > 2:  # products of fp32 run outside of the matrix units, and take many registers
        return Tiling(max(32, least), 32, 32, max(16, least), 4, 1)
    block_m = max(power_of_two(-(-n // max(b, 1)) * group, 16, 128), least)
    # Two programs fit on a multiprocessor: the one's products run next to the other's exponentials.
    warps, stages = (8 if block_m >= 128 else 4), (3 if power_of_two(d, 16) <= 128 else 2)
    return Tiling(block_m, 64, 128, max(min(block_m, 64), least), warps, stages)


def kernel(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    key_positions: Tensor,
    cu_rows: Tensor,
    cu_keys: Tensor,
    limit: Tensor,
    window: Tensor,
    action: Tensor,
    scale: float,
    first: int,
    last: int,
    k_scale: Tensor | None = None,
    first_quarters: int = 0,
    last_quarters: int = 4,
    tiling: Tiling | None = None,
) -> Tensor:
    """dgraph::kv_votes; see its contract. `tiling` overrides the sizes chosen for the shape."""
    check_heads("kv_votes", q, k, 1)
    check_scales("kv_votes", k=(k, k_scale))
    (n, heads, d), (m, kv_heads, _), b = q.shape, k.shape, cu_rows.shape[0] - 1
    out = torch.empty((m, kv_heads), dtype=torch.float32, device=k.device)
    if not out.numel():
        return out
    if not n or not b:
        return out.fill_(0)
    group, width = heads // kv_heads, power_of_two(d, 16)
    tiling = tiling or tiling_for(n, b, group, d, q.element_size())
    rows = tiling.block_m // group
    q, k = dense_rows(q), dense_rows(k)
    voters = torch.empty((2, b), dtype=torch.int32, device=q.device)
    seen = torch.empty(n, dtype=torch.int32, device=q.device)
    _find[(b,)](
        positions.contiguous(), key_positions.contiguous(), cu_rows, cu_keys, limit.contiguous(),
        window.contiguous(), action, voters, seen, b, max(n, m).bit_length(), first, last,
        first_quarters, last_quarters, SELECT, CHUNK, num_warps=4,
    )  # fmt: skip
    # Room for every row to vote; where few do, the room is for shares of the keys.
    room = max(n // rows + b, LEAST_TILES)
    part, mass = torch.empty((2, kv_heads, room, tiling.block_m), dtype=torch.float32, device=q.device).unbind()
    programs = tiling.resident * multiprocessors(q.device)
    sizes = (
        q.stride(0), k.stride(0), scale * math.log2(math.e), group, kv_heads, d, width, rows, tiling.block_m,
        power_of_two(b, 16), tiling.stages, "ieee" if q.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    _weigh[(programs,)](
        q, k, cu_keys, voters, seen, part, k_scale, b, room, *sizes, tiling.block_n, num_warps=tiling.warps
    )
    _add_up[(min(programs, room * kv_heads),)](
        voters, part, mass, b, room, programs, kv_heads, rows, tiling.block_m, power_of_two(b, 16), num_warps=4
    )
    _vote[(kv_heads, b + 1 + m // tiling.keys)](
        q, k, cu_keys, voters, seen, mass, out, k_scale, m, b, room, *sizes,
        tiling.keys, tiling.block_v // group, tiling.block_v, offsets_block(b), num_warps=tiling.warps,
    )  # fmt: skip
    return out


@triton.jit
def lower_bound(values_ptr, count, bound, steps):
    """Count the values below each of `bound`, among `count` ascending ones; `steps` exceeds the log2 of `count`."""
    low = tl.zeros(bound.shape, tl.int32)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        apart = low < high
        below = apart & (tl.load(values_ptr + middle, mask=apart, other=0) < bound)
        high = tl.where(apart & (below == 0), middle, high)
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def rows_between(positions_ptr, cu_ptr, s, low, high, steps):
    """The rows [first, last) of sequence s whose positions lie in [low, high)."""
    start = tl.load(cu_ptr + s)
    side = tl.arange(0, 2)
    at = lower_bound(positions_ptr + start, tl.load(cu_ptr + s + 1) - start, tl.where(side == 0, low, high), steps)
    first, last = tl.sum(tl.where(side == 0, at, 0)), tl.sum(tl.where(side == 1, at, 0))
    return start + first, start + tl.maximum(first, last)


@triton.jit
def _find(
    positions_ptr, key_positions_ptr, cu_ptr, cu_keys_ptr, limit_ptr, window_ptr, action_ptr, voters_ptr, seen_ptr,
    b, steps, first, last, first_quarters: tl.constexpr, last_quarters: tl.constexpr, WANTED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """voters[:, s] = first voter of sequence s, and how many; seen[row] = the number of keys that a voter sees."""
    s = tl.program_id(0)
    if tl.load(action_ptr + s) != WANTED:
        tl.store(voters_ptr + s, 0)
        tl.store(voters_ptr + b + s, 0)
        return
    low = tl.load(window_ptr + 2 * s).to(tl.int64)
    begin, end = rows_between(positions_ptr, cu_ptr, s, low + first, low + last, steps)
    rows = end - begin
    begin, end = begin + first_quarters * rows // 4, begin + last_quarters * rows // 4
    tl.store(voters_ptr + s, begin)
    tl.store(voters_ptr + b + s, end - begin)
    start = tl.load(cu_keys_ptr + s)
    count = tl.load(cu_keys_ptr + s + 1) - start
    for at in range(begin, end, CHUNK):
        row = at + tl.arange(0, CHUNK)
        limit = tl.load(limit_ptr + row, mask=row < end, other=0)
        tl.store(seen_ptr + row, lower_bound(key_positions_ptr + start, count, limit, steps), mask=row < end)


@triton.jit
def _tiles(voters_ptr, b, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Number of tiles of voters of each sequence, [SEQUENCES]."""
    i = tl.arange(0, SEQUENCES)
    return tl.cdiv(tl.load(voters_ptr + b + i, mask=i < b, other=0), ROWS)


@triton.jit
def _shares(tiles, room, programs, KV_HEADS: tl.constexpr):
    """Shares of the keys: two units of work for each program, if there is room."""
    some = tl.maximum(tiles, 1)
    return tl.maximum(tl.minimum(2 * programs // (some * KV_HEADS), room // some), 1)


@triton.jit
def _weigh(
    q_ptr, k_ptr, cu_keys_ptr, voters_ptr, seen_ptr, part_ptr, k_scale_ptr, b, room, q_row, k_row, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, SEQUENCES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """part[head, share * tiles + tile] = log2 of the sum of 2 ** score over a share of the keys; -inf for no key."""
    i, m, n, d = tl.arange(0, SEQUENCES), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    own = _tiles(voters_ptr, b, ROWS, SEQUENCES)
    ends = tl.cumsum(own, 0)
    tiles = tl.sum(own)
    shares = _shares(tiles, room, tl.num_programs(0), KV_HEADS)
    for unit in range(tl.program_id(0), tiles * KV_HEADS * shares, tl.num_programs(0)):
        work = tl.full([], unit, tl.int32)
        tile, head, split = work % tiles, work // tiles % KV_HEADS, work // tiles // KV_HEADS
        s = tl.sum((ends <= tile).to(tl.int32))
        begin = tl.load(voters_ptr + s)
        end = begin + tl.load(voters_ptr + b + s)
        row = begin + (tile - tl.sum(tl.where(i < s, own, 0))) * ROWS + m // GROUP
        live = (m // GROUP < ROWS) & (row < end)
        seen = tl.load(seen_ptr + row, mask=live, other=0)
        q_at = row.to(tl.int64)[:, None] * q_row + ((head * GROUP + m % GROUP) * D)[:, None] + d[None, :]
        q = tl.load(q_ptr + q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        longest = tl.max(seen)
        share = tl.cdiv(tl.cdiv(longest, BLOCK_N), shares) * BLOCK_N
        k_start = k_ptr + tl.load(cu_keys_ptr + s).to(tl.int64) * k_row + head * D
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        first, last = split * share, tl.minimum(split * share + share, longest)
        for key in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            k_at = (key + n).to(tl.int64)[None, :] * k_row + d[:, None]
            k = tl.load(k_start + k_at, mask=(key + n < longest)[None, :] & (d < D)[:, None], other=0.0)
            if k_scale_ptr is not None:
                by = k_scale_ptr + (tl.load(cu_keys_ptr + s) + key + n).to(tl.int64) * KV_HEADS + head
                k_by = tl.load(by, mask=key + n < longest, other=0.0).to(tl.float32)
                score = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * k_by[None, :] * scale
            else:
                score = tl.dot(q, k, input_precision=PRECISION) * scale
            score = tl.where((key + n)[None, :] < seen[:, None], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # a voter may see nothing so far
            total = total * tl.exp2(top - base) + tl.sum(tl.exp2(score - base[:, None]), 1)
            top = higher
        found = top + tl.log2(tl.where(total > 0, total, 1.0))
        tl.store(part_ptr + (head * room + split * tiles + tile) * BLOCK_M + m, found)


@triton.jit
def _add_up(
    voters_ptr, part_ptr, mass_ptr, b, room, programs,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """mass[head, tile] = log2 of the sum of 2 ** part over the shares, which are those of `programs` programs."""
    m = tl.arange(0, BLOCK_M)
    tiles = tl.sum(_tiles(voters_ptr, b, ROWS, SEQUENCES))
    shares = _shares(tiles, room, programs, KV_HEADS)
    for unit in range(tl.program_id(0), tiles * KV_HEADS, tl.num_programs(0)):
        work = tl.full([], unit, tl.int32)
        at = (work // tiles * room + work % tiles) * BLOCK_M + m
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for split in range(shares):
            part = tl.load(part_ptr + split * tiles * BLOCK_M + at)
            higher = tl.maximum(top, part)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(top - base) + tl.exp2(part - base)
            top = higher
        tl.store(mass_ptr + at, top + tl.log2(tl.where(total > 0, total, 1.0)))


@triton.jit
def _vote(
    q_ptr, k_ptr, cu_keys_ptr, voters_ptr, seen_ptr, mass_ptr, out_ptr, k_scale_ptr, keys, b, room, q_row, k_row, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, SEQUENCES: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, VOTERS: tl.constexpr, BLOCK_V: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """out[key, head] = the sum of 2 ** (score - mass) over the voters that see the key, and over the heads."""
    head, tile = tl.program_id(0), tl.program_id(1)
    i, m, n, d = tl.arange(0, SEQUENCES), tl.arange(0, BLOCK_V), tl.arange(0, KEYS), tl.arange(0, WIDTH)
    s = sequence_at(cu_keys_ptr, b, tile, KEYS, OFFSETS)
    start = tl.load(cu_keys_ptr + s)
    end = tl.load(cu_keys_ptr + s + 1, mask=s < b, other=keys)
    key = start + (tile - start // KEYS - s) * KEYS + n
    out_at = key.to(tl.int64) * KV_HEADS + head
    count = tl.load(voters_ptr + b + s, mask=s < b, other=0)
    if count == 0:
        tl.store(out_ptr + out_at, tl.zeros([KEYS], tl.float32), mask=key < end)
        return
    begin = tl.load(voters_ptr + s)
    before = tl.sum(tl.where(i < s, _tiles(voters_ptr, b, ROWS, SEQUENCES), 0))
    k_at = key.to(tl.int64)[:, None] * k_row + head * D + d[None, :]
    k = tl.load(k_ptr + k_at, mask=(key < end)[:, None] & (d < D)[None, :], other=0.0)
    if k_scale_ptr is not None:
        k = k.to(q_ptr.dtype.element_ty)
        k_by = tl.load(k_scale_ptr + out_at, mask=key < end, other=0.0).to(tl.float32)
    mass_ptr += (head * room + before) * BLOCK_M
    votes = tl.zeros([KEYS], tl.float32)
    for at in tl.range(0, count, VOTERS, num_stages=STAGES):
        voter = at + m // GROUP
        row, live = begin + voter, (m // GROUP < VOTERS) & (voter < count)
        q_at = row.to(tl.int64)[None, :] * q_row + ((head * GROUP + m % GROUP) * D)[None, :] + d[:, None]
        q = tl.load(q_ptr + q_at, mask=live[None, :] & (d < D)[:, None], other=0.0)
        seen = tl.load(seen_ptr + row, mask=live, other=0)
        mass = tl.load(mass_ptr + voter // ROWS * BLOCK_M + voter % ROWS * GROUP + m % GROUP, mask=live, other=0.0)
        score = tl.dot(k, q, input_precision=PRECISION)
        if k_scale_ptr is not None:
            score = score * k_by[:, None]
        weight = tl.exp2(score * scale - mass[None, :])
        votes += tl.sum(tl.where((key - start)[:, None] < seen[None, :], weight, 0.0), 1)
    tl.store(out_ptr + out_at, votes / GROUP, mask=key < end)
