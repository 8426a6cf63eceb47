"""Packed rows as padded sequences and back, for the references of ops.

The padded length of a sequence is a function of that sequence alone (`padded_length`), and sequences of equal
padded length are computed together. So the result for a sequence does not depend on the rest of the batch. A short
sequence does not pay for a long one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.per_stage import per_stage

# Bound on the scores or mask elements of a group, 16 MiB in fp32; one sequence alone may take more.
GROUP_ELEMENTS = 1 << 22
# Bound on the elements of the keys of a group that are gathered, 1 MiB in fp32, which a processor's cache holds.
GROUP_KEYS = 1 << 18


def padded_length(n: int, least: int = 8) -> int:
    """`n` rounded up to `least`, or else to four steps per octave: 16, 20, 24, 28, 32, 40, 48, 56, 64, ..."""
    if n <= least:
        return least
    step = max(least // 2, 1 << max((n - 1).bit_length() - 3, 0))
    return -(-n // step) * step


def take(values: Tensor, rows: Tensor) -> Tensor:
    """values[rows] for i64 rows of any shape; several times faster than indexing on a CPU."""
    return values.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def sequence_of(cu_rows: Tensor, rows: int) -> Tensor:
    """Sequence of each row, i64[rows]; b for padding rows."""
    index = torch.arange(rows, dtype=cu_rows.dtype, device=cu_rows.device)
    return torch.searchsorted(cu_rows[1:].contiguous(), index, right=True)


def slots_of(op: str, positions: Tensor, page_table: Tensor, cu_rows: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Slots of the live rows' positions in a paged cache: i64[live] pages, and i64[live] places within them.

    Raises:
        InputError: a row's page is not assigned; the message names `op`.
    """
    live = min(int(cu_rows[-1]), positions.shape[0])
    pages = page_table[sequence_of(cu_rows, live), positions[:live] // page].long()
    if bool((pages < 0).any()):
        raise InputError(
            f"dgraph::{op}: a row's position lies in a page that its sequence does not have (its "
            "page_table entry is negative). Assign pages for every position of a step before running it."
        )
    return pages, positions[:live] % page


@per_stage
def placed_rows(
    op: str, positions: Tensor, page_table: Tensor, cu_rows: Tensor, pages: int, page: int
) -> tuple[Tensor | slice, tuple[Tensor, Tensor]]:
    """Find the live rows whose position has a page, and their slots in a cache [pages, page, ...].

    Returns:
        An index of the rows: i64[r], ascending, or the slice of all of them. Then the slots: r pages, and r places
        within them. All of it is read-only, because layers share it.

    Raises:
        InputError: a row's position or page lies after the last one that there is; the message names `op`.
    """
    live = min(int(cu_rows[-1]), positions.shape[0])
    positions = positions[:live]
    at = positions // page
    if live and int(positions.max()) >= page_table.shape[1] * page:
        raise InputError(
            f"dgraph::{op}: a row has position {int(positions.max())}, but the page table holds "
            f"{page_table.shape[1]} pages of {page} positions. Widen it; -1 stands for a page that does not exist."
        )
    found = page_table[sequence_of(cu_rows, live), at]
    if live and int(found.max()) >= pages:
        raise InputError(
            f"dgraph::{op}: a row's position lies on page {int(found.max())}, but the cache has {pages} pages. Pass "
            f"the caches as they are after the last allocation."
        )
    if not live or int(found.min()) >= 0:
        return slice(live), (found, positions % page)
    rows = (found >= 0).nonzero()[:, 0]
    return rows, (found[rows], positions[rows] % page)


def offsets_of(flags: Tensor, cu_rows: Tensor) -> Tensor:
    """Row offsets i64[b+1] of the flagged rows, from flags bool[N] and the offsets of all rows."""
    running = F.pad(flags.cumsum(0), (1, 0))
    return running[cu_rows.long()]


@dataclass(frozen=True)
class Group:
    """Sequences of one padded shape.

    Attributes:
        sequences: i64[g].
        rows: i64[g, R], row index; slots past the end of a sequence repeat its first row.
        live: bool[g, R], False in those slots.
        keys: padded number of keys of each sequence.
        span: the rows as a slice, if they are each other's neighbours and all live; else None.
    """

    sequences: Tensor
    rows: Tensor
    live: Tensor
    keys: int
    span: slice | None

    def take(self, values: Tensor) -> Tensor:
        """values[N, ...] of the rows, [g, R, ...]; without a copy, if they are neighbours."""
        return take(values, self.rows) if self.span is None else values[self.span].unflatten(0, self.rows.shape)

    def scatter(self, out: Tensor, values: Tensor) -> None:
        """Write values[g, R, ...] of the live slots to their rows in `out`."""
        if self.span is not None:
            out[self.span].unflatten(0, self.rows.shape).copy_(values)
            return
        rows, values = self.rows.flatten(), values.flatten(0, 1)
        if not bool(self.live.all()):
            slots = self.live.flatten().nonzero().squeeze(1)
            rows, values = rows[slots], values.index_select(0, slots)
        out.index_copy_(0, rows, values)


def groups(
    cu_rows: Tensor, keys: Sequence[int] | None = None, least: int = 8, cost: int = 1, gathered: int = 0
) -> Iterator[Group]:
    """Sequences that have rows, grouped by padded shape.

    Args:
        cu_rows: [b+1] row offsets.
        keys: padded number of keys per sequence; a sequence with 0 is left out. None: as many as padded rows.
        least: smallest padded number of rows.
        cost: elements held per row and key.
        gathered: elements of a key, if keys are gathered sequence by sequence; see `together`.
    """
    starts = cu_rows.tolist()
    shapes: dict[tuple[int, int], list[int]] = {}
    for s in range(len(starts) - 1):
        count = starts[s + 1] - starts[s]
        if count:
            length = padded_length(count, least)
            shapes.setdefault((length, length if keys is None else keys[s]), []).append(s)
    for (length, width), members in sorted(shapes.items()):
        if not width:
            continue
        size = max(1, GROUP_ELEMENTS // (length * width * cost))
        if gathered:
            size = min(size, together(width * gathered))
        for at in range(0, len(members), size):
            some = members[at : at + size]
            sequences = torch.tensor(some, device=cu_rows.device)
            first = cu_rows[sequences].long()[:, None]
            column = torch.arange(length, device=cu_rows.device)
            live = column < cu_rows[sequences + 1].long()[:, None] - first
            begin, end = starts[some[0]], starts[some[-1] + 1]
            neighbours = end - begin == len(some) * length and bool(live.all())
            rows = torch.where(live, first + column, first)
            yield Group(sequences, rows, live, width, slice(begin, end) if neighbours else None)


def together(elements: int) -> int:
    """Number of sequences whose keys, each with that many elements, are gathered together."""
    return max(1, GROUP_KEYS // max(1, elements))


def mask_of(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask that `attend` adds to scores: -inf where `hidden` is True, 0 elsewhere.

    The CPU kernel reads a mask in the dtype of the queries; it converts a boolean one several times slower.
    """
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blind: Tensor | None, scale: float) -> Tensor:
    """Attention of padded sequences: q[g, R, Hq, D], k and v[g, K, Hkv, D] -> [g, R, Hq, D].

    Args:
        mask: [g, R, K], or [g, 1, K] if all rows of a sequence see the same; see `mask_of`.
        blind: bool[g, R], rows that see nothing; they give zeros. None: every row sees something.

    Keys and values must be finite, also where nothing sees them.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask.expand(-1, q.shape[1], -1)[:, None],
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)
    return out if blind is None or not bool(blind.any()) else out.masked_fill(blind[:, :, None, None], 0)


def check_window(op: str, origin: Tensor | None, window: int, dense: bool = False) -> None:
    """Refuse a negative window, and for packed rows a window without an origin or the other way round."""
    if window < 0 or (not dense and (origin is None) != (window == 0)):
        raise InputError(
            f"dgraph::{op}: a window is a number of positions, at least 1, that counts back from origin i32[N]; give "
            f"both or neither (window=0), got window={window} and {'no origin' if origin is None else 'an origin'}."
        )


def check_gap(op: str, rows: int, gap: Tensor | None) -> None:
    """Refuse a gap that is no [N, 2]."""
    if gap is not None and gap.shape != (rows, 2):
        raise InputError(
            f"dgraph::{op}: a gap is i32[N, 2]: for each row, where the positions that it does not see begin and end. "
            f"Got {list(gap.shape)} for {rows} rows."
        )


def check_ranges(
    q: Tensor, k_cache: Tensor, gap: Tensor | None, own: Tensor | None, k: Tensor | None, v: Tensor | None
) -> None:
    """Refuse a gap that is no [N, 2], and own keys without their flags, or the other way round.

    Raises:
        InputError: naming what was given.
    """
    check_gap("paged_attention", len(q), gap)
    want = torch.Size([len(q), k_cache.shape[2], q.shape[2]])
    got = ["None" if x is None else f"{x.dtype} {list(x.shape)}" for x in (own, k, v)]
    if {x is None for x in (own, k, v)} == {True}:
        return
    if own is None or k is None or v is None or own.shape != (len(q),) or {k.shape, v.shape} != {want}:
        raise InputError(
            f"dgraph::paged_attention: rows that see a key of their own take own bool[N] with k and v {list(want)}; "
            f"give all three or none of them, got own={got[0]}, k={got[1]} and v={got[2]}."
        )


def hidden_keys(at: Tensor, limit: Tensor, origin: Tensor | None, window: int, gap: Tensor | None = None) -> Tensor:
    """Flag the keys at positions [..., K] that rows of limit, origin [..., R] and gap [..., R, 2] do not see.

    Returns:
        bool[..., R, K].
    """
    keys = at[..., None, :]
    hidden = keys >= limit[..., :, None]
    if origin is not None:
        hidden = hidden | (keys <= origin[..., :, None] - window)
    return hidden if gap is None else hidden | ((keys >= gap[..., :, :1]) & (keys < gap[..., :, 1:]))


def check_heads(op: str, q: Tensor, k: Tensor, dim: int) -> None:
    """Refuse query heads that are no multiple of KV heads (dimension `dim` of q and k)."""
    if q.shape[dim] % k.shape[dim]:
        raise InputError(
            f"dgraph::{op}: query heads must be a multiple of KV heads, got {q.shape[dim]}, {k.shape[dim]}."
        )
