"""Products of groups as Triton compiles them for a GPU that need not be there.

python -m tests.ops.triton.compiled_grouped
"""

from __future__ import annotations

import json
import re
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from dgraph.ops.experts.triton.grouped import (
    TILES,
    TILES_OF_NUMBERS,
    TILES_OF_UNITS,
    _multiply_rows_of_groups,
    _multiply_units_of_groups,
)
from dgraph.ops.products.triton.stored import Tile
from tests.ops.triton.compiled import source_of

VALUES = {
    "bf16": ("bf16", TILES),
    "bf16 unit": ("bf16", TILES_OF_UNITS),
    "fp8": ("fp8e4nv", TILES_OF_NUMBERS),
    "int8": ("i8", TILES_OF_NUMBERS),
}


def multiplied(values: str, tile: Tile, high: int, unit: bool) -> list[str]:
    """What Hopper's own matrix instructions multiply, and "beside" where sums are added up outside of them."""
    columns = tile.columns // 2 if unit else tile.columns
    of = {"x_blocks": tile.rows, "w_blocks": columns}
    types = {name: f"tensordesc<{values}[{size}, {tile.depth}]>" for name, size in of.items()}
    types |= {"out_ptr": "*bf16", "ends_ptr": "*i32", "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}
    constants: dict[str, Any] = {"ROWS": tile.rows, "COLUMNS": columns, "DEPTH": tile.depth}
    constants |= {"HIGH": high, "PRECISION": "tf32", "SILU": False}
    kernel = _multiply_units_of_groups if unit else _multiply_rows_of_groups
    source = source_of(ASTSource, kernel, constants, types)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    text = compiled(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    names = re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.\S+", text)
    assert all(name.startswith("wgmma") for name in names), names
    kinds = {kind for name in names for kind in name.split(".") if kind in ("e4m3", "s8", "f16", "bf16", "tf32")}
    return sorted(kinds) + ["beside"] * ("add.f32" in text or "add.rn.f32" in text)


def main() -> None:
    """Print one JSON object."""
    found = {
        f"{name} {tile.rows} x {tile.columns}": multiplied(values, tile, int(values != "bf16"), name.endswith("unit"))
        for name, (values, tiles) in VALUES.items()
        for tile in tiles
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
