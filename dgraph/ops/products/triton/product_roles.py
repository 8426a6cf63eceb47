"""The product of product.py on Hopper GPUs, by warps with roles of their own, which Triton does not generate.

One warp loads boxes of 64 or 16 rows of 128 bytes into a ring in shared memory, and runs ahead: into the next tile,
while a result is being written. Eight warps multiply. The source is Gluon, the language below Triton. Columns of a tile
may also be the sum of two powers of two. Among several sizes the kernel takes the one that is done first, by the number
of rounds over the device.

Few rows wait for the weight alone. Their tiles are narrow. If possible, they are of a width at which all programs read
as much as each other. Then no program has to add up sums of others.

A stage of the ring is handed over by barriers in shared memory: `full` says that it came, `empty` that it was used.
Where tiles would leave a part of the device idle, programs share them along the inner dimension (product_shares.py).
The last of those to end adds up what the others wrote; none waits for another, which might not run yet.

Values have 16 bits, or both factors are numbers of 8. Sums of these (fp32 of float8, int32 of int8) are scaled before
they are written. Matrix units add up products of float8 in fewer bits than fp32 has. So for long rows their sums are
moved to separate sums from time to time.
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

from dgraph.ops.counters import zeros
from dgraph.ops.products.triton.product import _live_rows
from dgraph.ops.products.triton.product_cases import (
    BOX,
    BOXES,
    BYTES,
    LOW,
    MOST_STAGES,
    Case,
    _boxes,
    _choose,
    _each,
    _parts,
    _ring,
    _stages,
    _units,
)
from dgraph.ops.products.triton.product_shares import _division, _piece, _pieces
from dgraph.ops.triton.hopper import in_bulk, layout_of, understood
from dgraph.ops.triton.rows import start_of, wait

WARPS = gl.constexpr(8)
"""Warps that multiply."""
LOADING = gl.constexpr(24)
"""Registers of a thread that loads."""
IMPRECISE = 32
"""Boxes along the inner dimension whose products of float8 are added up in the bits of the matrix units. On an H100
sums of 4096 products are then off by 0.0021 of themselves, of which rounding to bf16 is 0.0017. Sums of 12288 are off
by 0.0031 if none are moved. Moving them every 8 boxes took 4 to 5 % of the time of many rows.
"""
EARLY_ROWS = 64
"""Most rows for which it starts early (see early.py): it takes some microseconds until it can load, a tenth of a small
product. With 1,024 rows an early start cost 7 % on an H200.
"""
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # as it is called before Triton 3.7


def fits(x: Tensor, weight: Tensor) -> bool:
    """True if the kernel takes such factors."""
    known = x.dtype == weight.dtype and x.element_size() <= 2 and understood(x.device)
    return known and in_bulk(x) and in_bulk(weight)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor | None, out: Tensor,
    choices: tuple[Case, ...], programs: int, group: int, pair: bool,
    scales: tuple[Tensor, Tensor, int] | None = None,
) -> None:  # fmt: skip
    """Write the product to out; factors as `fits` says, other arguments as of `rows_linear.launch`.

    Args:
        cu_rows: None: all rows are live.
        choices: the cases; for every number of rows there is one.
        programs: number of programs, that of the device's multiprocessors.
        group: tiles over rows next to each other.
        scales: for numbers of 8 bits: f32 of each row of x, f32 of the weight, and how many of its rows share one.
    """
    high, low, deep = BOX.value, LOW.value, BYTES.value // x.element_size()
    boxes = [
        TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, deep], layout_of(x.element_size()))
        for t in (x, weight)
        for rows in (high, low)
    ]
    part, ended = out, out if cu_rows is None else cu_rows
    if shared := [case for case in choices if case.splits > 1]:
        largest = max(case.rows * case.columns for case in shared)
        sums = torch.int32 if x.dtype == torch.int8 else torch.float32
        part, ended = x.new_empty((programs, largest), dtype=sums), zeros(programs, x.device)
    start = start_of(x.device) if x.shape[0] <= EARLY_ROWS else {"EARLY": False}
    sizes = tuple((case.above, case.up_to, case.rows, case.columns, case.splits) for case in choices)
    long = x.dtype.is_floating_point and x.element_size() == 1 and x.shape[1] > IMPRECISE * BYTES.value
    _multiply_in_roles[(programs,)](
        *boxes, out if bias is None else bias, out, part, ended, *((out, out) if scales is None else scales[:2]),
        out if cu_rows is None else cu_rows, 0 if cu_rows is None else cu_rows.shape[0] - 1,
        x.shape[0], out.shape[1], x.shape[1], sizes, group, programs,
        cu_rows is not None, 0 if scales is None else scales[2], IMPRECISE if long else 0, bias is not None, pair,
        num_warps=WARPS.value, **start,
    )  # fmt: skip


@gluon.constexpr_function
def _layout(part, bits):
    """Layout of sums of a shape; an instruction takes 32 bytes along the inner dimension."""
    high, wide = part
    instruction = [16, wide * high // (16 * WARPS), 256 // bits]
    return gl.NVMMADistributedLayout([3, 0], [high // 16, 16 * WARPS // high], instruction)


@gluon.jit(do_not_specialize=["b", "n"])
def _multiply_in_roles(
    x_boxes, x_low, w_boxes, w_low, bias_ptr, out_ptr, part_ptr, ended_ptr, x_scale_ptr, w_scale_ptr, cu_ptr,
    b, n, d_out, d_in, CASES: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    COUNTED: gl.constexpr, HIGH: gl.constexpr, APART: gl.constexpr, BIAS: gl.constexpr, PAIR: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Multiply in roles.

    HIGH: rows of the weight that share a scale; 0 without scales. APART: boxes along the inner dimension after which
    sums leave the matrix units; 0: at the end.
    """
    held = gl.allocate_shared_memory(x_boxes.dtype, [BOXES, BOX, x_boxes.block_shape[1]], x_boxes.layout)
    full = gl.allocate_shared_memory(gl.int64, [MOST_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [MOST_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(MOST_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    wait(EARLY)
    rows = _live_rows(cu_ptr, b, n) if COUNTED else n
    case, splits = _choose(rows, d_out, gl.cdiv(d_in, x_boxes.block_shape[1]), CASES, PROGRAMS, PAIR)
    ring, sizes = (held, full, empty), (rows, d_out, d_in, splits)
    pointers = (bias_ptr, out_ptr, part_ptr, ended_ptr, x_scale_ptr, w_scale_ptr)
    gl.warp_specialize(
        [
            (_multiply_boxes, (case, pointers, ring, sizes, CASES, GROUP, PROGRAMS, HIGH, APART, BIAS, PAIR)),
            (_load_boxes, (case, x_boxes, x_low, w_boxes, w_low, ring, sizes, CASES, GROUP, PROGRAMS, PAIR)),
        ],
        [1],
        [LOADING],
    )


@gluon.jit
def _load_boxes(
    case, x_boxes, x_low, w_boxes, w_low, ring, sizes,
    CASES: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    for i in gl.static_range(len(CASES)):
        if case == i:
            x = x_low if CASES[i][2] < 128 else x_boxes
            _load_tiles(x, w_boxes, w_low, ring, sizes, CASES[i][2], CASES[i][3], GROUP, PROGRAMS, PAIR)


@gluon.jit
def _multiply_boxes(
    case, pointers, ring, sizes, CASES: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    HIGH: gl.constexpr, APART: gl.constexpr, BIAS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    for i in gl.static_range(len(CASES)):
        if case == i:
            _multiply_tiles(
                pointers, ring, sizes, CASES[i][2], CASES[i][3], CASES[i][4], GROUP, PROGRAMS, HIGH, APART, BIAS, PAIR
            )  # fmt: skip


@gluon.jit
def _next(stage, turn, STAGES: gl.constexpr):
    """The stage that follows in the ring, and the phase of its barriers."""
    stage += 1
    turn = gl.where(stage == STAGES, turn ^ 1, turn)
    return gl.where(stage == STAGES, 0, stage), turn


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def _load_tiles(
    x_boxes, w_boxes, w_low, ring, sizes, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Load boxes of a program's pieces into the ring, as `_ring` lays them out.

    Only boxes of x that have live rows are loaded: others take longer to load, and no result needs their values.
    """
    held, full, empty = ring
    rows, d_out, d_in, splits = sizes
    HIGH: gl.constexpr = x_boxes.block_shape[0]
    DEPTH: gl.constexpr = x_boxes.block_shape[1]
    WIDE: gl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    STAGES: gl.constexpr = _stages(ROWS, COLUMNS)
    UNITS: gl.constexpr = _units(ROWS, COLUMNS)
    RING: gl.constexpr = _ring(ROWS, COLUMNS)
    LOADED: gl.constexpr = _boxes(ROWS, COLUMNS, PAIR)
    x_held = held._reinterpret(held.dtype, [BOXES * BOX // HIGH, HIGH, DEPTH], held.layout)
    low = held._reinterpret(held.dtype, [BOXES * BOX // LOW, LOW, DEPTH], held.layout)
    division = _division(rows, d_out, d_in, ROWS, WIDE, DEPTH * UNITS, PROGRAMS, splits)
    mine, pieces = _pieces(division, PROGRAMS)
    stage, turn = gl.to_tensor(0), gl.to_tensor(1)
    for i in range(0, pieces):
        r, c, first, last, _share = _piece(i, mine, division, PROGRAMS, GROUP)
        live = gl.minimum(gl.cdiv(rows - r * ROWS, HIGH), ROWS // HIGH)
        for k in range(first, last):
            came = full.index(stage)
            mbarrier.wait(empty.index(stage), turn)
            for j in gl.static_range(ROWS // HIGH):
                mbarrier.expect(came, ((j + 1) * HIGH + COLUMNS) * UNITS * BYTES, pred=live == j + 1)
            for u in gl.static_range(UNITS):
                unit, depth = stage * UNITS + u, (k * UNITS + u) * DEPTH
                for j in gl.static_range(len(LOADED)):
                    at = c * WIDE + LOADED[j][2] + LOADED[j][3] * d_out
                    if LOADED[j][4] == BOX:
                        box = held.index(LOADED[j][0] // BOX + unit * (LOADED[j][1] // BOX))
                        tma.async_copy_global_to_shared(w_boxes, [at, depth], came, box)
                    else:
                        box = low.index(LOADED[j][0] // LOW + unit * (LOADED[j][1] // LOW))
                        tma.async_copy_global_to_shared(w_low, [at, depth], came, box)
                for j in gl.static_range(ROWS // HIGH):
                    box = x_held.index(RING[0] // HIGH + unit * (ROWS // HIGH) + j)
                    wanted = (live > j) if j > 0 else True
                    tma.async_copy_global_to_shared(x_boxes, [r * ROWS + j * HIGH, depth], came, box, pred=wanted)
            stage, turn = _next(stage, turn, STAGES)


@gluon.jit
def _multiply_tiles(
    pointers, ring, sizes, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SPLITS: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, HIGH: gl.constexpr, APART: gl.constexpr, BIAS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    held = ring[0]
    rows, d_out, d_in, splits = sizes
    WIDE: gl.constexpr = COLUMNS // 2 if PAIR else COLUMNS
    UNITS: gl.constexpr = _units(ROWS, COLUMNS)
    ONE: gl.constexpr = (ROWS, _parts(ROWS, COLUMNS)[0])
    OTHER: gl.constexpr = (ROWS, _parts(ROWS, COLUMNS)[1])
    TWO: gl.constexpr = OTHER[1] > 0
    SIZE: gl.constexpr = ROWS * COLUMNS
    BESIDE: gl.constexpr = ONE[1] // 2 if PAIR else ONE[1]  # where the other's columns lie in the tile
    SOME: gl.constexpr = APART // UNITS
    division = _division(rows, d_out, d_in, ROWS, WIDE, held.shape[2] * UNITS, PROGRAMS, splits)
    deep = division[2]
    mine, pieces = _pieces(division, PROGRAMS)
    stage, turn = gl.to_tensor(0), gl.to_tensor(0)
    for i in range(0, pieces):
        r, c, first, last, share = _piece(i, mine, division, PROGRAMS, GROUP)
        where = (r * ROWS, c * WIDE, rows, d_out)
        # Few rows: the factors, which are needed at the end, are loaded first.
        if ROWS < 128:
            by = _factors(pointers, 0, where, held.dtype, ONE, HIGH, BIAS, PAIR)
            if TWO:
                beside_by = _factors(pointers, BESIDE, where, held.dtype, OTHER, HIGH, BIAS, PAIR)
        if SOME > 0:
            acc, rest = _no_sums(held.dtype, ONE), _no_sums(held.dtype, OTHER if TWO else ONE)
            for k in range(first, last, SOME):
                end = gl.minimum(k + SOME, last)
                more, beside, stage, turn = _sum_boxes(ring, stage, turn, k, end, ROWS, COLUMNS)
                acc += more
                if TWO:
                    rest += beside
        else:
            acc, rest, stage, turn = _sum_boxes(ring, stage, turn, first, last, ROWS, COLUMNS)

        complete = last - first == deep
        if SPLITS > 1:  # noqa: SIM102 (known when it is compiled)
            if not complete:
                _write_share(pointers[2], share, acc, 0, SIZE)
                if TWO:
                    _write_share(pointers[2], share, rest, ROWS * ONE[1], SIZE)
                complete = _is_last(pointers[3], share)
                if complete:
                    acc = _sum(pointers[2], share, acc, 0, SIZE)
                    if TWO:
                        rest = _sum(pointers[2], share, rest, ROWS * ONE[1], SIZE)
        if complete:
            if ROWS == 128:
                by = _factors(pointers, 0, where, held.dtype, ONE, HIGH, BIAS, PAIR)
            _store_part(pointers[1], _settled(acc, by, HIGH, BIAS), 0, where, PAIR)
            if TWO:
                if ROWS == 128:
                    beside_by = _factors(pointers, BESIDE, where, held.dtype, OTHER, HIGH, BIAS, PAIR)
                _store_part(pointers[1], _settled(rest, beside_by, HIGH, BIAS), BESIDE, where, PAIR)


@gluon.jit
def _no_sums(dtype: gl.constexpr, PART: gl.constexpr):
    return gl.zeros(PART, gl.int32 if dtype.is_int() else gl.float32, _layout(PART, dtype.primitive_bitwidth))


@gluon.jit
def _sum_boxes(ring, stage, turn, first, last, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Accumulators of a tile after some iterations, the only one twice; and the next stage and phase of the ring."""
    held, full, empty = ring
    STAGES: gl.constexpr = _stages(ROWS, COLUMNS)
    UNITS: gl.constexpr = _units(ROWS, COLUMNS)
    RING: gl.constexpr = _ring(ROWS, COLUMNS)
    ONE: gl.constexpr = _parts(ROWS, COLUMNS)[0]
    OTHER: gl.constexpr = _parts(ROWS, COLUMNS)[1]
    TWO: gl.constexpr = OTHER > 0
    DEPTH: gl.constexpr = held.shape[2]
    left = held._reinterpret(held.dtype, [BOXES * BOX // ROWS, ROWS, DEPTH], held.layout)
    right = held._reinterpret(held.dtype, [BOXES * BOX // ONE, ONE, DEPTH], held.layout)
    acc = _no_sums(held.dtype, (ROWS, ONE))
    if TWO:
        beside = held._reinterpret(held.dtype, [BOXES * BOX // OTHER, OTHER, DEPTH], held.layout)
        rest = _no_sums(held.dtype, (ROWS, OTHER))
    for k in range(first, last):
        mbarrier.wait(full.index(stage), turn)
        for u in gl.static_range(UNITS):
            unit = stage * UNITS + u
            a = left.index(RING[0] // ROWS + unit)
            b = right.index(RING[1] // ONE + unit).permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            if TWO:
                b = beside.index(RING[2] // OTHER + unit).permute((1, 0))
                rest = warpgroup_mma(a, b, rest, is_async=True)
        # Only products of this iteration may still run, so the one before is done with its stage.
        if TWO:
            acc, rest = warpgroup_mma_wait(2 * UNITS, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(UNITS, deps=(acc,))
        mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=k > first)
        stage, turn = _next(stage, turn, STAGES)
    if TWO:
        acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        rest = acc
    mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=last > first)
    return acc, rest, stage, turn


@gluon.jit
def _order(part):
    """Offsets of an accumulator's values in the workspace: those that a warp moves at once lie side by side.

    A thread has two neighbours each of two rows that are 8 apart, and the same again every 8 columns.
    """
    DOWN: gl.constexpr = part.shape[0] // 16
    ALONG: gl.constexpr = part.shape[1] * DOWN // WARPS  # columns of a warp
    row = gl.expand_dims(gl.arange(0, part.shape[0], gl.SliceLayout(1, part.type.layout)), 1)
    column = gl.expand_dims(gl.arange(0, part.shape[1], gl.SliceLayout(0, part.type.layout)), 0)
    warp, column = row // 16 + column // ALONG * DOWN, column % ALONG
    thread = warp * 32 + row % 8 * 4 + column % 8 // 2
    at = (column // 8 * 2 + row // 8 % 2) * (64 * WARPS) + thread * 2 + column % 2
    return gl.max_contiguous(gl.multiple_of(at, (1, 2)), (1, 2))  # which the compiler does not see


@gluon.jit
def _write_share(part_ptr, share, part, offset, SIZE: gl.constexpr):
    _, own, _, begins = share
    gl.store(part_ptr + (begins + own).to(gl.int64) * SIZE + offset + _order(part), part)


@gluon.jit
def _is_last(ended_ptr, share):
    """True if all other shares have been written."""
    place, _, shares, _ = share
    _barrier()
    return gl.atomic_add(ended_ptr + place, 1, sem="acq_rel") == shares - 1


@gluon.jit
def _sum(part_ptr, share, part, offset, SIZE: gl.constexpr):
    """Add up all shares of an accumulator, in their order."""
    _, _, shares, begins = share
    AT_ONCE: gl.constexpr = 4 if part.shape[1] <= 64 else 2
    part_ptr += begins.to(gl.int64) * SIZE + offset
    at = _order(part)
    found = gl.zeros_like(part)
    for j in range(0, shares, AT_ONCE):
        # Past the first level of cache, which does not see the writes of others.
        one = gl.load(part_ptr + j * SIZE + at, cache_modifier=".cg")
        two = _load_share(part_ptr, j + 1, shares, at, SIZE)
        if AT_ONCE == 4:
            three, four = _load_share(part_ptr, j + 2, shares, at, SIZE), _load_share(part_ptr, j + 3, shares, at, SIZE)
            found = found + one + two + three + four
        else:
            found = found + one + two
    return found


@gluon.jit
def _load_share(part_ptr, j, shares, at, SIZE: gl.constexpr):
    return gl.load(part_ptr + j * SIZE + at, mask=at * 0 + j < shares, other=0, cache_modifier=".cg")


@gluon.jit
def _columns(column, where, layout: gl.constexpr, PART: gl.constexpr, PAIR: gl.constexpr):
    """Columns of the result to which the sums of part of a tile belong, from a column of it on.

    In a PAIR, also flags of those that are of up. The order is that in which `_boxes` loads rows of the weight.
    """
    place = gl.expand_dims(gl.arange(0, PART[1], gl.SliceLayout(0, layout)), 0)
    up = place * 0
    if PAIR:
        EACH: gl.constexpr = _each(PART)
        up = place // EACH % 2
        place = place // (2 * EACH) * EACH + place % EACH
    return where[1] + column + place, up


@gluon.jit
def _factors(
    pointers, column, where, dtype: gl.constexpr, PART: gl.constexpr,
    HIGH: gl.constexpr, BIAS: gl.constexpr, PAIR: gl.constexpr,
):  # fmt: skip
    """Factors of the sums of part of a tile, by row and by column, and their bias; each is 0 if it does not exist.

    HIGH: rows of the weight that share a scale; 0 without scales.
    """
    r, _first, rows, d_out = where
    layout: gl.constexpr = _layout(PART, dtype.primitive_bitwidth)
    down = r + gl.expand_dims(gl.arange(0, PART[0], gl.SliceLayout(1, layout)), 1)
    right, up = _columns(column, where, layout, PART, PAIR)
    there, weight_row = right < d_out, right + up * d_out
    of_row, of_column, bias = gl.to_tensor(0.0), gl.to_tensor(0.0), gl.to_tensor(0.0)
    if HIGH > 0:
        of_row = gl.load(pointers[4] + down, mask=down < rows, other=0.0)
        of_column = gl.load(pointers[5] + weight_row // HIGH, mask=there, other=0.0)
    if BIAS:
        bias = gl.load(pointers[0] + weight_row, mask=there, other=0.0).to(gl.float32)
    return of_row, of_column, bias


@gluon.jit
def _settled(found, by, HIGH: gl.constexpr, BIAS: gl.constexpr):
    """Scale sums, and add the bias."""
    if HIGH > 0:
        found = found.to(gl.float32) * by[0] * by[1]
    if BIAS:
        found += by[2]
    return found


@gluon.jit
def _store_part(out_ptr, found, column, where, PAIR: gl.constexpr):
    """Store part of a tile of the result, from a column of it on; of a PAIR silu(gate) * up."""
    row, first, rows, d_out = where
    HIGH: gl.constexpr = found.shape[0]
    if PAIR:
        EACH: gl.constexpr = _each(found.shape)
        TIMES: gl.constexpr = found.shape[1] // (2 * EACH)
        gate, up = gl.split(gl.permute(gl.reshape(found, [HIGH, TIMES, 2, EACH]), (0, 1, 3, 2)))
        found = gl.reshape(gate / (1 + gl.exp(-gate)) * up, [HIGH, TIMES * EACH])
    found = found.to(out_ptr.dtype.element_ty)
    if HIGH == 128:
        found = gl.convert_layout(found, _sixteen_bytes(found.shape[1]))
    down = row + gl.expand_dims(gl.arange(0, HIGH, gl.SliceLayout(1, found.type.layout)), 1)
    right = first + column + gl.expand_dims(gl.arange(0, found.shape[1], gl.SliceLayout(0, found.type.layout)), 0)
    gl.store(out_ptr + down.to(gl.int64) * d_out + right, found, mask=(down < rows) & (right < d_out))


@gluon.constexpr_function
def _sixteen_bytes(columns):
    """The layout of [128, columns] values in which a thread has eight of a row side by side.

    A warp has the same 16 rows as in the layout of the matrix instructions, so that no value changes its warp.
    """
    registers = [[0, 1], [0, 2], [0, 4], *([0, 1 << i] for i in range(5, columns.bit_length() - 1)), [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]], [], [128, columns])
