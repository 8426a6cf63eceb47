"""dgraph::kv_pack: choose the entries that each KV head keeps, and pack them (MaskKV A.9; dLLM-Serve 4.5; Ada-KV)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT, per_sequence, spans_of
from dgraph.ops.draws import cu_rows_of, pad_rows, positions_of
from dgraph.ops.kv.scales import FLOAT8, check_scale, scaled, store
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
Head h of sequence s owns the entries [pack_start[layer, s] + sum(pack_count[s, :h]), + pack_count[s, h]) of k_pack and
v_pack [entries, D]; pack_index[e] is the position of entry e. What it writes lies there; nothing else changes.
Without k_pack and v_pack, keys and values stay where they are: counts and positions alone are written, k and v are not
read and may be None, and there is nothing to renew in REPACK.
A sequence with action SELECT chooses anew. Its candidates are the n key rows outside its window [lo, hi). Budget, in
entries per head on average: B = min(n, int(ratio * n)) with ratio > 0, else min(n, pairs). B = n keeps everything.
score is pooled along the candidates in order of position, over a width of `pool` (odd, stride 1, truncated at both
ends; 1: not at all), by the maximum or the mean as `pooling` says. The window is cut out: its neighbours are adjacent.
The last `recent` candidates below lo then rank before all others, as if their score were infinite. Head h keeps the
k_h candidates that rank first, ties: the lower position; they are packed in ascending order of position. `heads` says
 - "uniform": k_h = B;
 - "mass" (MaskKV, Eq. 7 and A.9, algorithm 3): k_h = base + int((B - base) * Hkv * P_h) with base = int(floor * B) and
   P_h the share of h in the sum of unpooled scores (sums below 0 count as 0; uniform if all are 0), but at most n; what
   that cuts off goes to the next heads in descending order of P_h, ties: the lower head;
 - "adaptive" (Ada-KV): k_h = int(floor * B + (1 - floor) * B_h), where B_h of the B * Hkv candidates of all heads that
   rank first are of h, ties: the lower head, then the lower position.
So sum(k_h) <= B * Hkv. Budgets in double precision; (B - base) * Hkv * P_h is (B - base) * Hkv times the head's sum,
divided by the sum over heads.
with action REPACK entry e takes key and value of the key row at position pack_index[e], which must be one of the
sequence's; counts and positions stay. Sequences with other actions: untouched.
score f32[M, Hkv], finite; k, v [M, Hkv, D] and k_pack, v_pack of one dtype; key_positions i64[M], ascending in each
sequence; cu_keys i32[b+1]; window i32[b, 2]; action i32[b]; pack_count i32[b, Hkv]; pack_index i32[entries], or i32[0]:
positions are not kept, and no sequence may be in REPACK; pack_start i32[L, b]. Sequences may have no rows; pack_count
may have more than b.
With first i64[1], score is f32[M, H] of all H heads, and k, v, the packed caches and pack_count are of the Hkv of them
from head `first` on (a rank's own): budgets are divided over the H heads, and each of the Hkv keeps what it keeps
there. The heads before and after are chosen for in the same way where they are, and leave nothing here.
Packed caches in float8_e4m3fn have k_pack_scale and v_pack_scale f32[entries]. k and v in float8_e4m3fn have k_scale
and v_scale f32[M, Hkv], contiguous: vectors and scales are copied as they are. Else vectors are rounded as by kv_write.
Padding rows may hold anything. Too few entries for a sequence, or a position without a row, is an error in the
reference; a kernel leaves such entries alone. Deterministic; a kernel may sum a head's scores in another order."""

HEADS = ("uniform", "mass", "adaptive")
POOLING = ("max", "mean")


def check_options(ratio: float, pairs: int, heads: str, floor: float, pool: int, pooling: str, recent: int) -> None:
    """Refuse settings outside of the contract by an InputError."""
    for right, what, got in (
        (heads in HEADS, f"heads must be one of {', '.join(HEADS)}", heads),
        (pooling in POOLING, f"pooling must be one of {', '.join(POOLING)}", pooling),
        (pool >= 1 and pool % 2 == 1, "pool must be odd and at least 1", pool),
        (0 <= ratio <= 1, "ratio must be in [0, 1]", ratio),
        (0 <= floor <= 1, "floor must be in [0, 1]", floor),
        (pairs >= 0, "pairs must be at least 0", pairs),
        (recent >= 0, "recent must be at least 0", recent),
    ):
        if not right:
            raise InputError(f"dgraph::kv_pack: {what}, got {got!r}.")


def check_own(score: Tensor, heads: int, first: Tensor | None) -> None:
    """Refuse scores of other heads than the packed ones, by an InputError; with `first` they may be of more heads."""
    if score.shape[1] != heads and (first is None or score.shape[1] < heads):
        raise InputError(
            f"dgraph::kv_pack: score is of {score.shape[1]} heads, but k of {heads}. Pass scores of as many, or "
            f"of all heads with `first`, the number of the first one that k holds."
        )


def check_moved(k: Tensor | None, v: Tensor | None, k_pack: Tensor | None, v_pack: Tensor | None) -> None:
    """Refuse one packed cache without the other, and packed caches without keys and values, by an InputError."""
    packed = k_pack is not None, v_pack is not None
    if any(packed) and not (all(packed) and k is not None and v is not None):
        raise InputError(
            "dgraph::kv_pack: k_pack and v_pack take what is in k and v; give all four, or neither of the packed "
            "caches, to write positions alone."
        )


def reference(
    score: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_positions: Tensor,
    cu_keys: Tensor,
    window: Tensor,
    action: Tensor,
    k_pack: Tensor | None,
    v_pack: Tensor | None,
    pack_count: Tensor,
    pack_index: Tensor,
    pack_start: Tensor,
    layer: int,
    ratio: float,
    pairs: int,
    heads: str,
    floor: float,
    pool: int,
    pooling: str,
    recent: int,
    first: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_pack_scale: Tensor | None = None,
    v_pack_scale: Tensor | None = None,
) -> None:
    check_options(ratio, pairs, heads, floor, pool, pooling, recent)
    check_moved(k, v, k_pack, v_pack)
    mine = pack_count.shape[1]
    check_own(score, mine, first)
    begin = 0 if first is None else int(first)
    own = slice(begin, begin + mine)
    starts, entries = pack_start[layer].tolist(), len(pack_index if k_pack is None else k_pack)
    chosen: list[tuple[int, list[Tensor]]] = []
    for s, _, rows in spans_of(action, SELECT, cu_keys, cu_keys):
        lo, hi = window[s].tolist()
        position = key_positions[rows]
        outside = rows.start + ((position < lo) | (position >= hi)).nonzero().squeeze(1)
        plain = score[outside].to(numeric(score.dtype)).T
        ranked = pooled(plain, pool, pooling)
        below = int((position < lo).sum())
        ranked[:, max(0, below - recent) : below] = torch.inf
        n = len(outside)
        budget = min(n, int(ratio * n) if ratio > 0 else pairs)
        counts = sizes(plain, ranked, budget, heads, floor)
        kept = [outside[best(of, count)] for of, count in zip(ranked[own], counts[own], strict=True)]
        if starts[s] + sum(map(len, kept)) > entries:
            raise InputError(
                f"dgraph::kv_pack: sequence {s} keeps {sum(map(len, kept))} entries from {starts[s]} on, but there are "
                f"only {entries}. Make room for its budget on every KV head before running the step."
            )
        chosen.append((s, kept))
    for s, _, rows in () if k_pack is None else spans_of(action, REPACK, cu_keys, cu_keys):
        counts = pack_count[s].tolist()
        wanted = pack_index[starts[s] : starts[s] + sum(counts)].long()
        position = key_positions[rows].contiguous()
        at = torch.searchsorted(position, wanted)
        if len(wanted) < sum(counts) or not torch.isin(wanted, position).all():
            raise InputError(
                f"dgraph::kv_pack: sequence {s} has packed positions that are unknown, or not among its key rows. "
                "Forward all its candidates in a step that repacks, and keep their positions in pack_index."
            )
        chosen.append((s, list((rows.start + at).split(counts))))
    for s, kept in chosen:
        entry = starts[s]
        for head, which in enumerate(kept):
            to = slice(entry, entry + len(which))
            _copy(k, k_scale, (which, head), k_pack, k_pack_scale, to)
            _copy(v, v_scale, (which, head), v_pack, v_pack_scale, to)
            pack_count[s, head] = len(which)
            if len(pack_index):
                pack_index[to] = key_positions[which].int()
            entry = to.stop


def _copy(
    vectors: Tensor | None,
    scale: Tensor | None,
    of: tuple[Any, ...],
    pack: Tensor | None,
    pack_scale: Tensor | None,
    to: slice,
) -> None:
    """Copy vectors as they are stored, with their scales; round only those that are not stored in float8 yet."""
    if vectors is None or pack is None:
        return
    check_scale("kv_pack", vectors, scale)
    if scale is None:
        store("kv_pack", vectors[of], to, pack, pack_scale)
        return
    check_scale("kv_pack", pack, pack_scale)
    pack[to] = vectors[of]
    if pack_scale is not None:
        pack_scale[to] = scale[of]


def pooled(score: Tensor, pool: int, pooling: str) -> Tensor:
    """Pool scores [Hkv, n] along n, in a copy; a mean is a sum in ascending order, divided by the number of addends."""
    n, half = score.shape[1], min(pool // 2, max(0, score.shape[1] - 1))
    out = torch.zeros_like(score) if pooling == "mean" else torch.full_like(score, -torch.inf)
    size = score.new_zeros(n)
    for shift in range(-half, half + 1):
        to, of = slice(max(0, -shift), n - max(0, shift)), slice(max(0, shift), n - max(0, -shift))
        out[:, to] = out[:, to] + score[:, of] if pooling == "mean" else torch.maximum(out[:, to], score[:, of])
        size[to] += 1
    return out / size if pooling == "mean" else out


def best(score: Tensor, size: int) -> Tensor:
    """Indices i64[size] of the largest of score [n], ascending; ties: the lower index."""
    return score.sort(descending=True, stable=True).indices[:size].sort().values


def sizes(plain: Tensor, ranked: Tensor, budget: int, heads: str, floor: float) -> list[int]:
    """Number of entries that each head keeps, k_h, from scores [Hkv, n] as they came and as they rank."""
    count, n = plain.shape
    if heads == "uniform" or budget == n:
        return [budget] * count
    if heads == "adaptive":
        first = best(ranked.flatten(), budget * count) // n
        return [int(floor * budget + (1 - floor) * of) for of in torch.bincount(first, minlength=count).tolist()]
    mass = plain.double().sum(1).clamp(min=0).tolist()
    if not sum(mass):
        mass = [1.0] * count
    base, carry, found = int(floor * budget), 0, [0] * count
    for head in sorted(range(count), key=lambda head: -mass[head]):
        wanted = base + int((budget - base) * count * mass[head] / sum(mass)) + carry
        found[head] = min(wanted, n)
        carry = wanted - found[head]
    return found


def samples(generator: torch.Generator) -> Iterator[Sample]:
    every = (SELECT, DENSE, REUSE, SELECT)
    for name, actions, counts, windows, levels, settings in (
        ("some pairs, the response", (SELECT,), (12,), ((8, 12),), 0, (0.0, 3, "uniform", 0.0, 1, "max", 0)),
        (
            "a share, maximum across the window, other actions",
            every, (11, 7, 6, 14), ((4, 8), (2, 5), (2, 5), (0, 4)), 0, (0.5, 0, "uniform", 0.0, 3, "max", 0),
        ),
        (
            "mean, recent candidates, an empty sequence, one without candidates",
            (SELECT,) * 4, (9, 0, 4, 13), ((6, 9), (0, 4), (0, 4), (9, 11)), 0, (0.4, 0, "uniform", 0.0, 5, "mean", 2),
        ),
        ("ties", (SELECT, SELECT), (14, 9), ((5, 9), (9, 9)), 2, (0.0, 4, "uniform", 0.0, 3, "max", 0)),
        ("by mass", (SELECT, SELECT), (16, 9), ((12, 16), (3, 5)), 0, (0.0, 4, "mass", 0.1, 1, "max", 0)),
        ("adaptive", (SELECT, SELECT), (16, 9), ((12, 16), (3, 5)), 0, (0.0, 4, "adaptive", 0.2, 3, "mean", 1)),
        ("adaptive with ties", (SELECT,), (16,), ((8, 10),), 2, (0.5, 0, "adaptive", 0.0, 1, "max", 0)),
        ("repacked", (REPACK, SELECT, REPACK), (9, 8, 5), ((6, 9),) * 3, 0, (0.0, 3, "mass", 0.5, 1, "max", 0)),
        ("all of few", (SELECT, SELECT), (9, 5), ((3, 4), (4, 5)), 0, (0.0, 8, "mass", 0.1, 1, "max", 0)),
        ("nothing", (SELECT, SELECT), (9, 2), ((3, 4), (0, 1)), 0, (0.1, 0, "adaptive", 0.2, 1, "max", 3)),
        ("no rows", (SELECT, REUSE), (0, 0), ((0, 4), (0, 4)), 0, (0.0, 3, "uniform", 0.0, 1, "max", 0)),
    ):  # fmt: skip
        call = draw(generator, actions, counts, windows, settings, levels=levels)
        yield Sample(name, call, padded(call))
        if name.startswith(("some pairs", "a share", "adaptive with")):
            args = in_pages(call)
            yield Sample(f"{name}, in pages", args, padded(args))
        if name.startswith(("by mass", "a share")):
            for stored in (False, True):
                args = in_float8(call, stored)
                what = "copied as stored" if stored else "rounded"
                yield Sample(f"{name}, float8 {what}", args, padded(args))
    for how in ("uniform", "mass", "adaptive"):
        settings = (0.0, 3, how, 0.1, 1, "max", 0)
        call = draw(generator, every, (11, 7, 6, 14), ((4, 8), (2, 5), (2, 5), (0, 4)), settings)
        scores = torch.rand(len(call[0]), 5, generator=generator) * (1 + torch.arange(5))
        call = (scores, *call[1:], torch.tensor([1]))
        yield Sample(f"some of the heads, {how}", call, padded(call))
        args = in_pages(call)
        yield Sample(f"some of the heads in pages, {how}", args, padded(args))


def draw(
    generator: torch.Generator,
    actions: tuple[int, ...],
    counts: tuple[int, ...],
    windows: tuple[tuple[int, int], ...],
    settings: tuple[float, int, str, float, int, str, int],
    heads: int = 3,
    d: int = 6,
    levels: int = 0,
    keep_index: bool = True,
) -> tuple[Any, ...]:
    """Draw a call, with one entry more than each sequence can need; with `levels`, scores are rounded to tie."""
    m, b = sum(counts), len(counts)
    score = torch.rand(m, heads, generator=generator) * (1 + torch.arange(heads))
    if levels:
        score = (score * levels / 2).round()
    kv = torch.randn(2, m, 2 * heads, d, generator=generator)[:, :, heads:]  # views of a wider projection
    positions, cu_keys = positions_of(counts, [0] * b), cu_rows_of(counts)
    start = torch.tensor([0, *counts]).cumsum(0)[:-1] * heads + torch.arange(b)
    k_pack, v_pack = torch.randn(2, m * heads + b, d, generator=generator)
    had = torch.zeros(b, heads, dtype=torch.int32)
    index = torch.full((m * heads + b,), -1, dtype=torch.int32)
    for s, (lo, hi) in enumerate(windows):
        outside = torch.tensor([p for p in range(counts[s]) if not lo <= p < hi], dtype=torch.int32)
        held = [outside[torch.rand(len(outside), generator=generator) < 0.6] for _ in range(heads)]
        had[s] = torch.tensor([len(of) for of in held])
        index[start[s] : start[s] + sum(map(len, held))] = torch.cat(held)
    starts = torch.stack([start + 10**6, start]).int()
    into = (k_pack, v_pack, had, index if keep_index else index[:0], starts)
    return score, *kv, positions, cu_keys, per_sequence(windows).view(-1, 2), per_sequence(actions), *into, 1, *settings


def in_float8(call: tuple[Any, ...], stored: bool) -> tuple[Any, ...]:
    """Convert the packed caches of a call to float8; with `stored`, its k and v, too."""
    score, k, v, *rest = call
    k_scale = v_scale = None
    if stored:
        (k, k_scale), (v, v_scale) = map(scaled, (k, v))
    rest[4:6] = (pack.to(FLOAT8) for pack in rest[4:6])
    first = () if len(call) > 20 else (None,)
    return score, k, v, *rest, *first, k_scale, v_scale, *(torch.full(rest[4].shape[:1], 0.5) for _ in range(2))


def in_pages(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Choose as a call does, and leave keys and values where they are."""
    score, _, _, key_positions, cu_keys, window, action, _, _, *rest = call
    return score, None, None, key_positions, cu_keys, window, action, None, None, *rest


def padded(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Append padding rows to a call, and copy the tensors that it writes."""
    return (
        *(None if x is None else pad_rows(x, 3) for x in call[:4]),
        *(x.clone() if isinstance(x, Tensor) else x for x in call[4:21]),
        *(None if x is None else pad_rows(x, 3) for x in call[21:23]),
        *(x.clone() for x in call[23:]),
    )


WRITTEN = ("k_pack", "v_pack", "pack_count", "pack_index", "k_pack_scale", "v_pack_scale")
OP = define(
    "kv_pack",
    reference,
    samples=samples,
    contract=CONTRACT,
    mutates=WRITTEN,
    scales={"k": "k_scale", "v": "v_scale", "k_pack": "k_pack_scale", "v_pack": "v_pack_scale"},
    kernel="dgraph.ops.kv.triton.kv_pack:kernel",
)
