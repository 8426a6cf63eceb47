"""dgraph::rows_linear on CUDA.

One persistent kernel, one program per multiprocessor. Each reads the number of live rows and derives its own
work from it: whole tiles in rounds, and what is left of the last round divided evenly over all programs, so that a
few tiles keep a whole device busy. A program may begin or end such a share inside a tile; its sums then go to a
workspace, and a second kernel adds the shares of a tile up, in order.

Few rows are bound by the reading of the weight. They take tiles as narrow as they are few, in which the weight is
the left factor, because the matrix units have a least height but no least width.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgraph.ops.rows_linear import check_sizes
from dgraph.ops.triton.paged_attention import multiprocessors


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles that one range of row counts takes.

    Attributes:
        rows: of a tile; for few rows the widest tile.
        columns: of a tile: rows of the weight.
        depth: inner values per iteration.
        stages: iterations in flight.
    """

    rows: int
    columns: int
    depth: int
    stages: int


@dataclass(frozen=True)
class Plan:
    """Sizes of one launch.

    Attributes:
        few: tiles for up to `few.rows` rows, as wide as these are; None to take `many` always.
        many: tiles for more rows.
        warps: of the product.
        splits: shares of a tile at most; 1 divides none.
        group: tiles over rows that run side by side on one part of the weight.
        bulk: load with the bulk copy engine where layout and device allow.
        programs: per multiprocessor.
    """

    few: Tiles | None = Tiles(64, 128, 64, 6)
    many: Tiles = Tiles(128, 256, 64, 4)
    warps: int = 8
    splits: int = 8
    group: int = 8
    bulk: bool = True
    programs: int = 1


WIDE = Plan(Tiles(64, 64, 32, 2), Tiles(64, 64, 32, 2), warps=4, bulk=False)
"""For fp32, whose products run outside of the matrix units and take many registers."""
LEAST_ROWS = 16
SOME = 4
"""Rows of a tile whose shares one program of the second kernel adds up at a time."""


def kernel(x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor, plan: Plan | None = None) -> Tensor:
    """dgraph::rows_linear; see its contract. `plan` overrides the sizes chosen for the dtype."""
    check_sizes(x, weight, bias)
    (n, d_in), d_out = x.shape, weight.shape[0]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if plan is None:
        plan = Plan() if x.element_size() == 2 else WIDE
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    few, many = plan.few or Tiles(0, 16, 16, 1), plan.many
    programs = plan.programs * multiprocessors(x.device)
    part = out
    if plan.splits > 1:
        largest = max(few.rows * few.columns, many.rows * many.columns)
        part = torch.empty((2 * programs, largest), dtype=torch.float32, device=x.device)
    bulk = plan.bulk and all(map(_can_be_copied_in_bulk, (x, weight)))
    widths = [rows if rows <= few.rows else LEAST_ROWS for rows in (16, 32, 64, 128)]
    blocks: list[Tensor | TensorDescriptor] = [x] * 5 + [weight] * 2
    if bulk:
        blocks = [_blocks(x, rows, few.depth) for rows in widths] + [_blocks(x, many.rows, many.depth)]
        blocks += [_blocks(weight, few.columns, few.depth), _blocks(weight, many.columns, many.depth)]
    sizes = (
        few.rows, few.columns, few.depth, few.stages, many.rows, many.columns, many.depth, many.stages,
        plan.group, programs, plan.splits, bias is not None,
    )  # fmt: skip
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
    """Tiles over rows and in all, iterations of each, tiles that are whole, iterations of a share of the others.

    Share i holds the iterations [i * share, (i + 1) * share) of the tiles that are not whole, end to end.
    """
    across = tl.cdiv(rows, ROWS)
    tiles, deep = across * tl.cdiv(d_out, COLUMNS), tl.maximum(tl.cdiv(d_in, DEPTH), 1)
    if SPLITS == 1:
        left = tiles * 0
    else:  # a last round that is nearly full is left as it is
        left = tiles % PROGRAMS
        left = tl.where(5 * left >= 4 * PROGRAMS, 0, left)
    share = tl.cdiv(left * deep, tl.maximum(tl.minimum(left * SPLITS, PROGRAMS), 1))
    return across, tiles, deep, tiles - left, tl.maximum(share, 1)


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
    """The tiles of one program: its whole ones, and then its share of the others."""
    across, tiles, deep, whole, share = _division(rows, d_out, d_in, ROWS, COLUMNS, DEPTH, PROGRAMS, SPLITS)
    program = tl.program_id(0)
    mine = tl.cdiv(tl.maximum(whole - program, 0), PROGRAMS)
    begin = tl.minimum(program * share, (tiles - whole) * deep)
    end = tl.minimum(begin + share, (tiles - whole) * deep)
    pieces = tl.cdiv(end, deep) - begin // deep
    for i in tl.range(0, mine + tl.where(begin < end, pieces, 0)):
        other = begin // deep + i - mine
        tile = tl.where(i < mine, program + i * PROGRAMS, whole + other)
        first = tl.where(i < mine, 0, tl.maximum(begin - other * deep, 0))
        last = tl.where(i < mine, deep, tl.minimum(end - other * deep, deep))
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
            # The end of a tile that another began, or the beginning of one that another ends.
            slot = (2 * program + (first == 0).to(tl.int32)).to(tl.int64)
            at = row[:, None] * COLUMNS + column[None, :]
            tl.store(part_ptr + slot * (ROWS * COLUMNS) + at, found, mask=(r * ROWS + row < rows)[:, None])


@triton.jit(do_not_specialize=["b", "n"])
def _multiply(
    x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, cu_ptr, x_16, x_32, x_64, x_128, x_many, w_few, w_many,
    b, n, d_out, d_in, x_row, w_row,
    FEW: tl.constexpr, FEW_COLUMNS: tl.constexpr, FEW_DEPTH: tl.constexpr, FEW_STAGES: tl.constexpr,
    MANY: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, BULK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rows = _live_rows(cu_ptr, b, n)
    if rows > FEW:
        _tiles(
            x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, x_many, w_many, rows, n, d_out, d_in, x_row, w_row,
            MANY, COLUMNS, DEPTH, STAGES, False, GROUP, PROGRAMS, SPLITS, BIAS, BULK, PRECISION,
        )  # fmt: skip
    elif rows > 64:
        if FEW >= 128:
            _tiles(
                x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, x_128, w_few, rows, n, d_out, d_in, x_row, w_row,
                128, FEW_COLUMNS, FEW_DEPTH, FEW_STAGES, True, 1, PROGRAMS, SPLITS, BIAS, BULK, PRECISION,
            )  # fmt: skip
    elif rows > 32:
        if FEW >= 64:
            _tiles(
                x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, x_64, w_few, rows, n, d_out, d_in, x_row, w_row,
                64, FEW_COLUMNS, FEW_DEPTH, FEW_STAGES, True, 1, PROGRAMS, SPLITS, BIAS, BULK, PRECISION,
            )  # fmt: skip
    elif rows > 16:
        if FEW >= 32:
            _tiles(
                x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, x_32, w_few, rows, n, d_out, d_in, x_row, w_row,
                32, FEW_COLUMNS, FEW_DEPTH, FEW_STAGES, True, 1, PROGRAMS, SPLITS, BIAS, BULK, PRECISION,
            )  # fmt: skip
    elif rows > 0:  # noqa: SIM102
        if FEW >= 16:
            _tiles(
                x_ptr, w_ptr, bias_ptr, out_ptr, part_ptr, x_16, w_few, rows, n, d_out, d_in, x_row, w_row,
                16, FEW_COLUMNS, FEW_DEPTH, FEW_STAGES, True, 1, PROGRAMS, SPLITS, BIAS, BULK, PRECISION,
            )  # fmt: skip


@triton.jit
def _sums(
    part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    across, tiles, deep, whole, share = _division(rows, d_out, d_in, ROWS, COLUMNS, DEPTH, PROGRAMS, SPLITS)
    row, column = tl.arange(0, SOME), tl.arange(0, COLUMNS)
    for i in range(tl.program_id(0), (tiles - whole) * (ROWS // SOME), tl.num_programs(0)):
        tile, inside = i // (ROWS // SOME), i % (ROWS // SOME) * SOME
        first, last = tile * deep // share, (tile * deep + deep - 1) // share
        r, c = _place(whole + tile, across, tiles, GROUP)
        if (first < last) & (r * ROWS + inside < rows):
            at = (inside + row)[:, None] * COLUMNS + column[None, :]
            live = (r * ROWS + inside + row < rows)[:, None]
            acc = tl.zeros([SOME, COLUMNS], tl.float32)
            for j in tl.static_range(SPLITS + 1):
                slot = (2 * (first + j) + (1 if j == 0 else 0)).to(tl.int64)
                acc += tl.load(
                    part_ptr + slot * (ROWS * COLUMNS) + at, mask=live & (first + j <= last), other=0.0
                )  # fmt: skip
            _store(out_ptr, bias_ptr, acc, r * ROWS + inside + row, c * COLUMNS + column, rows, d_out, BIAS)


@triton.jit(do_not_specialize=["b", "n"])
def _add_up(
    part_ptr, bias_ptr, out_ptr, cu_ptr, b, n, d_out, d_in,
    FEW: tl.constexpr, FEW_COLUMNS: tl.constexpr, FEW_DEPTH: tl.constexpr, FEW_STAGES: tl.constexpr,
    MANY: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Tiles that several programs shared: the sum of the shares in order, from the workspace."""
    rows = _live_rows(cu_ptr, b, n)
    if rows > FEW:
        _sums(
            part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
            MANY, COLUMNS, DEPTH, GROUP, PROGRAMS, SPLITS, BIAS, SOME,
        )  # fmt: skip
    elif rows > 0:
        # A few rows: one tile over them, whose height is that of the product's.
        if rows > 64:
            _sums(
                part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
                128, FEW_COLUMNS, FEW_DEPTH, 1, PROGRAMS, SPLITS, BIAS, SOME,
            )  # fmt: skip
        elif rows > 32:
            _sums(
                part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
                64, FEW_COLUMNS, FEW_DEPTH, 1, PROGRAMS, SPLITS, BIAS, SOME,
            )  # fmt: skip
        elif rows > 16:
            _sums(
                part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
                32, FEW_COLUMNS, FEW_DEPTH, 1, PROGRAMS, SPLITS, BIAS, SOME,
            )  # fmt: skip
        else:
            _sums(
                part_ptr, bias_ptr, out_ptr, rows, d_out, d_in,
                16, FEW_COLUMNS, FEW_DEPTH, 1, PROGRAMS, SPLITS, BIAS, SOME,
            )  # fmt: skip
