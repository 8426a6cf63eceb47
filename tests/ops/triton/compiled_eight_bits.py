"""The product of 8-bit numbers by 8-bit numbers as Triton compiles it for a GPU that need not be there.

python -m tests.ops.triton.compiled_eight_bits
"""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from dgraph.ops.triton.eight_bits import IMPRECISE, TILES, _multiply_numbers
from dgraph.ops.triton.stored import Tile
from tests.ops.triton.compiled import source_of


def multiplied(dtype: str, tile: Tile, pair: bool, counted: bool) -> list[str]:
    """What the matrix instructions of PTX multiply: e4m3, s8, ..."""
    types = {"x_ptr": f"*{dtype}", "w_ptr": f"*{dtype}", "bias_ptr": "*bf16", "out_ptr": "*bf16", "cu_ptr": "*i32"}
    types |= {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}
    constants: dict[str, Any] = {"HIGH": 1, "INTEGERS": dtype == "i8", "BIAS": True, "COUNTED": counted, "PAIR": pair}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "IMPRECISE": IMPRECISE}
    made = compiled(
        source_of(ASTSource, _multiply_numbers, constants, types),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    found = set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.\S+", made.asm["ptx"]))
    return sorted({kind for name in found for kind in name.split(".") if kind in ("e4m3", "s8", "f16", "bf16", "tf32")})


def main() -> None:
    """Print one JSON object."""
    found = {
        f"{dtype} {tile.rows} x {tile.columns}{' pair' * pair}{' counted' * counted}": multiplied(
            dtype, tile, pair, counted
        )
        for dtype, tile, (pair, counted) in product(("fp8e4nv", "i8"), TILES, ((False, False), (True, True)))
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
