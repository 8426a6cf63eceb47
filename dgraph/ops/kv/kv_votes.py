"""dgraph::kv_votes: attention that chosen rows of a sequence pay to each of its keys (MaskKV, SnapKV, H2O)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT, per_sequence, spans_of
from dgraph.ops.draws import cu_rows_of, pad_rows, positions_of
from dgraph.ops.kv.scales import check_scale, scaled, unscaled
from dgraph.ops.padded import GROUP_ELEMENTS, check_heads
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
The votes for key row j of a sequence with action SELECT, and for KV head h: the mean over the query heads of h's group
of
the sum over voters i of softmax_j(scale * q_i . k_j), the softmax over the key rows of the sequence whose position is
below limit[i]. Voters: of the n query rows of the sequence with lo + first <= position < lo + last, for its window
[lo, hi), those from number first_quarters * n // 4 on and below number last_quarters * n // 4.
MaskKV Eq. 6 has first=0, last=2**31-1 (the response votes), its Table 11 also the quarters 0 to 1, 1 to 3 or 3 to 4
(masks at the front, in the middle or at the back); SnapKV first=-32, last=0 (the last rows of the prompt); H2O
first=-2**31, last=2**31-1 (all rows).
q [N, Hq, D], positions i64[N] and limit i32[N] by cu_rows i32[b+1]; k [M, Hkv, D] and key_positions i64[M] by
cu_keys i32[b+1]; positions ascend in a sequence; window i32[b, 2]; action i32[b]; first and last fit in i32; quarters
from 0 to 4 and ascending
k in float8_e4m3fn has k_scale f32[M, Hkv], contiguous: a key stands for its scale times what is stored
-> f32[M, Hkv] (float64 for float64). Query head h reads KV head h // (Hq / Hkv). Scores and sums in fp32 at least.
Over the keys of a sequence a head's votes sum to the number of voters that see a key; one that sees none votes for
none. Sequences with other actions, and padding rows, give 0. Padding rows, and query rows that do not vote, may hold
anything. Deterministic, without atomics; a sequence gives the same bits alone and in any batch of the reference."""


def reference(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    key_positions: Tensor,
    cu_rows: Tensor,
    cu_keys: Tensor,
    limit: Tensor,
    window: Tensor,
    action: Tensor,
    scale: float,
    first: int,
    last: int,
    k_scale: Tensor | None = None,
    first_quarters: int = 0,
    last_quarters: int = 4,
) -> Tensor:
    check_heads("kv_votes", q, k, 1)
    check_scale("kv_votes", k, k_scale)
    out = q.new_zeros(k.shape[:2], dtype=numeric(q.dtype))
    lows = window[:, 0].tolist()
    for s, rows, keys in spans_of(action, SELECT, cu_rows, cu_keys):
        position = positions[rows]
        chosen = (position >= lows[s] + first) & (position < lows[s] + last)
        voters = rows.start + chosen.nonzero().squeeze(1)
        voters = voters[first_quarters * len(voters) // 4 : last_quarters * len(voters) // 4]
        found = unscaled(k[keys], None if k_scale is None else k_scale[keys], q.dtype).to(out.dtype)
        size = max(1, GROUP_ELEMENTS // max(1, q.shape[1] * (keys.stop - keys.start)))
        for some in voters.split(size):
            seen = key_positions[keys] < limit[some, None]
            out[keys] += _votes(q[some].to(out.dtype), found, seen, scale)
    return out


def _votes(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Votes [K, Hkv] of voters q [V, Hq, D] for keys k [K, Hkv, D]; seen: bool[V, K], the keys that a voter sees."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    # Query heads of one KV head are stacked as rows of one matrix, so that keys are not repeated.
    stacked = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (stacked @ k.permute(1, 2, 0)).mul_(scale).unflatten(1, (group, len(q)))
    weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1).masked_fill_(~seen, 0)
    return (weights.sum((1, 2)) / group).T


def fake(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(k.shape[:2], dtype=numeric(q.dtype))


ALL = 2**31 - 1


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, windows, actions, heads, d, first, last in (
        ("the response votes", (20, 17), ((12, 20), (9, 17)), (SELECT, SELECT), (4, 2), 16, 0, ALL),
        (
            "every action, an empty sequence, the prompt's last rows vote",
            (9, 12, 0, 14, 5),
            ((6, 9), (8, 12), (3, 5), (10, 14), (2, 5)),
            (DENSE, SELECT, SELECT, REUSE, REPACK),
            (4, 4),
            8,
            -4,
            0,
        ),
        ("all rows vote, odd head dim", (11, 3), ((4, 8), (0, 3)), (SELECT, SELECT), (3, 1), 10, -ALL - 1, ALL),
        ("no voters", (7, 4), ((7, 9), (2, 4)), (SELECT, DENSE), (2, 1), 8, 0, ALL),
        ("no rows", (0, 0), ((0, 4), (0, 4)), (SELECT, SELECT), (2, 1), 8, 0, ALL),
    ):
        yield sample(name, counts, windows, actions, heads, d, first, last, generator)
    for name, counts, windows, quarters in (
        ("the front votes", (20, 17), ((10, 20), (10, 17)), (0, 1)),
        ("the middle votes", (20, 17), ((10, 20), (10, 17)), (1, 3)),
        ("the back votes, of a window of one row, too", (9, 5), ((2, 9), (4, 5)), (3, 4)),
    ):
        yield sample(name, counts, windows, (SELECT, SELECT), (4, 2), 16, 0, ALL, generator, quarters)
    # Every second query row takes part, and limits lie below the last key: some rows see few keys, some see none.
    whole = sample("", (16, 10), ((8, 12), (4, 8)), (SELECT, SELECT), (4, 2), 8, 0, ALL, generator).args
    q, k, positions, key_positions, _, cu_keys, limit, *rest = whole
    limit = (limit - torch.arange(26).int() % 18).clamp(min=0)
    few = (q[::2], k, positions[::2], key_positions, cu_rows_of((8, 5)), cu_keys, limit[::2], *rest)
    padded = (*(pad_rows(x, 3) for x in few[:4]), *few[4:6], pad_rows(few[6], 3), *rest)
    yield Sample("fewer query rows than keys, limits among the keys", few, padded)
    yield Sample("the same, float8", in_float8(few), in_float8(padded))


def in_float8(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the keys of a call, its second argument, to float8, and append their scales."""
    stored, scale = scaled(args[1])
    return args[0], stored, *args[2:], scale


def sample(
    name: str,
    counts: Sequence[int],
    windows: Sequence[Sequence[int]],
    actions: Sequence[int],
    heads: tuple[int, int],
    d: int,
    first: int,
    last: int,
    generator: torch.Generator,
    quarters: tuple[int, int] | None = None,
) -> Sample:
    """A call whose key rows are its query rows, from position 0 on; every row sees all of them."""
    q, k = (torch.randn(sum(counts), h, d, generator=generator) * 2 for h in heads)
    cu, positions = cu_rows_of(counts), positions_of(counts, [0] * len(counts))
    limit = torch.tensor(counts).repeat_interleave(torch.tensor(counts)).int()
    parts = () if quarters is None else (None, *quarters)
    rest = (per_sequence(windows), per_sequence(actions), d**-0.5, first, last, *parts)
    padded = [pad_rows(x, 3) for x in (q, k, positions, positions, limit)]
    return Sample(
        name,
        (q, k, positions, positions.clone(), cu, cu.clone(), limit, *rest),
        (*padded[:4], cu, cu.clone(), padded[4], *rest),
    )


OP = define(
    "kv_votes",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    own_rows=("k", "key_positions", "k_scale"),
    scales={"k": "k_scale"},
    padding=(0,),
    kernel="dgraph.ops.kv.triton.kv_votes:kernel",
)
