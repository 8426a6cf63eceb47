"""dgraph::key_mass: attention that flagged rows of a sequence pay to each of its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import SELECT
from dgraph.ops.draws import pad_rows
from dgraph.ops.kv import kv_votes
from dgraph.ops.registry import Sample, define, numeric
from dgraph.ops.selection import keep_index

CONTRACT = """\
For key row j and KV head h: the mean over the query heads of h's group of the sum over flagged rows i of
softmax_j(scale * q_i . k_j), the softmax over the key rows of the sequence whose position is below limit[i].
q [N, Hq, D], flags bool[N] and limit i32[N] by cu_rows i32[b+1]; k [M, Hkv, D] and key_positions i64[M] by cu_keys
i32[b+1], ascending in a sequence
k in float8_e4m3fn has k_scale f32[M, Hkv], contiguous: a key stands for its scale times what is stored
-> f32[M, Hkv] (float64 for float64). Query head h reads KV head h // (Hq / Hkv). Scores and sums in fp32 at least.
Over the keys of a sequence a head's mass is the number of flagged rows that see a key. Padding rows give 0. They, and
query rows that are not flagged, may hold anything. Deterministic, without atomics; a sequence gives the same bits alone
and in any batch of the reference. It is dgraph::kv_votes with flags in place of its bounds, and shares its kernel."""

EVERY_ROW = (-(1 << 31), (1 << 31) - 1)
"""The bounds `first` and `last` of dgraph::kv_votes under which each row votes that sees a key."""


def every_sequence(cu_rows: Tensor) -> tuple[Tensor, Tensor]:
    """The arguments `window` and `action` of dgraph::kv_votes with which every sequence votes."""
    b = cu_rows.shape[0] - 1
    return cu_rows.new_zeros(b, 2), cu_rows.new_full((b,), SELECT)


def reference(
    q: Tensor,
    k: Tensor,
    flags: Tensor,
    key_positions: Tensor,
    cu_rows: Tensor,
    cu_keys: Tensor,
    limit: Tensor,
    scale: float,
    k_scale: Tensor | None = None,
) -> Tensor:
    index, offsets = keep_index.reference(flags, cu_rows, -1)
    where = index, key_positions, offsets, cu_keys, limit[index], *every_sequence(cu_rows)
    return kv_votes.reference(q[index], k, *where, scale, *EVERY_ROW, k_scale)


def fake(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(k.shape[:2], dtype=numeric(q.dtype))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for of in kv_votes.samples(generator):
        if of.name.startswith(("the response", "every", "all rows", "no rows", "fewer", "the same")):
            flags = torch.rand(len(of.args[0]), generator=generator) < 0.4
            assert of.padded is not None
            yield Sample(of.name, _of_votes(of.args, flags), _of_votes(of.padded, pad_rows(flags, 3)))


def _of_votes(args: tuple[Any, ...], flags: Tensor) -> tuple[Any, ...]:
    q, k, _, *keys = args[:7]
    return q, k, flags, *keys, args[9], *args[12:13]


OP = define(
    "key_mass",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    own_rows=("q", "flags", "limit"),
    scales={"k": "k_scale"},
    padding=(0,),
    kernel="dgraph.ops.kv.triton.key_mass:kernel",
)
