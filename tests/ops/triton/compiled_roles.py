"""The attention in roles as Triton compiles it for a GPU that need not be there.

python -m tests.ops.triton.compiled_roles
"""

from __future__ import annotations

import json
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compiled
from triton.experimental.gluon._runtime import GluonASTSource

from dgraph.ops.triton import attention_roles, hopper
from tests.ops.triton.compiled import source_of


def source() -> Any:
    """Queries in bf16 that are rotated, four heads on one of K and V."""
    function = attention_roles._attend_in_roles
    blocks = f"tensordesc<bf16[{attention_roles.KEYS}, 128],{hopper.layout_of(2)!r}>"
    pointers = dict.fromkeys(("q_ptr", "cos_ptr", "sin_ptr", "out_ptr"), "*bf16")
    pointers |= dict.fromkeys(("table_ptr", "cu_ptr", "limit_ptr"), "*i32")
    constants = {
        **{"PAGE": 128, "GROUP": 4, "HEADS": 32, "D": 128, "ROWS": 32, "HIGH": 64, "BLOCK_N": attention_roles.KEYS},
        **{"STAGES": attention_roles.STAGES, "OFFSETS": 32, "ROTATED": True},
    }
    types = {**pointers, "k_blocks": blocks, "v_blocks": blocks, "scale": "fp32"}
    return source_of(GluonASTSource, function, constants, types)


def main() -> None:
    """Print one JSON object."""
    kernel = compiled(source(), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    text = kernel.asm["ptx"]
    found = {
        "products": text.count("wgmma.mma_async.sync"),
        "loads": text.count("cp.async.bulk.tensor"),
        "registers moved between roles": "setmaxnreg" in text,
        "shared": kernel.metadata.shared,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
