"""dgraph::kv_update: store the keys and values of changed rows, and return the change of the values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.kv import kv_write
from dgraph.ops.kv.scales import store, unscaled
from dgraph.ops.padded import slots_of
from dgraph.ops.registry import Sample, define

CONTRACT = """\
As kv_write: writes k and v [K, Hkv, D] of every live row to k_cache and v_cache [pages, page, Hkv, D], position p
of sequence s at cache[page_table[s, p // page], p % page].
-> [K, Hkv, D] in the dtype of v: what v_cache holds for the row now (v; with v_scale, v as it was rounded, times its
scale) less what it held before, rounded once; zeros for padding rows.
Caches in float8_e4m3fn have scales k_scale and v_scale, as in kv_write.
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    slots = slots_of("kv_update", positions, page_table, cu_rows, k_cache.shape[1])
    live = slots[0].shape[0]
    change = v.new_zeros(v.shape)

    def held() -> Tensor:
        return unscaled(v_cache[slots], None if v_scale is None else v_scale[slots], v.dtype)

    before = held()
    store("kv_update", k[:live], slots, k_cache, k_scale)
    store("kv_update", v[:live], slots, v_cache, v_scale)
    change[:live] = (v[:live] if v_scale is None else held()) - before
    return change


def fake(k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(v.shape)


def samples(generator: torch.Generator) -> Iterator[Sample]:
    yield from kv_write.placed_samples(generator)
    yield from kv_write.in_float8(kv_write.placed_samples(generator))


OP = define(
    "kv_update",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    mutates=("k_cache", "v_cache", "k_scale", "v_scale"),
    scales={"k_cache": "k_scale", "v_cache": "v_scale"},
    count="cu_rows",
    padding=(0,),
    kernel="dgraph.ops.kv.triton.kv_update:kernel",
)
