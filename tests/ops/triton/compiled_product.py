"""The product in roles as Triton compiles it for a GPU that need not be there.

python -m tests.ops.triton.compiled_product
"""

from __future__ import annotations

import json
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compiled
from triton.experimental.gluon._runtime import GluonASTSource

from dgraph.ops.triton import hopper, product_cases, product_roles
from tests.ops.triton.compiled import source_of


def source(pair: bool) -> Any:
    """Factors in bf16, all cases."""
    boxes = {rows: f"tensordesc<bf16[{rows}, 64],{hopper.LAYOUT!r}>" for rows in (16, 64)}
    types = {"x_boxes": boxes[64], "x_low": boxes[16], "w_boxes": boxes[64], "part_ptr": "*fp32"}
    types |= dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16") | dict.fromkeys(("ended_ptr", "cu_ptr"), "*i32")
    sizes = tuple((c.above, c.up_to, c.rows, c.columns, c.splits) for c in product_cases.cases(pair))
    constants = {"CASES": sizes, "GROUP": 8, "PROGRAMS": 132, "BIAS": True, "PAIR": pair}
    made = source_of(GluonASTSource, product_roles._multiply_in_roles, constants, types)
    names = product_roles._multiply_in_roles.arg_names
    made.attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in ("out_ptr", "part_ptr", "d_out", "d_in")}
    return made


def main() -> None:
    """Print one JSON object."""
    found = {}
    for name, pair in (("linear", False), ("unit", True)):
        kernel = compiled(source(pair), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        text = kernel.asm["ptx"]
        found[name] = {
            "products": text.count("wgmma.mma_async.sync"),
            "loads": text.count("cp.async.bulk.tensor"),
            "registers moved between roles": "setmaxnreg" in text,
            "stores of 16 bytes": text.count("st.global.v4.b32"),
            "values of shares that go alone": text.count("ld.global.cg.b32"),
            "shared": kernel.metadata.shared,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
