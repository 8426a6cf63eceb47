"""Products by quantised weights on Hopper GPUs, by warps with roles of their own (see product_roles.py).

One warp loads boxes of x and of the stored weight into a ring. Eight convert stored numbers to bf16, in the registers
from which the matrix units read their left factor, and multiply. The word that holds a number decides which thread has
it, and so its place along the inner dimension. Four more warps put x into the order of these places.

128 values along the inner dimension are a unit. A group of 4-bit numbers that has a scale is at least that long. So
sums of a unit are scaled, or those of all units. An iteration has 128 bytes of each row of the weight: of 4-bit numbers
two units. A tile has 128 rows of the weight, of a pair 64 of gate and as many of up. Tiles that would leave a part of
the device idle are shared (product_shares.py).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dgraph.families.quantised import QuantisedWeight
from dgraph.ops.attention.triton.attention_tiling import multiprocessors
from dgraph.ops.counters import zeros
from dgraph.ops.products.triton import stored
from dgraph.ops.products.triton.product import _live_rows
from dgraph.ops.products.triton.product_roles import (
    LOADING,
    WARPS,
    _is_last,
    _layout,
    _next,
    _sum,
    _write_share,
)
from dgraph.ops.products.triton.product_shares import _division, _piece, _pieces
from dgraph.ops.products.triton.stored import OF_GROUPS, OF_NUMBERS, SHARES, Layout
from dgraph.ops.products.triton.words import FP8, INT4, _from_fp8, _from_int4, _from_int8
from dgraph.ops.triton.hopper import in_bulk, layout_of, understood
from dgraph.ops.triton.rows import start_of, wait

COLUMNS, DEPTH, BYTES = gl.constexpr(128), gl.constexpr(128), gl.constexpr(128)
"""Rows of the weight that a tile has, values along the inner dimension of a unit, and bytes of an iteration."""
HIGH, HALF = gl.constexpr(64), gl.constexpr(64)
"""Rows of a box, and values of one of x: 128 bytes."""
TURNING, REGISTERS = gl.constexpr(4), gl.constexpr(56)
"""Warps that put x in order, and registers of a thread of theirs."""
SIDE = gl.constexpr(8)
"""Tiles over rows next to each other."""
AHEAD = gl.constexpr(4)
"""Units by which the load of a scale is ahead of its use, as many as `_scales` names."""
INT4_WORDS, FP8_WORDS = gl.constexpr(INT4), gl.constexpr(FP8)
ROWS = (16, 32, 64)
"""Rows of tiles; the fewest that hold all rows are taken, or 64."""
FEW, MOST_ROWS = 32, 256
"""Rows up to which numbers of 8 bits are multiplied as fast by the kernel of stored.py, and rows for which this one is
taken; for more of them a weight is dequantised first (benchmarks/results/quantised.md).
"""
HELD, STAGES = 208 * 1024, 8
"""Bytes of shared memory for the ring, and its stages at most."""


def taken(weight: Tensor | QuantisedWeight, x: Tensor) -> Tensor | QuantisedWeight:
    """Weight as the product of rows x [N, columns] takes it: dequantised if neither kernel is fast."""
    if isinstance(weight, QuantisedWeight) and _fits(x, weight, Layout.of(weight, DEPTH.value, x.dtype)):
        return weight
    return stored.taken(weight, x)


def launch(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, cu_rows: Tensor | None, pair: bool = False
) -> Tensor:  # fmt: skip
    """Multiply x [N, d_in] by a quantised weight as `stored.launch` does, by whichever kernel is faster."""
    of = Layout.of(weight, DEPTH.value, x.dtype)
    if not _fits(x, weight, of):
        return stored.launch(x, weight, bias, cu_rows, pair)
    return in_roles(x, weight, of, bias, cu_rows, pair)


def _fits(x: Tensor, weight: QuantisedWeight, of: Layout) -> bool:
    """True if the kernel in roles takes rows x and a weight, and is faster."""
    few = 0 if of.words == INT4 else FEW
    if not few < len(x) <= MOST_ROWS or not x.shape[1] or not weight.shape[0]:
        return False
    if not of.words or of.scaled == OF_NUMBERS or not understood(x.device):
        return False
    return in_bulk(x) and in_bulk(weight.values)


def in_roles(
    x: Tensor, weight: QuantisedWeight, of: Layout, bias: Tensor | None, cu_rows: Tensor | None, pair: bool
) -> Tensor:  # fmt: skip
    """Multiply by warps in roles.

    Args:
        x, weight: in bf16; without zeros, with scales of rows or of whole iterations; both as the copy engine reads.
        of: layout of the weight for iterations of `DEPTH` values; it has words.
    """
    (n, d_in), d_out = x.shape, weight.shape[0] // 2 if pair else weight.shape[0]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    rows = next((size for size in ROWS if n <= size), ROWS[-1])
    units = 2 if of.words == INT4 else 1
    values = weight.values.view(torch.uint8)
    x_boxes, w_boxes = (
        TensorDescriptor(t, list(t.shape), list(t.stride()), box, layout_of(t.element_size()))
        for t, box in ((x, [rows, HALF.value]), (values, [HIGH.value, BYTES.value]))
    )
    programs = multiprocessors(x.device)
    part, ended = x.new_empty((2 * programs, rows * COLUMNS.value), dtype=torch.float32), zeros(programs, x.device)
    stages = min(HELD // (units * 2 * rows * DEPTH.value + COLUMNS.value * BYTES.value), STAGES)
    _multiply_stored_in_roles[(programs,)](
        x_boxes, w_boxes, out if bias is None else bias, out, part, ended, of.scales,
        out if cu_rows is None else cu_rows, 0 if cu_rows is None else cu_rows.shape[0] - 1,
        n, d_out, d_in, of.scales.stride(0), rows, SHARES, stages, units, programs, of.words, of.high,
        of.group if of.scaled == OF_GROUPS else 0, cu_rows is not None, bias is not None, pair,
        num_warps=WARPS.value, **start_of(x.device),
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["b", "n"])
def _multiply_stored_in_roles(
    x_boxes, w_boxes, bias_ptr, out_ptr, part_ptr, ended_ptr, scale_ptr, cu_ptr, b, n, d_out, d_in, scale_row,
    ROWS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr, PROGRAMS: gl.constexpr,
    WORDS: gl.constexpr, OF: gl.constexpr, GROUP: gl.constexpr, COUNTED: gl.constexpr, BIAS: gl.constexpr,
    PAIR: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Multiply in roles.

    UNITS: units of an iteration. WORDS: kind of numbers in words of the weight. OF: rows of the weight that share a
    scale. GROUP: columns that do; 0: all. SPLITS: most shares of a tile.
    """
    x_held = gl.allocate_shared_memory(x_boxes.dtype, [STAGES * UNITS, ROWS, DEPTH], x_boxes.layout)
    w_held = gl.allocate_shared_memory(w_boxes.dtype, [STAGES * 2, HIGH, BYTES], w_boxes.layout)
    came = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turned = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(came.index(i), count=1)
        mbarrier.init(turned.index(i), count=1)
        mbarrier.init(used.index(i), count=1)
    fence_async_shared()
    wait(EARLY)
    rows = _live_rows(cu_ptr, b, n) if COUNTED else n
    ring, sizes = (x_held, w_held, came, turned, used), (rows, d_out, d_in)
    pointers = (bias_ptr, out_ptr, part_ptr, ended_ptr, scale_ptr)
    gl.warp_specialize(
        [
            (
                _multiply_stages,
                (pointers, ring, sizes, scale_row, SPLITS, UNITS, PROGRAMS, WORDS, OF, GROUP, BIAS, PAIR),
            ),
            (_turn_rows, (ring, sizes, SPLITS, UNITS, PROGRAMS, WORDS, PAIR)),
            (_load_stages, (x_boxes, w_boxes, ring, sizes, SPLITS, UNITS, PROGRAMS, PAIR)),
        ],
        [TURNING, 1],
        [REGISTERS, LOADING],
    )


@gluon.jit
def _work(
    sizes, ROWS: gl.constexpr, SPLITS: gl.constexpr, UNITS: gl.constexpr, PROGRAMS: gl.constexpr, PAIR: gl.constexpr
):  # fmt: skip
    """Division of the tiles, and numbers of a program's whole tiles and of its pieces."""
    rows, d_out, d_in = sizes
    WIDE: gl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    division = _division(rows, d_out, d_in, ROWS, WIDE, DEPTH * UNITS, PROGRAMS, SPLITS, True)
    mine, pieces = _pieces(division, PROGRAMS, True)
    return division, mine, pieces


@gluon.jit
def _load_stages(
    x_boxes, w_boxes, ring, sizes,
    SPLITS: gl.constexpr, UNITS: gl.constexpr, PROGRAMS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Load boxes of a program's pieces into the ring."""
    x_held, w_held, came, _turned, used = ring
    d_out = sizes[1]
    STAGES: gl.constexpr = came.shape[0]
    ROWS: gl.constexpr = x_held.shape[1]
    WIDE: gl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    halves = x_held._reinterpret(x_held.dtype, [STAGES * UNITS * 2, ROWS, HALF], x_held.layout)
    division, mine, pieces = _work(sizes, ROWS, SPLITS, UNITS, PROGRAMS, PAIR)
    stage, turn = gl.to_tensor(0), gl.to_tensor(1)
    for i in range(0, pieces):
        r, c, first, last, _share = _piece(i, mine, division, PROGRAMS, SIDE, True)
        for k in range(first, last):
            arrived = came.index(stage)
            mbarrier.wait(used.index(stage), turn)
            mbarrier.expect(arrived, UNITS * 2 * ROWS * DEPTH + COLUMNS * BYTES)
            for j in gl.static_range(2):
                at = c * WIDE + j * HIGH
                if PAIR and j == 1:
                    at = c * WIDE + d_out
                tma.async_copy_global_to_shared(w_boxes, [at, k * BYTES], arrived, w_held.index(stage * 2 + j))
            for h in gl.static_range(2 * UNITS):
                box, at = halves.index(stage * (2 * UNITS) + h), (k * (2 * UNITS) + h) * HALF
                tma.async_copy_global_to_shared(x_boxes, [r * ROWS, at], arrived, box)
            stage, turn = _next(stage, turn, STAGES)


@gluon.jit
def _turn_rows(
    ring, sizes,
    SPLITS: gl.constexpr, UNITS: gl.constexpr, PROGRAMS: gl.constexpr, WORDS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Put x into the order of the places that numbers get, in place."""
    x_held, _w_held, came, turned, _used = ring
    STAGES: gl.constexpr = came.shape[0]
    ROWS: gl.constexpr = x_held.shape[1]
    some: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [TURNING, 1], [1, 0])
    division, mine, pieces = _work(sizes, ROWS, SPLITS, UNITS, PROGRAMS, PAIR)
    stage, turn = gl.to_tensor(0), gl.to_tensor(0)
    for i in range(0, pieces):
        _r, _c, first, last, _share = _piece(i, mine, division, PROGRAMS, SIDE, True)
        for _k in range(first, last):
            mbarrier.wait(came.index(stage), turn)
            for u in gl.static_range(UNITS):
                here = x_held.index(stage * UNITS + u)
                x = here.load(some)
                if WORDS == INT4_WORDS:
                    x = x.reshape([ROWS, 4, 4, 2, 4]).permute((0, 2, 4, 1, 3))
                else:
                    x = x.reshape([ROWS, 2, 4, 4, 2, 2]).permute((0, 1, 3, 5, 2, 4))
                here.store(x.reshape([ROWS, DEPTH]))
            fence_async_shared()
            mbarrier.arrive(turned.index(stage))
            stage, turn = _next(stage, turn, STAGES)


@gluon.jit
def _scales(own_ptr, first, last, GROUP: gl.constexpr):
    """Scales of each row of the weight in the AHEAD units that are loaded ahead."""
    if GROUP > 0:
        found = (
            gl.load(own_ptr + gl.minimum(first, last - 1) * DEPTH // GROUP),
            gl.load(own_ptr + gl.minimum(first + 1, last - 1) * DEPTH // GROUP),
            gl.load(own_ptr + gl.minimum(first + 2, last - 1) * DEPTH // GROUP),
            gl.load(own_ptr + gl.minimum(first + 3, last - 1) * DEPTH // GROUP),
        )
    else:
        found = (first, first, first, first)
    return found


@gluon.constexpr_function
def _of_words():
    """Layout of words [128, 32]: a thread has the words of its part of a left factor, 16 bytes at a time."""
    registers, lanes = [[0, 1], [0, 2], [0, 16], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]], [], [128, 32])


@gluon.jit
def _numbers(word, layout: gl.constexpr, WORDS: gl.constexpr):
    """Left factor, bf16 [128, 128], of the numbers of words i32 [128, 16] or [128, 32].

    The words that threads have decide the places of the numbers, so that none changes its thread.
    """
    if WORDS == INT4_WORDS:
        n = _from_int4(word.reshape([COLUMNS, 4, 4]))
        even, odd = gl.join(gl.join(n[0], n[1]), gl.join(n[4], n[5])), gl.join(gl.join(n[2], n[3]), gl.join(n[6], n[7]))
        found = gl.join(even, odd)  # row, thread, word, half of a register, and two of which register
        found = found.permute((0, 2, 4, 5, 1, 3))
    else:
        if WORDS == FP8_WORDS:
            n = _from_fp8(word.reshape([COLUMNS, 2, 4, 4]))
        else:
            n = _from_int8(word.reshape([COLUMNS, 2, 4, 4]))
        found = gl.join(gl.join(n[0], n[1]), gl.join(n[2], n[3]))
        found = found.permute((0, 1, 3, 5, 2, 4))
    return gl.convert_layout(found.reshape([COLUMNS, DEPTH]), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _multiply_stages(
    pointers, ring, sizes, scale_row,
    SPLITS: gl.constexpr, UNITS: gl.constexpr, PROGRAMS: gl.constexpr, WORDS: gl.constexpr, OF: gl.constexpr,
    GROUP: gl.constexpr, BIAS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Multiply stages of the ring; numbers of the next unit become bf16 while the matrix units multiply."""
    x_held, w_held, came, turned, used = ring
    rows, d_out, d_in = sizes
    STAGES: gl.constexpr = came.shape[0]
    ROWS: gl.constexpr = x_held.shape[1]
    WIDE: gl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    SHAPE: gl.constexpr = (COLUMNS, ROWS)
    layout: gl.constexpr = _layout(SHAPE, 16)
    whole: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=BYTES, element_bitwidth=32, rank=2)
    words = w_held._reinterpret(gl.int32, [STAGES, COLUMNS, BYTES // 4], whole)
    SIZE: gl.constexpr = ROWS * COLUMNS
    division, mine, pieces = _work(sizes, ROWS, SPLITS, UNITS, PROGRAMS, PAIR)
    stage, turn = gl.to_tensor(0), gl.to_tensor(0)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    for i in range(0, pieces):
        r, c, first, last, share = _piece(i, mine, division, PROGRAMS, SIDE, True)
        row = gl.minimum(c * WIDE + column % WIDE, d_out - 1) + column // WIDE * d_out
        own_ptr = pointers[4] + (row // OF).to(gl.int64) * scale_row
        end = gl.minimum(last * UNITS, gl.cdiv(d_in, DEPTH))
        coming = _scales(own_ptr, first * UNITS, end, GROUP)
        acc = gl.zeros(SHAPE, gl.float32, layout)
        word = _words_of(words, came, stage, turn, UNITS)
        numbers = _numbers(word[0], layout, WORDS)
        for start in range(first, last, AHEAD // UNITS):
            now = coming
            coming = _scales(own_ptr, start * UNITS + AHEAD, end, GROUP)
            for j in gl.static_range(AHEAD // UNITS):
                if start + j < last:
                    mbarrier.wait(turned.index(stage), turn)
                    following, then = _next(stage, turn, STAGES)
                    for u in gl.static_range(UNITS):
                        b = x_held.index(stage * UNITS + u).permute((1, 0))
                        if GROUP > 0:
                            part = warpgroup_mma(
                                numbers, b, gl.zeros(SHAPE, gl.float32, layout), use_acc=False, is_async=True
                            )
                        else:
                            part = warpgroup_mma(numbers, b, acc, is_async=True)
                        if u + 1 < UNITS:
                            numbers = _numbers(word[u + 1], layout, WORDS)
                        elif start + j + 1 < last:
                            word = _words_of(words, came, following, then, UNITS)
                            numbers = _numbers(word[0], layout, WORDS)
                        part = warpgroup_mma_wait(0, deps=(part,))
                        acc = acc + part * gl.expand_dims(now[j * UNITS + u], 1) if GROUP > 0 else part
                    mbarrier.arrive(used.index(stage))
                    stage, turn = following, then

        complete = last - first == division[2]
        if not complete:
            _write_share(pointers[2], share, acc, 0, SIZE)
            complete = _is_last(pointers[3], share)
            if complete:
                acc = _sum(pointers[2], share, acc, 0, SIZE)
        if complete:
            where = (r * ROWS, c * WIDE, rows, d_out)
            SHARED: gl.constexpr = 0 if GROUP > 0 else OF  # rows of the weight whose scale is still to come
            if PAIR:
                both = gl.convert_layout(acc, _of_pairs(ROWS)).reshape([2, WIDE, ROWS]).permute((1, 2, 0))
                gate, up = gl.split(both)
                gate = _settled(pointers, gate, 0, where, SHARED, BIAS)
                up = _settled(pointers, up, d_out, where, SHARED, BIAS)
                _store(pointers[1], gate / (1 + gl.exp(-gate)) * up, where)
            else:
                _store(pointers[1], _settled(pointers, acc, 0, where, SHARED, BIAS), where)


@gluon.jit
def _places(found, where):
    """Rows of the result along a tile, and its columns down the tile."""
    down = gl.expand_dims(gl.arange(0, found.shape[0], gl.SliceLayout(1, found.type.layout)), 1)
    along = gl.expand_dims(gl.arange(0, found.shape[1], gl.SliceLayout(0, found.type.layout)), 0)
    return where[0] + along, where[1] + down


@gluon.jit
def _settled(pointers, found, skipped, where, SHARED: gl.constexpr, BIAS: gl.constexpr):
    """Scale sums, and add the bias; `skipped` rows of the weight lie before those of the result."""
    _row, column = _places(found, where)
    there = column < where[3]
    if SHARED > 0:
        found = found * gl.load(pointers[4] + (skipped + column) // SHARED, mask=there, other=0.0)
    if BIAS:
        found += gl.load(pointers[0] + skipped + column, mask=there, other=0.0).to(gl.float32)
    return found


@gluon.jit
def _store(out_ptr, found, where):
    row, column = _places(found, where)
    at = out_ptr + row.to(gl.int64) * where[3] + column
    gl.store(at, found.to(out_ptr.dtype.element_ty), mask=(row < where[2]) & (column < where[3]))


@gluon.jit
def _words_of(words, came, stage, turn, UNITS: gl.constexpr):
    """Load the words of a stage, when they have come, by units."""
    mbarrier.wait(came.index(stage), turn)
    word = words.index(stage).load(_of_words())
    return gl.split(word.reshape([COLUMNS, 2, 16]).permute((0, 2, 1))) if UNITS == 2 else (word, word)


@gluon.constexpr_function
def _of_pairs(rows):
    """The layout of sums [128, rows] in which a thread has both of a pair, and lanes neighbouring columns."""
    registers = [[64, 0], *([0, 1 << i] for i in range(2, rows.bit_length() - 1))]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[32, 0], [0, 1], [0, 2]], [], [128, rows])
