"""dgraph::kv_update: store the keys and values of changed rows, and tell by how much the values changed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dgraph.ops import kv_write
from dgraph.ops.registry import define
from dgraph.ops.rows import slots_of

CONTRACT = """\
As kv_write: writes k and v [K, Hkv, D] of every live row to k_cache and v_cache [pages, page, Hkv, D], position p
of sequence s at cache[page_table[s, p // page], p % page].
-> [K, Hkv, D] in the dtype of v: v less what v_cache held for the row before, rounded once; zeros for padding rows.
positions i64[K]; page_table i32[b, P]; cu_rows i32[b+1], the offsets of these K rows.
Padding rows write nothing and may hold anything; the rows of a step address distinct slots. A slot that was never
written gives a difference of no meaning, NaN included. A row whose page is not assigned (a negative entry) is an
error in the reference and undefined in a kernel. Deterministic."""


def reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
) -> Tensor:
    slots = slots_of("kv_update", positions, page_table, cu_rows, k_cache.shape[1])
    live = slots[0].shape[0]
    change = v.new_zeros(v.shape)
    change[:live] = v[:live] - v_cache[slots]
    k_cache[slots] = k[:live]
    v_cache[slots] = v[:live]
    return change


def fake(k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(v.shape)


OP = define(
    "kv_update",
    reference,
    samples=kv_write.placed_samples,
    contract=CONTRACT,
    fake=fake,
    mutates=("k_cache", "v_cache"),
    count="cu_rows",
    padding=(0,),
    kernel="dgraph.ops.triton.kv_update:kernel",
)
