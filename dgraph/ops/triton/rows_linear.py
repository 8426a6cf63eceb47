"""dgraph::rows_linear on CUDA.

One persistent kernel, one program per multiprocessor. Each reads the number of live rows, picks the tiles that a plan
has for so many, and derives its own work: whole tiles in rounds, and of the last round, where the tiles left would
keep less than half of the device busy, one share of a tile. The shares of a tile are of one size, so that a program
writes one set of sums at most. They go to a workspace, and a second kernel adds the shares of a tile up, in order.

Shares of an even cut, where a tile ends within a share, would keep every program busy; but their sums are twice as
many, and took more time than the idle programs do.

Few rows are bound by the reading of the weight. They take tiles as narrow as they are few, in which the weight is
the left factor, because the matrix units have a least height but no least width.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgraph.ops.rows_linear import check_sizes
from dgraph.ops.triton.paged_attention import multiprocessors
from dgraph.ops.tuning import LinearShape, chosen, dtype_name

ANY = 2**31 - 1
"""A largest row count that is none."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles that one range of row counts takes.

    Attributes:
        rows: of a tile.
        columns: of a tile: rows of the weight.
        depth: inner values per iteration.
        stages: iterations in flight.
        up_to: the largest row count that takes these tiles.
        weight_first: the weight is the left factor, and a tile is 16 or 32 or ... rows wide where that many do.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    up_to: int = ANY
    weight_first: bool = False


@dataclass(frozen=True)
class Plan:
    """Sizes of one launch.

    Attributes:
        tiles: by rising row count; the last are for any number of rows above the others'.
        warps: of the product.
        splits: shares of a tile at most; 1 divides none.
        group: tiles over rows that run side by side on one part of the weight.
        bulk: load with the bulk copy engine where layout and device allow.
        programs: per multiprocessor.

    Raises:
        ValueError: the tiles are out of order, leave out large row counts, or make too many cases.
    """

    tiles: tuple[Tiles, ...] = (
        Tiles(64, 128, 128, 4, up_to=64, weight_first=True),
        Tiles(128, 128, 64, 6, up_to=768),
        Tiles(128, 256, 64, 4),
    )
    warps: int = 8
    splits: int = 8
    group: int = 8
    bulk: bool = True
    programs: int = 1

    def __post_init__(self) -> None:
        ends = [tiles.up_to for tiles in self.tiles]
        if ends != sorted(set(ends)) or ends[-1:] != [ANY] or len(self.cases()) > MOST_CASES:
            raise ValueError(
                f"a plan for rows_linear must have tiles up to rising row counts, the last up to any, that make at "
                f"most {MOST_CASES} cases; got {ends} and {len(self.cases())}."
            )

    def cases(self) -> tuple[tuple[int, int, Tiles], ...]:
        """What the kernel chooses from: above how many rows, up to how many, and tiles of exactly that width."""
        found: list[tuple[int, int, Tiles]] = []
        above = 0
        for tiles in self.tiles:
            narrow = [rows for rows in WIDTHS if above < rows < min(tiles.rows, tiles.up_to)]
            for rows in narrow if tiles.weight_first else []:
                found.append((above, rows, replace(tiles, rows=rows)))
                above = rows
            found.append((above, tiles.up_to, tiles))
            above = tiles.up_to
        return tuple(found)


WIDTHS = (16, 32, 64)
MOST_CASES = 6
"""At most: the kernel has parameters for the blocks of so many."""
WIDE = Plan((Tiles(64, 64, 32, 2, up_to=64, weight_first=True), Tiles(64, 64, 32, 2)), warps=4, bulk=False)
"""For fp32, whose products run outside of the matrix units and take many registers."""
SOME = 4
"""Rows of a tile whose shares one program of the second kernel adds up at a time."""


def plan_for(itemsize: int) -> Plan:
    """The plan for values of so many bytes: its tiles hold for any number of rows."""
    return Plan() if itemsize == 2 else WIDE


def shape_of(x: Tensor, weight: Tensor) -> LinearShape:
    """The shape of a call."""
    return LinearShape(x.shape[0], x.shape[1], weight.shape[0], dtype_name(x.dtype))


def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor, plan: Plan | None = None) -> Tensor:
    """dgraph::rows_linear; see its contract. `plan` overrides the sizes chosen for the shape."""
    check_sizes(x, weight, bias)
    (n, d_in), d_out = x.shape, weight.shape[0]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    plan = plan or chosen("rows_linear", shape_of(x, weight)) or plan_for(x.element_size())
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    cases, programs = plan.cases(), plan.programs * multiprocessors(x.device)
    part = out
    if plan.splits > 1:
        largest = max(tiles.rows * tiles.columns for tiles in plan.tiles)
        part = torch.empty((programs, largest), dtype=torch.float32, device=x.device)
    bulk = plan.bulk and all(map(_can_be_copied_in_bulk, (x, weight)))
    blocks: list[Tensor | TensorDescriptor] = [x] * MOST_CASES + [weight] * MOST_CASES
    if bulk:
        used = [tiles for _, _, tiles in cases] + [cases[-1][2]] * (MOST_CASES - len(cases))
        blocks = [_blocks(x, tiles.rows, tiles.depth) for tiles in used]
        blocks += [_blocks(weight, tiles.columns, tiles.depth) for tiles in used]
    choices = tuple(
        (above, up_to, t.rows, t.columns, t.depth, t.stages, t.weight_first) for above, up_to, t in cases
    )  # fmt: skip
    sizes = choices, plan.group, programs, plan.splits, bias is not None
    b, given = cu_rows.shape[0] - 1, bias if bias is not None else weight
    _multiply[(programs,)](
        x, weight, given, out, part, cu_rows, *blocks, b, n, d_out, d_in, x.stride(0), weight.stride(0),
        *sizes, bulk, "ieee" if x.dtype == torch.float32 else "tf32", num_warps=plan.warps,
    )  # fmt: skip
    if plan.splits > 1:
        _add_up[(4 * programs,)](part, given, out, cu_rows, b, n, d_out, d_in, *sizes, SOME, num_warps=4)
    return out


def _can_be_copied_in_bulk(x: Tensor) -> bool:
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    return bool(x.stride(0)) and not (x.stride(0) * x.element_size() | x.data_ptr()) % 16


def _blocks(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


@triton.jit
def _live_rows(cu_ptr, b, n):
    return tl.minimum(tl.load(cu_ptr + b), n).to(tl.int32)


@triton.jit
def _division(rows, d_out, d_in, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
              PROGRAMS: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Tiles over rows and in all, iterations of each, tiles that are whole, shares of each other, iterations of one."""
    across = tl.cdiv(rows, ROWS)
    tiles, deep = across * tl.cdiv(d_out, COLUMNS), tl.maximum(tl.cdiv(d_in, DEPTH), 1)
    left = tiles % PROGRAMS
    share = tl.cdiv(deep, tl.maximum(tl.minimum(PROGRAMS // tl.maximum(left, 1), SPLITS), 1))
    shares = tl.cdiv(deep, share)  # none of them is empty
    return across, tiles, deep, tl.where(shares > 1, tiles - left, tiles), shares, share


@triton.jit
def _place(tile, across, tiles, GROUP: tl.constexpr):
    """Which rows and which columns: GROUP tiles over rows next to each other, then the next columns."""
    wide = GROUP * (tiles // across)
    first = tile // wide * GROUP
    high = tl.minimum(across - first, GROUP)
    return first + tile % wide % high, tile % wide // high


@triton.jit
def _load(blocks, ptr, first, rows, step, k, d_in, ROWS: tl.constexpr, DEPTH: tl.constexpr, BULK: tl.constexpr):
    if BULK:
        found = blocks.load([first, k])
    else:
        row, column = first + tl.arange(0, ROWS), k + tl.arange(0, DEPTH)
        at = row.to(tl.int64)[:, None] * step + column[None, :]
        found = tl.load(ptr + at, mask=(row < rows)[:, None] & (column < d_in)[None, :], other=0.0)
    return found


@triton.jit
def _store(out_ptr, bias_ptr, acc, row, column, rows, d_out, BIAS: tl.constexpr):
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=column < d_out, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * d_out + column[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < d_out)[None, :])


@triton.jit
def _tiles(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, x_blocks, w_blocks, rows, n, d_out, d_in, x_row, w_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, BULK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles of one program: its whole ones, and then its share of another."""
    across, tiles, deep, whole, shares, share = _division(rows, d_out, d_in, ROWS, COLUMNS, DEPTH, PROGRAMS, SPLITS)
    program = tl.program_id(0)
    mine = tl.cdiv(tl.maximum(whole - program, 0), PROGRAMS)
    for i in tl.range(0, mine + (program < (tiles - whole) * shares).to(tl.int32)):
        tile = tl.where(i < mine, program + i * PROGRAMS, whole + program // shares)
        first = tl.where(i < mine, 0, program % shares * share)
        last = tl.where(i < mine, deep, tl.minimum(first + share, deep))
        r, c = _place(tile, across, tiles, GROUP)
        acc = tl.zeros([COLUMNS, ROWS] if SWAP else [ROWS, COLUMNS], tl.float32)
        for k in tl.range(first * DEPTH, last * DEPTH, DEPTH, num_stages=STAGES):
            x = _load(x_blocks, x_ptr, r * ROWS, n, x_row, k, d_in, ROWS, DEPTH, BULK)
            w = _load(w_blocks, w_ptr, c * COLUMNS, d_out, w_row, k, d_in, COLUMNS, DEPTH, BULK)
            if SWAP:
                acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        found = acc.T if SWAP else acc
        row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
        if last - first == deep:
            _store(out_ptr, bias_ptr, found, r * ROWS + row, c * COLUMNS + column, rows, d_out, BIAS)
        else:
            at = program.to(tl.int64) * (ROWS * COLUMNS) + row[:, None] * COLUMNS + column[None, :]
            tl.store(part_ptr + at, found, mask=(r * ROWS + row < rows)[:, None])


@triton.jit(do_not_specialize=["b", "n"])
def _multiply(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, cu_ptr, x_0, x_1, x_2, x_3, x_4, x_5, w_0, w_1, w_2, w_3, w_4, w_5,
    b, n, d_out, d_in, x_row, w_row,
    CASES: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    BULK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product, in the tiles of the one case that holds: above and up to how many rows, then sizes of `Tiles`."""
    rows = _live_rows(cu_ptr, b, n)
    x_blocks, w_blocks = (x_0, x_1, x_2, x_3, x_4, x_5), (w_0, w_1, w_2, w_3, w_4, w_5)
    for i in tl.static_range(len(CASES)):
        if (rows > CASES[i][0]) & (rows <= CASES[i][1]):
            _tiles(
                x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, x_blocks[i], w_blocks[i], rows, n, d_out, d_in, x_row, w_row,
                CASES[i][2], CASES[i][3], CASES[i][4], CASES[i][5], CASES[i][6],
                GROUP, PROGRAMS, SPLITS, BIAS, BULK, PRECISION,
            )  # fmt: skip


@triton.jit
def _sums(
    part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    across, tiles, _, whole, shares, _ = _division(rows, d_out, d_in, ROWS, COLUMNS, DEPTH, PROGRAMS, SPLITS)
    row, column = tl.arange(0, SOME), tl.arange(0, COLUMNS)
    for i in range(tl.program_id(0), (tiles - whole) * (ROWS // SOME), tl.num_programs(0)):
        tile, inside = i // (ROWS // SOME), i % (ROWS // SOME) * SOME
        r, c = _place(whole + tile, across, tiles, GROUP)
        if r * ROWS + inside < rows:
            at = (inside + row)[:, None] * COLUMNS + column[None, :]
            live = (r * ROWS + inside + row < rows)[:, None]
            acc = tl.zeros([SOME, COLUMNS], tl.float32)
            for j in tl.static_range(SPLITS):
                slot = (tile * shares + j).to(tl.int64)
                acc += tl.load(part_ptr + slot * (ROWS * COLUMNS) + at, mask=live & (j < shares), other=0.0)
            _store(out_ptr, bias_ptr, acc, r * ROWS + inside + row, c * COLUMNS + column, rows, d_out, BIAS)


@triton.jit(do_not_specialize=["b", "n"])
def _add_up(
    part_ptr, bias_ptr, out_ptr, cu_ptr, b, n, d_out, d_in,
    CASES: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Tiles that several programs shared: the sum of the shares in order, from the workspace."""
    rows = _live_rows(cu_ptr, b, n)
    for i in tl.static_range(len(CASES)):
        if (rows > CASES[i][0]) & (rows <= CASES[i][1]):
            _sums(
                part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
                CASES[i][2], CASES[i][3], CASES[i][4], GROUP, PROGRAMS, SPLITS, BIAS, SOME,
            )  # fmt: skip
