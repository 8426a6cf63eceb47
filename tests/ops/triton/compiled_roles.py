"""The attention in roles as Triton compiles it for a GPU that need not be there.

python -m tests.ops.triton.compiled_roles [float8]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compiled
from triton.experimental.gluon._runtime import GluonASTSource

from dgraph.ops.attention.triton import attention_float8, attention_roles
from dgraph.ops.triton import hopper
from tests.ops.triton.compiled import source_of
from tests.ops.triton.compiled_vocabulary import stack

CONSTANTS: dict[str, Any] = {"PAGE": 128, "GROUP": 4, "HEADS": 32, "D": 128, "OFFSETS": 32, "ROTATED": True}
"""Queries that are rotated, four heads on one of K and V."""
TYPES = {
    **dict.fromkeys(("q_ptr", "cos_ptr", "sin_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("table_ptr", "cu_ptr", "limit_ptr"), "*i32"),
    **dict.fromkeys(("part_ptr", "mass_ptr"), "*fp32"),
    "scale": "fp32",
}


def source() -> Any:
    """Over keys and values in bf16."""
    keys = attention_roles.KEYS
    blocks = f"tensordesc<bf16[{keys}, 128],{hopper.layout_of(2)!r}>"
    sizes = {"ROWS": 32, "HIGH": 64, "BLOCK_N": keys, "STAGES": attention_roles.STAGES}
    types = {**TYPES, "k_blocks": blocks, "v_blocks": blocks}
    return source_of(GluonASTSource, attention_roles._attend_in_roles, CONSTANTS | sizes, types)


def source_of_float8() -> Any:
    """Over keys and values in float8, in shares."""
    keys, rows = attention_float8.KEYS, attention_float8.ROWS
    blocks = f"tensordesc<fp8e4nv[{keys}, 128],{hopper.layout_of(1)!r}>"
    lines = f"tensordesc<fp32[1, {keys}],{attention_float8.ONE_LINE!r}>"
    sizes = {"ROWS": rows // 4, "BLOCK_M": rows, "BLOCK_N": keys, "STAGES": attention_float8.STAGES, "SPLITS": 2}
    types = {**TYPES, "k_blocks": blocks, "v_blocks": blocks, "k_lines": lines, "v_lines": lines}
    return source_of(GluonASTSource, attention_float8._attend_in_eight_bits, CONSTANTS | sizes, types)


def main() -> None:
    """Print one JSON object."""
    eight = sys.argv[1:] == ["float8"]
    options = {"num_warps": 4, **({"maxnreg": attention_float8.REGISTERS} if eight else {})}
    kernel = compiled(source_of_float8() if eight else source(), target=GPUTarget("cuda", 90, 32), options=options)
    text = kernel.asm["ptx"]
    found = {
        "products": text.count("wgmma.mma_async.sync"),
        "scores": text.count(".f32.e4m3.e4m3"),
        "loads": text.count("cp.async.bulk.tensor"),
        "registers moved between roles": "setmaxnreg" in text,
        "shared": kernel.metadata.shared,
        "stack": stack(kernel.asm["cubin"]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
