"""Kernels over keys and values in float8 as Triton compiles them for a GPU that need not be there.

python -m tests.ops.triton.compiled_float8
"""

from __future__ import annotations

import json
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled

from dgraph.ops.attention.triton import paged_attention, partial_attention, sparse_attention, sparse_dense
from dgraph.ops.kv.triton import kv_pack, kv_scores, kv_update, kv_votes, kv_write
from dgraph.ops.selection.triton import compare_rows, least_similar
from tests.ops.triton.compiled import source_of

STORED = ("k_cache_ptr", "v_cache_ptr", "cache_ptr", "k_pack_ptr", "v_pack_ptr", "kp_ptr", "vp_ptr")
"""Arguments in float8, of every kernel that has them; k_ptr and v_ptr are, where they are read with scales."""
READS = {
    paged_attention._attend: ("k_ptr", "v_ptr", "k_blocks", "v_blocks"),
    partial_attention._mixed: ("k_ptr", "v_ptr", "k_blocks", "v_blocks"),
    partial_attention._exact: ("k_ptr", "v_ptr", "k_blocks", "v_blocks"),
    sparse_attention._attend_kept: ("k_ptr", "v_ptr", "k_blocks", "v_blocks", "kp_blocks", "vp_blocks"),
    sparse_dense._attend_rows: ("k_ptr", "v_ptr", "k_blocks", "v_blocks"),
    kv_scores._score: ("k_ptr",),
    kv_votes._weigh: ("k_ptr",),
    kv_votes._vote: ("k_ptr",),
    kv_write._write: (),
    kv_update._update: (),
    compare_rows._sum_rows: (),
    least_similar._compare: (),
    kv_pack._copy: (),
}
CONSTANTS: dict[str, Any] = {
    **{"PAGE": 32, "SIZE": 64, "BLOCK": 64, "OFFSETS": 16, "D": 32, "WIDTH": 32, "SOME": 2, "GROUP": 2, "HEADS": 4},
    **{"KV_HEADS": 2, "ALL_HEADS": 2, "ROWS": 16, "BLOCK_M": 32, "BLOCK_N": 32, "SPLITS": 2, "PARTS": 1},
    **{"STAGES": 2, "KEPT_STAGES": 2, "PRECISION": "tf32"},
    **{"BULK": False, "KEPT_BULK": False, "ROTATED": False, "EARLY": False},
    **{"ONLY": False, "ADAPT": False, "LEAST": 16, "FEW": 0, "CHANGES": 16, "NARROW": 16, "SEQUENCES": 16},
    **{"SAMPLES": 16, "SHARED": False, "WANTED": 2, "KEYS": 32, "VOTERS": 16, "BLOCK_V": 32, "D_WIDTH": 32},
}
INTEGERS = {
    **dict.fromkeys(("positions_ptr", "changed_ptr", "at_ptr"), "*i64"),
    **dict.fromkeys(("table_ptr", "cu_ptr", "limit_ptr", "cu_keys_ptr", "cu_changed_ptr", "window_ptr"), "*i32"),
    **dict.fromkeys(("order_ptr", "offsets_ptr", "slots_ptr", "action_ptr", "count_ptr", "start_ptr"), "*i32"),
    **dict.fromkeys(("voters_ptr", "seen_ptr", "starts_ptr", "listed_ptr", "index_ptr"), "*i32"),
    **dict.fromkeys(("only_ptr", "full_ptr", "adapt_ptr", "skip_ptr", "own_ptr"), "*i1"),
    **dict.fromkeys(("origin_ptr", "gap_ptr"), "*i32"),
}
RANGES = ("origin_ptr", "window", "gap_ptr", "own_ptr", "own_k_ptr", "own_v_ptr", "skip_ptr")
"""Arguments of rows that see a window, two ranges or a key of their own, and of rows that are not written."""
SUMS = ("part_ptr", "mass_ptr", "sums_ptr", "similar_ptr", "mean_ptr")


def source(function: Any, scaled: bool, copied: bool = False, ranges: bool = False, paged: bool = False) -> Any:
    """A kernel with small sizes, with scales or without.

    copied: what is packed is in float8 where it comes from, too. ranges: rows see a window with a gap, and keys of
    their own. paged: kept keys stay in their pages.
    """
    names = function.arg_names
    scales = [n for n in names if n.endswith(("scale_ptr", "by_ptr"))]
    types = {n: "*bf16" for n in names if n.endswith(("_ptr", "_blocks"))} | {"scale": "fp32"}
    types |= INTEGERS | dict.fromkeys(SUMS, "*fp32") | dict.fromkeys(scales, "*fp32")
    constants = CONSTANTS | ({} if ranges else dict.fromkeys(RANGES) | {"window": 0})
    stored = {*STORED, *READS[function], *(("k_ptr", "v_ptr") if copied else ())}
    if scaled:
        types |= dict.fromkeys(stored, "*fp8e4nv")
    absent = [n for n in scales if not scaled or (n in ("k_by_ptr", "v_by_ptr") and not copied)]
    if function is sparse_attention._attend_kept:
        absent += [n for n in names if n.startswith(("kp_", "vp_"))] if paged else ["index_ptr"]
    elif paged:
        absent += [n for n in names if n.startswith(("k_", "v_")) and n.endswith("_ptr")]
    return source_of(ASTSource, function, constants | dict.fromkeys(absent), types)


def lines_of(function: Any, **how: bool) -> int:
    """Lines of PTX."""
    made = compiled(
        source(function, **how), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2}
    )
    return len(made.asm["ptx"].splitlines())


def main() -> None:
    """Print one JSON object."""
    found = {f"{f.__module__.rpartition('.')[2]}.{f.__name__}": lines_of(f, scaled=True) for f in READS}
    found["kv_pack._copy of float8"] = lines_of(kv_pack._copy, scaled=True, copied=True)
    found["kv_write._write but some"] = lines_of(kv_write._write, scaled=True, ranges=True)
    for scaled in (False, True):
        name = f"paged_attention._attend of two ranges{', float8' * scaled}"
        found[name] = lines_of(paged_attention._attend, scaled=scaled, ranges=True)
    for scaled in (False, True):
        name = f"sparse_attention._attend_kept in pages{', float8' * scaled}"
        found[name] = lines_of(sparse_attention._attend_kept, scaled=scaled, paged=True)
    found["kv_pack._copy of positions"] = lines_of(kv_pack._copy, scaled=False, paged=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
