"""The kernels of vocabulary_attention as Triton compiles them for a GPU that need not be there.

python -m tests.ops.triton.compiled_vocabulary
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from dgraph.ops.vocabulary.triton import vocabulary_attention, vocabulary_part
from tests.ops.triton.compiled import source_of

WIDTH = 2816
"""Of DiffusionGemma."""


def source(function: Any, absent: tuple[str, ...]) -> Any:
    """A kernel in bf16 for whole chunks; arguments that are absent are None."""
    names = function.arg_names
    types = dict.fromkeys(("share_ptr", "soft_ptr"), "*bf16") | {"cu_ptr": "*i32", "softcap": "fp32"}
    types |= dict.fromkeys(("seed_ptr", "first_ptr", "best_ptr", "token_ptr"), "*i64")
    types = {name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names}
    constants: dict[str, Any] = {"WIDTH": WIDTH, "CHUNK": vocabulary_part.CHUNK, "BLOCK": 1024, "CAPPED": True}
    constants |= dict.fromkeys(absent)
    made = source_of(ASTSource, function, constants, {n: t for n, t in types.items() if n not in constants})
    aligned = [n for n in names if n not in constants and (n.endswith("_ptr") or n in ("start", "count", "share_row"))]
    made.attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return made


def stack(binary: bytes) -> int:
    """Bytes of local memory of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", told))


def main() -> None:
    """Print one JSON object."""
    found = {}
    for name, function, absent, warps in (
        ("row", vocabulary_part._weigh_ids, ("first_ptr",), vocabulary_part.CHUNK // vocabulary_part.HELD),
        ("row of a rank", vocabulary_part._weigh_ids, (), vocabulary_part.CHUNK // vocabulary_part.HELD),
        ("finish", vocabulary_attention._finish, (), 4),
    ):
        made = compiled(source(function, absent), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        text = made.asm["ptx"]
        found[name] = {
            "loads": text.count("ld.global.v4.b32"),
            "stores": text.count("st.global.v4.b32"),
            "stack": stack(made.asm["cubin"]),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
