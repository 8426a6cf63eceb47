"""Experts over rows in 8 bits as Triton compiles them for a GPU that need not be there.

python -m tests.ops.triton.compiled_experts
"""

from __future__ import annotations

import json
import re
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from dgraph.ops.experts.triton.experts_rounded import TILES, _gate_and_round_rows, _multiply_group_numbers
from dgraph.ops.products.triton.eight_bits import IMPRECISE
from dgraph.ops.products.triton.stored import Tile
from tests.ops.triton.compiled import source_of

NUMBERS = {"fp8": "fp8e4nv", "int8": "i8"}


def multiplied(kind: str, tile: Tile) -> list[str]:
    """What the matrix instructions of PTX multiply: e4m3, s8, ..."""
    types = {"x_ptr": f"*{NUMBERS[kind]}", "w_ptr": f"*{NUMBERS[kind]}", "out_ptr": "*bf16", "ends_ptr": "*i32"}
    types |= {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}
    constants: dict[str, Any] = {"HIGH": 1, "INTEGERS": kind == "int8", "IMPRECISE": IMPRECISE}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    text = ptx(_multiply_group_numbers, constants, types, tile.warps, tile.stages)
    found = set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.\S+", text))
    return sorted({kind for name in found for kind in name.split(".") if kind in ("e4m3", "s8", "f16", "bf16", "tf32")})


def rounded(kind: str, columns: int) -> list[str]:
    """Of the rounding between the products, what divides, and what converts to float8."""
    types = {"both_ptr": "*bf16", "values_ptr": f"*{NUMBERS[kind]}", "scales_ptr": "*fp32", "ends_ptr": "*i32"}
    constants: dict[str, Any] = {"SIZE": columns, "ROWS": 1, "BLOCK": 1 << (columns - 1).bit_length(), "SILU": True}
    constants |= {"INTEGERS": kind == "int8", "REACH": 127.0 if kind == "int8" else 448.0}
    text = ptx(_gate_and_round_rows, constants, types, 4, 3)
    return sorted(set(re.findall(r"div\.\S+|cvt\.\S+e4m3\S+", text)))


def ptx(kernel: Any, constants: dict[str, Any], types: dict[str, str], warps: int, stages: int) -> str:
    """The kernel as compiled for Hopper."""
    source = source_of(ASTSource, kernel, constants, types)
    made = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    text: str = made.asm["ptx"]
    return text


def main() -> None:
    """Print one JSON object."""
    found = {f"{kind} {tile.rows} x {tile.columns}": multiplied(kind, tile) for kind in NUMBERS for tile in TILES}
    print(json.dumps(found | {f"{kind} between, {n}": rounded(kind, n) for kind in NUMBERS for n in (512, 768)}))


if __name__ == "__main__":
    main()
