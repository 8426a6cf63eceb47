"""Kernels that start early as Triton compiles them for a GPU that need not be there.

python -m tests.ops.triton.compiled_early
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from dgraph.ops.attention.triton.attention_shares import _add_up, _add_up_rows
from dgraph.ops.attention.triton.paged_attention import _attend
from dgraph.ops.kv.triton.kv_write import _write
from dgraph.ops.products.triton.rows_quantise import _quantise_live_rows
from dgraph.private.triton import LoadedKernel, compilations, put
from tests.ops.triton.compiled import ACCESS, source_of


def source(function: Any, early: bool) -> Any:
    """A kernel with small sizes; the attention with a rotation, and with shares of the keys."""
    pointers = {n: "*bf16" for n in function.arg_names if n.endswith("_ptr") or n.endswith("_blocks")}
    pointers |= dict.fromkeys(("table_ptr", "cu_ptr", "limit_ptr"), "*i32") | {"positions_ptr": "*i64"}
    pointers |= dict.fromkeys(("part_ptr", "mass_ptr", "scales_ptr"), "*fp32") | {"values_ptr": "*i8"}
    constants: dict[str, Any] = {"PAGE": 16, "SIZE": 64, "BLOCK": 64, "OFFSETS": 16, "D": 16, "WIDTH": 16, "SOME": 4}
    constants |= {"SPLITS": 2, "PARTS": 1, "BLOCK_S": 2, "BLOCK_M": 16, "BLOCK_N": 16, "ROWS": 16, "GROUP": 1}
    constants |= {"HEADS": 4, "BLOCK_H": 4, "INTEGERS": True, "REACH": 127, "origin_ptr": None, "window": 0}
    constants |= dict.fromkeys(("gap_ptr", "own_ptr", "own_k_ptr", "own_v_ptr", "skip_ptr"))
    constants |= {"PRECISION": "tf32", "BULK": False, "ROTATED": True, "EARLY": early}
    return source_of(ASTSource, function, constants, {**pointers, "scale": "fp32"})


def described(function: Any, early: bool) -> dict[str, Any]:
    """Where it waits, lets the next one start, and first touches memory; lines of its PTX."""
    options = {"num_warps": 4, "num_stages": 2} | ({"launch_pdl": True} if early else {})
    made = compiled(source(function, early), target=GPUTarget("cuda", 90, 32), options=options)
    lines = made.asm["ptx"].splitlines()
    return {
        "hash": made.hash,
        "early": made.metadata.launch_pdl,
        "wait": [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line],
        "launch": [i for i, line in enumerate(lines) if "griddepcontrol.launch_dependents" in line],
        "access": next(i for i, line in enumerate(lines) if ACCESS.search(line)),
        "branch": next(i for i, line in enumerate(lines) if re.search(r"\b(bra|ret)\b", line)),
    }


def restored(function: Any) -> dict[str, Any]:
    """What becomes of a kernel that is loaded from the files that a store keeps, in another cache of Triton's."""
    options = {"num_warps": 4, "num_stages": 2, "launch_pdl": True}
    target = GPUTarget("cuda", 90, 32)
    first = compiled(source(function, True), target=target, options=options)
    files = LoadedKernel("", "", first).files()
    made = compilations((_write.__module__, _attend.__module__))
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(dir=Path(os.environ["TRITON_CACHE_DIR"]).parent)
    put(first.hash, files)
    again = compiled(source(function, True), target=target, options=options)
    same = again.hash == first.hash and again.asm["cubin"] == first.asm["cubin"]
    return {"same": same, "early": again.metadata.launch_pdl, "compiled": made}


def main() -> None:
    """Print one JSON object."""
    kernels = {f.__name__: f for f in (_attend, _add_up, _add_up_rows, _quantise_live_rows, _write)}
    found: dict[str, Any] = {n: [described(f, early) for early in (True, False)] for n, f in kernels.items()}
    print(json.dumps({**found, "restored": restored(_write)}))


if __name__ == "__main__":
    main()
