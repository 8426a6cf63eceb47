"""The product by stored weights in roles as Triton compiles it for a GPU that need not be there.

python -m tests.ops.triton.compiled_stored_roles
"""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compiled
from triton.experimental.gluon._runtime import GluonASTSource

from dgraph.ops.products.triton import stored_roles
from dgraph.ops.products.triton.words import FP8, INT4, INT8
from dgraph.ops.triton import hopper
from tests.ops.triton.compiled import source_of
from tests.ops.triton.compiled_vocabulary import stack


def source(words: int, rows: int, pair: bool) -> Any:
    """Of 4-bit numbers with a scale for 128 columns, of others with one for a row; rows are counted on the device."""
    types = {"x_boxes": f"tensordesc<bf16[{rows}, 64],{hopper.layout_of(2)!r}>"}
    types |= {"w_boxes": f"tensordesc<u8[64, 128],{hopper.layout_of(1)!r}>"}
    types |= dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16") | dict.fromkeys(("part_ptr", "scale_ptr"), "*fp32")
    types |= dict.fromkeys(("ended_ptr", "cu_ptr"), "*i32")
    constants = {"ROWS": rows, "SPLITS": 8, "STAGES": 3, "UNITS": 2 if words == INT4 else 1, "PROGRAMS": 132}
    constants |= {"WORDS": words, "OF": 1}
    constants |= {"GROUP": 128 if words == INT4 else 0, "COUNTED": True, "BIAS": True, "PAIR": pair, "EARLY": True}
    kernel = stored_roles._multiply_stored_in_roles
    made = source_of(GluonASTSource, kernel, constants, types)
    aligned = ("out_ptr", "part_ptr", "scale_ptr", "d_out", "d_in")
    made.attrs = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    return made


def main() -> None:
    """Print one JSON object."""
    found = {}
    for (name, words), rows, pair in product(
        (("int4", INT4), ("fp8", FP8), ("int8", INT8)), stored_roles.ROWS, (False, True)
    ):
        options = {"num_warps": stored_roles.WARPS.value, "launch_pdl": True}
        kernel = compiled(source(words, rows, pair), target=GPUTarget("cuda", 90, 32), options=options)
        text = kernel.asm["ptx"]
        calls = re.findall(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*(\{|%)", text)
        found[f"{name} {rows} {'unit' if pair else 'linear'}"] = {
            "products": len(calls),
            "left factors in registers": calls.count("{"),
            "shared": kernel.metadata.shared,
            "stack": stack(kernel.asm["cubin"]),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
