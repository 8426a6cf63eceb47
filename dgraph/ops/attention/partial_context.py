"""dgraph::partial_context: attention after only some keys and values have changed, and sums of its change (DyLLM)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.attention import paged_attention
from dgraph.ops.draws import cu_rows_of, pad_rows, page_table_of
from dgraph.ops.kv.scales import unscaled
from dgraph.ops.padded import sequence_of, slots_of
from dgraph.ops.registry import Sample, define, numeric
from dgraph.ops.selection.compare_rows import nearby, sums_of

CONTRACT = """\
dgraph::partial_attention without its decision: the same arguments and the same context, and in place of the salient
rows the sums that dgraph::compare_rows gives of that context and c_cache, which takes the context of every live row.
q [N, H, D]; k_cache, v_cache [pages, page, Hkv, D]; dv [K, Hkv, D]; index i64[K]; cu_changed i32[b+1]; c_cache
[pages, page, H, D]; full bool[N]; positions i64[N]; page_table i32[b, P]; cu_rows i32[b+1]; limit i32[N]; scale; tau,
of which only counts whether it is above 1: every row is exact then; k_scale, v_scale of caches in float8_e4m3fn;
c_table i32[b, P'] of c_cache
-> context [N, H, D] in the dtype of q, and f32[N, 3] (float64 for float64): dgraph::drifted decides, with the sums of
all ranks. Padding rows of q and of index may hold anything and give zeros; they write nothing. Deterministic; a
sequence gives the same bits alone and in any batch (reference)."""


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    dv: Tensor,
    index: Tensor,
    cu_changed: Tensor,
    c_cache: Tensor,
    full: Tensor,
    positions: Tensor,
    page_table: Tensor,
    cu_rows: Tensor,
    limit: Tensor,
    scale: float,
    tau: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    c_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    live = int(cu_rows[-1])
    exact = full[:live] | (tau > 1)
    exact[index[: int(cu_changed[-1])]] = True
    context = paged_attention.reference(q, k_cache, v_cache, page_table, cu_rows, limit, scale, k_scale, v_scale)
    slots = slots_of(
        "partial_attention", positions, page_table if c_table is None else c_table, cu_rows, c_cache.shape[1]
    )
    starts, changed = cu_rows.tolist(), cu_changed.tolist()
    for s in range(len(starts) - 1):
        rows = slice(starts[s], starts[s + 1])
        update = (~exact[rows]).nonzero().squeeze(1) + rows.start
        if not len(update):
            continue
        of_s = slice(changed[s], changed[s + 1])
        moved = positions[index[of_s]]
        delta = _delta(q[update], (k_cache, k_scale), dv[of_s], moved, page_table[s], limit[update], scale)
        before = c_cache[slots[0][update], slots[1][update]]
        context[update] = (before.to(delta.dtype) + delta).to(q.dtype)
    sums = torch.zeros(len(q), 3, dtype=numeric(q.dtype), device=q.device)
    sums[:live] = sums_of(context[:live], c_cache[slots])
    c_cache[slots] = context[:live]
    return context, sums


def _delta(
    q: Tensor,
    keys: tuple[Tensor, Tensor | None],
    dv: Tensor,
    moved: Tensor,
    table: Tensor,
    limit: Tensor,
    scale: float,
) -> Tensor:
    """Change of context [R, H, D] in one sequence: new attention weights of q [R, H, D] on positions `moved`, times dv.

    keys: the cache of keys, and its scales if it has any.
    """
    k_cache, k_scale = keys
    wide, page, heads = numeric(q.dtype), k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    longest = max(1, int(limit.max()))
    slot = torch.arange(longest, device=q.device)
    at = table[slot // page].long(), slot % page
    k = unscaled(k_cache[at], None if k_scale is None else k_scale[at], wide).to(wide).repeat_interleave(heads, 1)
    scores = torch.einsum("rhd,khd->hrk", q.to(wide), k) * scale
    hidden = slot >= limit[:, None]
    weight = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    seen = moved < longest
    chosen = weight[:, :, moved[seen]]
    return torch.einsum("hrk,khd->rhd", chosen, dv[seen].to(wide).repeat_interleave(heads, 1))


def fake(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], 3), dtype=numeric(q.dtype))


def samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, counts, lengths, page, hq, hkv, d, tau, share, dense in (
        ("some rows", (9, 7), (9, 12), 4, 4, 2, 8, 0.99, 0.3, ()),
        ("ragged, an empty sequence, a full one", (5, 0, 9, 1), (7, 3, 70, 1), 16, 4, 4, 10, 0.95, 0.4, (2,)),
        ("every key changed", (4, 5), (4, 5), 2, 2, 1, 8, 0.99, 1.1, ()),
        ("no key changed", (4, 5), (6, 8), 4, 2, 2, 8, 0.99, -1.0, ()),
        ("everything salient", (4, 3), (6, 8), 4, 2, 1, 8, 1.01, 0.4, ()),
        ("nothing salient", (4, 3), (6, 8), 4, 3, 1, 8, -1.01, 0.4, ()),
        ("no rows", (0, 0), (0, 0), 4, 2, 1, 8, 0.99, 0.5, ()),
    ):  # fmt: skip
        yield _sample(name, counts, _ends(counts, lengths), page, hq, hkv, d, tau, share, dense, generator)
    mixed = torch.tensor([8, 8, 12, 12, 3, 3, 9]).int()
    several = _sample("several limits in a sequence", (4, 3), mixed, 4, 4, 2, 8, 0.99, 0.5, (), generator)
    yield several
    yield Sample(f"{several.name}, contexts in pages of their own", *map(_apart, (several.args, several.padded)))
    for sample in (several, _sample("some rows", (9, 7), _ends((9, 7), (9, 12)), 4, 4, 2, 8, 0.99, 0.3, (), generator)):
        assert sample.padded is not None
        args, padded = map(paged_attention.in_float8, (sample.args, sample.padded))
        yield Sample(f"{sample.name}, float8", args, padded)


def _apart(args: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """The same arguments with the contexts in other pages, and a page table of these."""
    assert args is not None
    cache, table = args[6], args[9]
    other = torch.where(table < 0, table, len(cache) - table)
    return *args[:6], torch.cat([cache[:1], cache.flip(0)]), *args[7:], None, None, other


def _ends(counts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Limits i32[N] of rows that all see the whole length of their sequence."""
    return torch.tensor(lengths).repeat_interleave(torch.tensor(counts)).int()


def _sample(
    name: str,
    counts: Sequence[int],
    limit: Tensor,
    page: int,
    hq: int,
    hkv: int,
    d: int,
    tau: float,
    share: float,
    dense: Sequence[int],
    generator: torch.Generator,
) -> Sample:
    """Rows at the end of each sequence, whose contexts have moved by little or by much."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows, cu_rows = sum(counts), cu_rows_of(counts)
    lengths = [max([0, *part.tolist()]) for part in limit.split(list(counts))]
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    table, pages = page_table_of(lengths, page, generator)
    k_cache, v_cache = (torch.full((pages, page, hkv, d), torch.nan) for _ in range(2))
    for s, length in enumerate(lengths):
        slots = slots_of("sample", torch.arange(length), table[s : s + 1], torch.tensor([0, length]), page)
        k_cache[slots], v_cache[slots] = draw(length, hkv, d), draw(length, hkv, d)
    q, scale = draw(rows, hq, d), d**-0.5
    context = paged_attention.reference(q, k_cache, v_cache, table, cu_rows, limit, scale)
    c_cache = torch.full((pages, page, hq, d), torch.nan)
    c_cache[slots_of("sample", positions, table, cu_rows, page)] = nearby(context, generator)
    chosen = (torch.rand(rows, generator=generator) < share).nonzero().squeeze(1)
    index = torch.full((rows,), -1)
    index[: len(chosen)] = chosen
    cu_changed = torch.searchsorted(chosen, cu_rows.long()).int()
    dv = draw(rows, hkv, d) * 0.05
    dv[len(chosen) :] = torch.nan
    of_row = sequence_of(cu_rows, rows)
    full = torch.isin(of_row, torch.tensor(dense, dtype=of_row.dtype))
    rest = (table, cu_rows)
    wider = tuple(pad_rows(value, 3) for value in (q, dv, full, positions, limit))
    longer = torch.cat([index, index.new_full((3,), -1)])
    caches = (k_cache, v_cache)
    return Sample(
        name,
        (q, *caches, dv, index, cu_changed, c_cache.clone(), full, positions, *rest, limit, scale, tau),
        (wider[0], *caches, wider[1], longer, cu_changed, c_cache, *wider[2:4], *rest, wider[4], scale, tau),
    )


OP = define(
    "partial_context",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    mutates=("c_cache",),
    scales={"k_cache": "k_scale", "v_cache": "v_scale"},
    own_rows=("dv", "index", "cu_changed"),
    padding=(0, 0),
    kernel="dgraph.ops.attention.triton.partial_context:kernel",
    tuning="dgraph.ops.triton.candidates:PARTIAL",
)
