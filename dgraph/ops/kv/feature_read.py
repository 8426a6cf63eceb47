"""dgraph::feature_read: read one vector per row from a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.kv import feature_write
from dgraph.ops.padded import slots_of
from dgraph.ops.registry import Sample, define

CONTRACT = """\
What feature_write stored: position p of sequence s lives at cache[page_table[s, p // page], p % page].
cache [pages, page, ...], contiguous within a slot; positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1]
-> [N, ...], contiguous, in the dtype of cache; an exact copy, and zeros for padding rows.
Padding rows may hold anything. A row whose page is not assigned (a negative entry) is an error in the reference and
undefined in a kernel. Deterministic."""


def reference(cache: Tensor, positions: Tensor, page_table: Tensor, cu_rows: Tensor) -> Tensor:
    slots = slots_of("feature_read", positions, page_table, cu_rows, cache.shape[1])
    out = cache.new_zeros((positions.shape[0], *cache.shape[2:]))
    out[: slots[0].shape[0]] = cache[slots]
    return out


def fake(cache: Tensor, positions: Tensor, *rest: Any) -> Tensor:
    return cache.new_empty((positions.shape[0], *cache.shape[2:]))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for sample in feature_write.placed_samples(generator):
        assert sample.padded is not None
        yield Sample(sample.name, sample.args[1:], sample.padded[1:])
        heads = [(c.unflatten(2, (c.shape[2], 1)).contiguous(), *rest) for _, c, *rest in (sample.args, sample.padded)]
        yield Sample(f"{sample.name}, heads", heads[0], heads[1])


OP = define(
    "feature_read",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    copies=("cache",),
    padding=(0,),
    kernel="dgraph.ops.kv.triton.feature_read:kernel",
)
