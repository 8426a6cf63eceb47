"""Products of 8-bit numbers by 8-bit numbers, and by weights read as words, as Triton compiles them for a GPU that need
not be there.

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

from dgraph.ops.products.triton import stored
from dgraph.ops.products.triton.eight_bits import IMPRECISE, TILES, _multiply_numbers
from dgraph.ops.products.triton.stored import SHARES, Tile, _multiply_stored
from dgraph.ops.products.triton.words import FP8, INT4, INT8
from tests.ops.triton.compiled import source_of


def multiplied(dtype: str, tile: Tile, pair: bool, counted: bool) -> list[str]:
    """What the matrix instructions of PTX multiply: e4m3, s8, ..."""
    types = {"x_ptr": f"*{dtype}", "w_ptr": f"*{dtype}", "bias_ptr": "*bf16", "out_ptr": "*bf16", "cu_ptr": "*i32"}
    types |= {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}
    constants: dict[str, Any] = {"HIGH": 1, "INTEGERS": dtype == "i8", "BIAS": True, "COUNTED": counted, "PAIR": pair}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "IMPRECISE": IMPRECISE}
    return of_ptx(source_of(ASTSource, _multiply_numbers, constants, types), tile)


def of_ptx(source: Any, tile: Tile) -> list[str]:
    """What the matrix instructions of a kernel multiply."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compiled(source, target=GPUTarget("cuda", 90, 32), options=options)
    found = set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.\S+", made.asm["ptx"]))
    return sorted({kind for name in found for kind in name.split(".") if kind in ("e4m3", "s8", "f16", "bf16", "tf32")})


def unpacked(words: int, tile: Tile, pair: bool) -> list[str]:
    """What the matrix instructions multiply by a weight that is read as words."""
    types = {"x_ptr": "*bf16", "v_ptr": "*i32", "bias_ptr": "*bf16", "out_ptr": "*bf16", "cu_ptr": "*i32"}
    types |= dict.fromkeys(("s_ptr", "z_ptr", "part_ptr"), "*fp32") | {"ended_ptr": "*i32"}
    four = words == INT4
    constants: dict[str, Any] = {"HIGH": 1, "GROUP": 128 if four else 4096, "SCALED": int(four), "WORDS": words}
    constants |= {"FOUR": four, "ZEROS": False, "BIAS": True, "COUNTED": True, "PAIR": pair, "EVEN": not pair}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "PRECISION": "tf32"}
    constants |= {"MOST": SHARES if tile.programs else 1}
    return of_ptx(source_of(ASTSource, _multiply_stored, constants, types), tile)


def main() -> None:
    """Print one JSON object."""
    found = {
        f"{dtype} {tile.rows} x {tile.columns}{' pair' * pair}{' counted' * counted}": multiplied(
            dtype, tile, pair, counted
        )
        for dtype, tile, (pair, counted) in product(("fp8e4nv", "i8"), TILES, ((False, False), (True, True)))
    }
    found |= {
        f"words {words} {tile.rows} x {tile.columns} of {tile.stages}{' pair' * pair}": unpacked(words, tile, pair)
        for words, tile, pair in product((FP8, INT8, INT4), stored.TILES, (False, True))
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
