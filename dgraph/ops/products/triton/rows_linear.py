"""dgraph::rows_linear on CUDA.

On Hopper GPUs warps have roles of their own (`product_roles`). The following kernel is for devices and operands with
which they cannot.

It is persistent, with one program per multiprocessor. Each program reads the number of live rows, picks the tiles that
a tiling has for that number, and derives its own work. It takes whole tiles in rounds. If the tiles of the last round
would keep less than half of the device busy, it takes one share of a tile there. The shares of a tile are of one size,
so that a program writes one set of sums at most. They go to a workspace, and a second kernel adds the shares of a tile
up, in order.

Shares of an even cut, where a tile ends within a share, would keep every program busy; but their sums are twice as
many, and took more time than the idle programs do.

Few rows are bound by the reading of the weight. They take tiles as narrow as they are few. In these the weight is the
left factor, because the matrix units have a least height but no least width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ops.attention.triton.attention_tiling import multiprocessors
from dgraph.ops.products.rows_linear import check_sizes
from dgraph.ops.products.triton import eight_bits, product_cases, product_roles, stored_roles
from dgraph.ops.products.triton.product import _add_up, _multiply
from dgraph.ops.products.triton.product_cases import ANY
from dgraph.ops.triton.hopper import in_bulk
from dgraph.ops.tuning import LinearShape, chosen, dtype_name


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles that one range of row counts takes.

    Attributes:
        rows: rows of a tile.
        columns: columns of a tile, which are rows of the weight.
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
class Tiling:
    """Sizes of one launch.

    Attributes:
        tiles: tiles by rising row count; the last are for any number of rows above the others'.
        warps: warps of the product.
        splits: most shares of a tile; 1 divides none.
        group: tiles over rows that run side by side on one part of the weight.
        bulk: load with the bulk copy engine where layout and device allow.
        programs: programs per multiprocessor.
        roles: give loading and multiplying to warps of their own, in tiles of their own, where layout, dtype and device
            allow (`product_roles`); the sizes are for where they do not.

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
    roles: bool = False

    def __post_init__(self) -> None:
        ends = [tiles.up_to for tiles in self.tiles]
        if ends != sorted(set(ends)) or ends[-1:] != [ANY] or len(self.cases()) > MOST_CASES:
            raise ValueError(
                f"a tiling for rows_linear must have tiles up to rising row counts, the last up to any, that make at "
                f"most {MOST_CASES} cases; got {ends} and {len(self.cases())}."
            )

    def cases(self) -> tuple[tuple[int, int, Tiles], ...]:
        """Cases that the kernel chooses from: rows above and up to which it holds, and tiles of exactly that width."""
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
"""Most cases of a tiling: the kernel has parameters for the blocks of this many."""
WIDE = Tiling((Tiles(64, 64, 32, 2, up_to=64, weight_first=True), Tiles(64, 64, 32, 2)), warps=4, bulk=False)
"""Tiling for fp32, whose products run outside of the matrix units and take many registers."""
SOME = 4
"""Rows of a tile whose shares one program of the second kernel adds up at a time."""


def tiling_for(itemsize: int) -> Tiling:
    """Choose the tiling for values of `itemsize` bytes; its tiles hold for any number of rows."""
    return Tiling(roles=True) if itemsize == 2 else WIDE


def shape_of(x: Tensor, weight: Tensor) -> LinearShape:
    """Shape of a call."""
    return LinearShape(x.shape[0], x.shape[1], weight.shape[0], dtype_name(x.dtype))


def kernel(
    x: Tensor | QuantisedRows,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    cu_rows: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """dgraph::rows_linear; see its contract. `tiling` overrides the sizes chosen for the shape."""
    check_sizes(x, weight, bias)
    if isinstance(x, QuantisedRows):
        assert isinstance(weight, QuantisedWeight)
        return eight_bits.launch(x, weight, bias, cu_rows)
    if isinstance(weight := stored_roles.taken(weight, x), QuantisedWeight):
        return stored_roles.launch(x, weight, bias, cu_rows)
    tiling = tiling or chosen("rows_linear", shape_of(x, weight)) or tiling_for(x.element_size())
    return launch(x, weight, bias, cu_rows, tiling)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_rows: Tensor, tiling: Tiling, pair: bool = False
) -> Tensor:  # fmt: skip
    """Multiply under a tiling; a pair, whose weight and bias have gate rows, then up rows, gives silu(gate) * up.

    A tile of a pair has half of its rows of the weight from either.
    """
    (n, d_in), d_out = x.shape, weight.shape[0] // 2 if pair else weight.shape[0]
    out = torch.empty((n, d_out), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    if tiling.roles and tiling.bulk and product_roles.fits(x, weight):
        choices = product_cases.cases(pair, most=n)
        product_roles.launch(x, weight, bias, cu_rows, out, choices, multiprocessors(x.device), tiling.group, pair)
        return out
    cases, programs = tiling.cases(), tiling.programs * multiprocessors(x.device)
    part = out
    if tiling.splits > 1:
        largest = max(tiles.rows * tiles.columns for tiles in tiling.tiles)
        part = torch.empty((programs, largest), dtype=torch.float32, device=x.device)
    bulk = tiling.bulk and in_bulk(x) and in_bulk(weight)
    blocks: list[Tensor | TensorDescriptor] = [x] * MOST_CASES + [weight] * MOST_CASES
    if bulk:
        used = [tiles for _, _, tiles in cases] + [cases[-1][2]] * (MOST_CASES - len(cases))
        blocks = [_blocks(x, tiles.rows, tiles.depth) for tiles in used]
        blocks += [_blocks(weight, tiles.columns, tiles.depth, pair) for tiles in used]
    ranges = tuple(
        (above, up_to, t.rows, t.columns, t.depth, t.stages, t.weight_first) for above, up_to, t in cases
    )  # fmt: skip
    sizes = ranges, tiling.group, programs, tiling.splits, bias is not None, pair
    b, given = cu_rows.shape[0] - 1, bias if bias is not None else weight
    _multiply[(programs,)](
        x, weight, given, out, part, cu_rows, *blocks, b, n, d_out, d_in, x.stride(0), weight.stride(0),
        *sizes, bulk, "ieee" if x.dtype == torch.float32 else "tf32", num_warps=tiling.warps,
    )  # fmt: skip
    if tiling.splits > 1:
        _add_up[(4 * programs,)](part, given, out, cu_rows, b, n, d_out, d_in, *sizes, SOME, num_warps=4)
    return out


def _blocks(x: Tensor, rows: int, columns: int, pair: bool = False) -> TensorDescriptor:
    """Blocks of a matrix; in a pair half of their rows are from either half, beyond whose end they read zeros."""
    if pair:
        x, block = x.unflatten(0, (2, -1)), [2, rows // 2, columns]
    else:
        block = [rows, columns]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
