"""The kernels of vocabulary_attention as Triton compiles them for a GPU that need not be there.

python -m tests.ops.triton.compiled_vocabulary
"""

from __future__ import annotations

import json
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from dgraph.ops.triton import vocabulary_attention as of
from tests.ops.triton.compiled import source_of

WIDTH, VOCAB = 2816, 262_144
"""Of DiffusionGemma."""


def source(function: Any, tiling: of.Tiling, absent: tuple[str, ...]) -> Any:
    """A kernel in bf16 at the sizes of a tiling; arguments that are absent are None."""
    names = function.arg_names
    types = dict.fromkeys(("h_ptr", "w_ptr", "share_ptr", "soft_ptr"), "*bf16") | {"cu_ptr": "*i32", "softcap": "fp32"}
    types |= dict.fromkeys(("seed_ptr", "first_ptr", "best_ptr", "token_ptr"), "*i64")
    types = {name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names}
    constants: dict[str, Any] = {"WIDTH": WIDTH, "BLOCK": of.BLOCK, "CAPPED": True, "BEGIN": False, "PRECISION": "tf32"}
    constants |= {"ROWS": tiling.rows, "IDS": tiling.ids, "COLUMNS": tiling.columns, "DEPTH": tiling.depth}
    constants |= {"STAGES": tiling.stages, "SPLITS": tiling.splits, **dict.fromkeys(absent)}
    made = source_of(ASTSource, function, constants, {n: t for n, t in types.items() if n not in constants})
    aligned = [n for n in names if n not in constants and (n.endswith("_ptr") or n in ("h_row", "w_row", "chunk"))]
    made.attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return made


def main() -> None:
    """Print one JSON object."""
    found, results = {}, ("best_ptr", "confidence_ptr", "token_ptr", "entropy_ptr")
    for name, rows, function, absent in (
        ("score", 2048, of._score_ids, ("first_ptr",)),
        ("weigh", 2048, of._weigh_ids, ("first_ptr",)),
        ("finish", 2048, of._finish, ("numbers_ptr",)),
        ("score of a rank", 256, of._score_ids, ()),
        ("weigh of a rank", 256, of._weigh_ids, ()),
        ("finish of a rank", 256, of._finish, results),
    ):
        tiling = of.tiling_for(rows, WIDTH, VOCAB, 2)
        options = {"num_warps": 4 if function is of._finish else tiling.warps}
        made = compiled(source(function, tiling, absent), target=GPUTarget("cuda", 90, 32), options=options)
        text = made.asm["ptx"]
        found[name] = {
            "products": text.count("wgmma.mma_async"),
            "loads": text.count("cp.async.cg"),
            "shared": made.metadata.shared,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
