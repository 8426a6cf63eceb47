"""The attention of wide heads, under the tilings that it takes, as Triton compiles it for a GPU that need not be there.

python -m tests.ops.triton.compiled_wide
"""

from __future__ import annotations

import json
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from dgraph.ops.attention.triton import paged_attention
from dgraph.ops.attention.triton.attention_tiling import Tiling, tiling_for
from tests.ops.triton.compiled import source_of
from tests.ops.triton.compiled_vocabulary import stack

HEADS, PAGE, MULTIPROCESSORS = 16, 256, 132
LAYERS = {"sliding": (8, 256), "full": (2, 512)}
"""KV heads and head size of the layers of DiffusionGemma."""
ROWS = {"a canvas": (256, 1), "eight canvases": (2048, 8), "a prompt": (1024, 1), "one row": (1, 1)}
"""Rows and sequences."""


def source(tiling: Tiling, kv_heads: int, d: int, window: bool, values: str = "bf16") -> Any:
    """Queries in bf16, keys and values in pages that the bulk copy engine reads; values: their dtype."""
    function, group = paged_attention._attend, HEADS // kv_heads
    constants: dict[str, Any] = {
        **{"PAGE": PAGE, "GROUP": group, "HEADS": HEADS, "D": d, "WIDTH": d, "ROWS": tiling.block_m // group},
        **{"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "SPLITS": tiling.splits, "PARTS": tiling.parts},
        **{"OFFSETS": 32, "PRECISION": "tf32", "BULK": True, "ROTATED": False, "EARLY": True},
        **(dict.fromkeys(("k_scale_ptr", "v_scale_ptr")) if values == "bf16" else {}),
        **({} if window else {"origin_ptr": None}),
        **dict.fromkeys(("gap_ptr", "own_ptr", "own_k_ptr", "own_v_ptr")),
    }
    types = dict.fromkeys(("q_ptr", "cos_ptr", "sin_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{values}")
    types |= {"k_blocks": f"tensordesc<{values}[{tiling.block_n}, {d}]>"}
    types |= {"v_blocks": f"tensordesc<{values}[{tiling.block_n}, {d // tiling.parts}]>"}
    types |= dict.fromkeys(("table_ptr", "cu_ptr", "limit_ptr", "origin_ptr"), "*i32")
    types |= dict.fromkeys(("part_ptr", "mass_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32") | {"scale": "fp32"}
    names = function.arg_names
    made = source_of(ASTSource, function, constants, {n: t for n, t in types.items() if n not in constants})
    strides = ("q_row", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head", "cos_row", "sin_row")
    aligned = [name for name in names if name not in constants and (name.endswith("_ptr") or name in strides)]
    made.attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return made


def main() -> None:
    """Print one JSON object."""
    found = {}
    for layer, (kv_heads, d) in LAYERS.items():
        for what, (rows, sequences) in ROWS.items():
            for values in ("bf16", "fp8e4nv"):
                if values != "bf16" and "canvas" not in what:
                    continue
                tiling = tiling_for(rows, sequences, (HEADS, kv_heads), d, PAGE, 4096, 2, MULTIPROCESSORS)
                options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
                made = compiled(
                    source(tiling, kv_heads, d, layer == "sliding", values),
                    target=GPUTarget("cuda", 90, 32),
                    options=options,
                )
                found[f"{layer}, {what}, {values}"] = {
                    "shared": made.metadata.shared,
                    "stack": stack(made.asm["cubin"]),
                }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
