"""Sizes of the launches of paged_attention, by shape; other attentions derive theirs from these."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dgraph.ops.attention.triton import attention_float8
from dgraph.ops.attention.triton.attention_roles import HEAD_DIM, KEYS, ROWS
from dgraph.ops.triton.rows import power_of_two

MANY = 1024
"""Least rows of a sequence for which wider tiles pay."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of one launch.

    Attributes:
        block_m: rows of the stacked matrix of a tile; a tile holds block_m // (Hq / Hkv) rows.
        block_n: keys per iteration.
        splits: shares of the keys.
        warps, stages: warps and pipeline stages of the attention kernel.
        bulk: load keys with the bulk copy engine where layout and device allow.
        roles: give loading and multiplying to warps of their own, in tiles of their own, where layout, dtype and device
            allow (`attention_roles`, `attention_float8`); the sizes are for where they do not, the shares for both.
        parts: programs that a head's values are divided among; each computes all scores.
    """

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int
    bulk: bool = True
    roles: bool = False
    parts: int = 1


def widest_tile(n: int, b: int, heads: tuple[int, int], multiprocessors: int) -> int:
    """Stacked rows of a tile that takes as many rows of a sequence as fit, for n rows of b sequences."""
    group, kv_heads = heads[0] // heads[1], heads[1]
    block_m = power_of_two(-(-n // max(b, 1)) * group, 16, 128)
    if block_m == 128 and 4 * b * kv_heads <= multiprocessors:
        block_m = 64  # few sequences: twice the programs
    return max(block_m, power_of_two(group))


def tiling_for(
    n: int,
    b: int,
    heads: tuple[int, int],
    d: int,
    page: int,
    keys: int,
    itemsize: int,
    multiprocessors: int,
    block_m: int | None = None,
    stored: int | None = None,
) -> Tiling:
    """Choose the tiling for a shape: n rows of b sequences, `heads` query and KV heads, at most `keys` keys a sequence.

    Block sizes are the best of those measured on an H200 with D = 128 at the clocks of a long run
    (benchmarks/results/kernels.md). A tile of 64 stacked rows is the smallest that the matrix units take whole. Two of
    them fit on a multiprocessor, and one computes while the other waits. It has room for the sequences of a ragged
    batch that have more rows than others. Narrower tiles pay where a sequence has hardly a row, wider ones, which read
    the keys less often, where it has a thousand. Where rows fill the tile of warps with roles of their own, and tiles
    the device, these are faster than either.

    For heads wider than 128 and sequences of more than 64 stacked rows, some 30 tiles were timed on an H200 in bf16.
    The ones here are the best, or within 3 % of it. The shapes were DiffusionGemma's layers: heads of 256 and 512, 256
    rows of 1, 8 and 32 sequences. The values of heads of 512 are divided into two parts. Sums of 128 rows by 512 do not
    fit into registers, and the second computation of the scores costs less. Other tiles of wide heads are such that one
    fits, and its sums in registers; these were not timed.

    Over keys in float8 a tile has at most 64 stacked rows and 64 keys, and 32 rows where a single sequence has no more.
    Some 20 tiles with bulk copies were timed on an H200 with D = 128. The shapes were 32 rows of one sequence, 9 and 32
    of 64 and 256. The ones here are the best or within 2 % of it. Warps with roles of their own take tiles of 64 rows
    there, for any number of rows. Adding up a share of one sequence takes about as long as they take for half a block
    of keys. Writing and reading its sums, 128 KB of numbers, takes another half.

    block_m: stacked rows of a tile, for kernels whose tiles have no parts; default: as above.
    stored: bytes of a number of keys and values; default: `itemsize`, that of queries.
    """
    group, kv_heads, width = heads[0] // heads[1], heads[1], power_of_two(d, 16)
    per_sequence = -(-n // max(b, 1))
    # The bulk copy engine reads from one page; so a small page bounds the keys that an iteration takes.
    most = next((size for size in (128, 64, 32) if page % size == 0), 0)
    wide = block_m is None and itemsize <= 2 and width > 128 and most > 0 and group <= 128 and per_sequence * group > 64
    roles, parts = False, 1
    if block_m is None and itemsize > 2:
        block_m = widest_tile(n, b, heads, multiprocessors)
    elif block_m is None:
        block_m = 16 if 2 * per_sequence * group <= 16 else 64 if per_sequence < MANY or stored == 1 else 128
        if stored == 1 and b == 1 and width <= 128:
            block_m = min(block_m, power_of_two(per_sequence * group, 32))
        block_m = max(block_m, power_of_two(group))
        tiles = max(b, 1) * (per_sequence * group // ROWS) * kv_heads
        roles = d == HEAD_DIM and page % KEYS == 0 and group <= ROWS and tiles >= multiprocessors
        if stored == 1:
            roles = d == HEAD_DIM and page % attention_float8.KEYS == 0 and group <= attention_float8.ROWS
    bulk, stages = True, 5
    if itemsize > 2:  # products of fp32 run outside of the matrix units, and take many registers
        block_m, block_n, warps, stages = max(min(block_m, 32), power_of_two(group)), 32, 4, 1
    elif not most:
        block_n, warps, stages, bulk = (64, 8, 3, False) if block_m >= 128 else (128, 4, 3, False)
    elif block_m >= 128:
        block_n, warps = most, 4 if most == 32 else 8
    else:
        block_n, warps = 32 if block_m == 16 else min(most, 64), 4
    if stored == 1:  # more keys, converted, do not fit into registers
        block_n = min(block_n, 64)
    if width > 128:
        block_n, stages = min(block_n, 32), min(stages, 3)
    if width > 256 and itemsize <= 2:  # of 128 stacked rows the queries alone are half of a multiprocessor's memory
        block_m, warps, stages = max(min(block_m, 64), power_of_two(group)), 8, 2
    if wide:
        block_m, block_n, warps, stages, parts = 128, min(most, 64), 8, 2, 2 if width > 256 else 1
    eight, adding = roles and stored == 1, (1 + n * heads[0] * d / (1 << 17)) / 2
    rows = (attention_float8.ROWS if eight else block_m) // group
    programs = max(b, 1) * -(-per_sequence // max(rows, 1)) * kv_heads * parts
    if parts > 1:  # beside the queries there is room for 64 keys of one iteration, or 32 of two
        block_n, stages = (64, 1) if block_n == 64 and programs >= multiprocessors else (32, 2)
    room = multiprocessors * (1 if warps == 8 else 2)

    def cost(splits: int) -> float:
        """Rounds of programs, and the shares that must be added up."""
        rounds = -(-programs * splits // room)
        if eight:
            return rounds * -(-keys // (attention_float8.KEYS * splits)) + (splits > 1) * splits * adding
        return rounds / splits * (10 + splits)

    splits = min(range(1, max(1, min(16, keys // 128)) + 1), key=cost)
    return Tiling(block_m, block_n, splits, warps, stages, bulk, roles, parts)


def share_bytes(
    q: torch.Size, b: int, kv_heads: int, page: int, keys: int, itemsize: int, stored: int, device: torch.device
) -> int:
    """Bytes of the shares of the keys that are added up under the tiling for a shape: sums and masses, in fp32."""
    (n, heads, d), cores = q, multiprocessors(device)
    splits = tiling_for(n, b, (heads, kv_heads), d, page, keys, itemsize, cores, stored=stored).splits
    return 4 * splits * n * heads * (d + 1) if splits > 1 else 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a device; 4 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
