"""The product in roles as Triton compiles it for a GPU that need not be there.

python -m tests.ops.triton.compiled_product
"""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compiled
from triton.experimental.gluon._runtime import GluonASTSource

from dgraph.ops.products.triton import product_cases, product_roles
from dgraph.ops.triton import hopper
from tests.ops.triton.compiled import source_of
from tests.ops.triton.compiled_early import ACCESS


def source(dtype: str, pair: bool) -> Any:
    """All cases; factors of 8 bits have a scale for each row, and all rows are live."""
    itemsize = 2 if dtype == "bf16" else 1
    layout, depth = hopper.layout_of(itemsize), product_cases.BYTES.value // itemsize
    boxes = {rows: f"tensordesc<{dtype}[{rows}, {depth}],{layout!r}>" for rows in (16, 64)}
    types = {"x_boxes": boxes[64], "x_low": boxes[16], "w_boxes": boxes[64], "w_low": boxes[16]}
    types |= {"part_ptr": "*i32" if dtype == "i8" else "*fp32"} | dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32")
    types |= dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16") | dict.fromkeys(("ended_ptr", "cu_ptr"), "*i32")
    cases = product_cases.cases(pair, itemsize)
    constants = {"CASES": tuple((c.above, c.up_to, c.rows, c.columns, c.splits) for c in cases), "GROUP": 8}
    constants |= {"PROGRAMS": 132, "COUNTED": itemsize == 2, "HIGH": 2 - itemsize, "BIAS": True, "PAIR": pair}
    constants |= {"APART": product_roles.IMPRECISE if dtype == "fp8e4nv" else 0, "EARLY": True}
    made = source_of(GluonASTSource, product_roles._multiply_in_roles, constants, types)
    names = product_roles._multiply_in_roles.arg_names
    made.attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in ("out_ptr", "part_ptr", "d_out", "d_in")}
    return made


def _before_wait(text: str) -> list[str]:
    """What touches memory in front of the first wait. The warp that loads begins when those that multiply let it."""
    lines = text[text.index(".entry") :].splitlines()
    first = next(i for i, line in enumerate(lines) if "griddepcontrol.wait" in line)
    return [line for line in lines[:first] if ACCESS.search(line)]


def main() -> None:
    """Print one JSON object."""
    found = {}
    for dtype, (name, pair) in product(("bf16", "fp8e4nv", "i8"), (("linear", False), ("unit", True))):
        kernel = compiled(
            source(dtype, pair), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "launch_pdl": True}
        )
        text = kernel.asm["ptx"]
        found[f"{dtype} {name}"] = {
            "products": text.count("wgmma.mma_async.sync"),
            "of": sorted(set(re.findall(r"wgmma\S+\.(bf16|e4m3|s8)\.(?:bf16|e4m3|s8)", text))),
            "loads": text.count("cp.async.bulk.tensor"),
            "registers moved between roles": "setmaxnreg" in text,
            "stores of 16 bytes": text.count("st.global.v4.b32"),
            "values of shares that go alone": text.count("ld.global.cg.b32"),
            "shared": kernel.metadata.shared,
            "before its wait": _before_wait(text),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
