"""dgraph_methods::tile_attention: attention to the tiles of keys that each head kept, see `dgraph_methods.sparsed`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dgraph.ops import Sample, define, numeric
from dgraph.ops.draws import cu_rows_of, pad_rows, positions_of
from dgraph.ops.rows import sequence_of

CONTRACT = """\
q [N, H, D]; k, v [N, Hkv, D]; positions i64[N]; cu_rows i32[b+1]; full bool[N], equal for all rows of a sequence, which
are all there; prompt_end i32[b]. A tile is `size` positions; the response begins a new one. pattern bool[b, H, T, T]:
the tiles of keys (last) that a head's tile of queries sees; select: the share that is kept, in (0, 1].
-> [N, H, D]: softmax(scale * q.k) v over all rows of the sequence where full, else over the tiles of the pattern;
padding rows 0. pattern: where full, the tiles of most attention, round(select * tiles) of the prompt and of the
response and at least one of each, the first of equal ones; else as it was.
Sums in fp32. Deterministic, without a host read. Query head h reads KV head h // (H / Hkv)."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cu_rows: Tensor, full: Tensor, prompt_end: Tensor,
    pattern: Tensor, select: float, size: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (n, heads), b = q.shape[:2], len(prompt_end)
    tiles = min(pattern.shape[2], -(-n // size) + 1)  # no sequence has more rows than there are
    sequence, first, width = sequence_of(cu_rows, n), -(-prompt_end.long() // size), tiles * size
    of, end = sequence.clamp(max=b - 1), prompt_end.long()
    slot = positions + torch.where(positions < end[of], 0, (first * size - end)[of])
    place = torch.where(sequence < b, of * width + slot, b * width)

    def spread(x: Tensor) -> Tensor:
        return x.new_zeros(b * width + 1, *x.shape[1:]).index_put((place,), x)[:-1].unflatten(0, (b, width))

    queries, keys, values = (spread(x.to(numeric(q.dtype))).transpose(1, 2) for x in (q, k, v))
    keys, values = (x.repeat_interleave(heads // k.shape[1], 1) for x in (keys, values))
    there, whole = spread(torch.ones_like(full)), spread(full).any(1)[:, None, None, None]
    held = pattern[:, :, :tiles, :tiles]
    seen = (held | whole).repeat_interleave(size, 2).repeat_interleave(size, 3) & there[:, None, None]
    weights = (queries @ keys.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    weights = weights * there[:, None, :, None]
    out = (weights @ values).transpose(1, 2).flatten(0, 1)[place.clamp(max=b * width - 1)]
    number = there.unflatten(1, (tiles, size)).sum(2)
    mass = weights.unflatten(3, (tiles, size)).sum(4).unflatten(2, (tiles, size)).sum(3)
    mean, kept = mass / number.clamp(min=1)[:, None, None], torch.zeros_like(held)
    in_prompt = torch.arange(tiles, device=q.device) < first[:, None]
    for part in (in_prompt & (number > 0), ~in_prompt & (number > 0)):
        score = mean.masked_fill(~part[:, None, None], -torch.inf)
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        most = (part.sum(1).double() * select).round().clamp(min=1)[:, None, None, None]
        kept |= (rank < most) & part[:, None, None]
    after = pattern.clone()
    after[:, :, :tiles, :tiles] = torch.where(whole, kept, held)
    return out.masked_fill((sequence >= b)[:, None, None], 0).to(q.dtype), after


def fake(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), rest[6].new_empty(rest[6].shape)  # type: ignore[attr-defined]


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, ends, kv_heads in (
        ("ragged, an empty sequence", (13, 0, 7), (5, 2, 4), 2),
        ("whole tiles, all heads alike", (16,), (8,), 4),
        ("a prompt of whole tiles, more KV heads than one", (9, 15), (4, 12), 1),
    ):
        n, b = sum(counts), len(counts)
        q, k, v = (torch.randn(n, h, 8, generator=generator) for h in (4, kv_heads, kv_heads))
        positions, cu_rows = positions_of(counts, [0] * b), cu_rows_of(counts)
        full = sequence_of(cu_rows, n) % 2 == 0
        pattern = torch.rand(b, 4, 5, 5, generator=generator) < 0.5
        more = torch.tensor(ends).int(), pattern, 0.5, 4, 8**-0.5
        yield Sample(
            name, (q, k, v, positions, cu_rows, full, *more),
            (*(pad_rows(x, 5) for x in (q, k, v, positions)), cu_rows, pad_rows(full, 5), *more),
        )  # fmt: skip


OP = define(
    "dgraph_methods::tile_attention", attend, samples=samples, contract=CONTRACT, fake=fake, padding=(0,)
)  # fmt: skip
