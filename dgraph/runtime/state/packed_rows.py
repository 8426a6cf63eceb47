"""Packed rows of a step, and the results of a program for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from dgraph.ops.statistics import Statistic
from dgraph.spec import ModelSpec

KEY_ROWS, KEY_STRIDE = 16384, 4
"""Sizes of key rows of a step in which sequences see everything: the smallest size, and the factor between sizes.

A CUDA graph of such a step has one fixed size.
"""


@dataclass(frozen=True)
class StepRows:
    """The packed rows of one forward: rows of b sequences, per sequence contiguous and ascending in position.

    Rows that a plan adds follow the others of their sequence, ascending in position themselves.

    The first cu_rows[b] rows are live. The others are padding, which belongs to no sequence: 0 or False everywhere.

    Attributes:
        sequence: i64[N], index of the row's sequence.
        column: i64[N]. From W on: W plus the column of the open blocks that the row predicts. Below 0: a row of a
            prompt that is encoded. Other values have a meaning of each kind of state.
        input_ids: i64[N].
        positions: i64[N].
        limit: i32[N], end of the positions that the row sees.
        masked: bool[N], the row's own position is in the current block and holds a mask.
        candidate: bool[N], the step may commit the token of the position that the row predicts. It is a mask of the
            current block, or replaceable by a policy that edits. Without a logit shift and edits, equal to `masked`.
        cu_rows: i32[b+1], offsets of the sequences' rows.
        full: bool[N], everything is recomputed for the row, because its sequence takes a full step or the row commits a
            block. None without a plan.
        changed: bool[N], the row's token was decoded in the step before, or the row is `full`. None without a plan.
        slots: i64[N], place of the row's keys in the pages of its sequence. The rows that exist lie side by side in the
            order of their positions, and `limit` counts them. None unless a plan hides rows.
        encoded: bool[N], the row is encoded, else denoised. None for models whose rows have no such flag.
        added: bool[N], the row is not one of the sequence, but added by the plan (`RowPlan.added`); its `column` is the
            one that it predicts, all the same. None unless a plan adds rows.
        gap: i32[N, 2], the places of keys [begin, end) that the row does not see; equal for all but added rows. None as
            `added`.
        origin: i32[N], position from which windows count back: that of an encoded row, or the start of the block of a
            denoised one. None as `encoded`.
    """

    sequence: Tensor
    column: Tensor
    input_ids: Tensor
    positions: Tensor
    limit: Tensor
    masked: Tensor
    candidate: Tensor
    cu_rows: Tensor
    full: Tensor | None = None
    changed: Tensor | None = None
    slots: Tensor | None = None
    added: Tensor | None = None
    gap: Tensor | None = None
    encoded: Tensor | None = None
    origin: Tensor | None = None

    @property
    def live(self) -> Tensor:
        """bool[N]: rows that are not padding."""
        return torch.arange(len(self.masked), device=self.masked.device) < self.cu_rows[-1]

    def head(self, count: int) -> StepRows:
        """The first `count` rows, as views."""
        return self._each(lambda name, value: value if name == "cu_rows" else value[:count])

    def clone(self) -> StepRows:
        """A copy that shares no tensor."""
        return self._each(lambda name, value: value.clone())

    def _each(self, change: Callable[[str, Tensor], Tensor]) -> StepRows:
        changed: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            changed[each.name] = None if value is None else change(each.name, value)
        return StepRows(**changed)


@dataclass(frozen=True)
class RowResults:
    """Results of a step program for each of its N rows.

    Attributes:
        token: i64[N], -1 without one.
        confidence: f32[N], -inf on rows that cannot be committed (no candidate, evicted or without a token).
        kept: bool[N], rows that reached the last stage.
        measured: by name, f32[N], statistics that the program computed, with their fillers on rows that cannot be
            committed.
        draw: i64[N], a token drawn from the distribution whose most likely token is `token`; None from a program that
            gives only one of both.
    """

    token: Tensor
    confidence: Tensor
    kept: Tensor
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    draw: Tensor | None = None

    def at(self, rows: Tensor, fillers: Mapping[str, float]) -> dict[str, Tensor]:
        """Token, confidence and statistics of rows i64[...], by name; fillers where that is -1."""
        decided = {"token": read(self.token, rows, -1), "confidence": read(self.confidence, rows, -math.inf)}
        return decided | {name: read(values, rows, fillers[name]) for name, values in self.measured.items()}


def predictors(rows: StepRows, sequences: int, block: int, added: bool = False) -> Tensor:
    """i64[b, B + 1]: the row that predicts each column of the current block, and the position after it; else -1.

    added: of the rows that the plan adds, no longer of those of the sequence.
    """
    width = block + 1
    at = rows.sequence * width + rows.column - block
    there = rows.live & (rows.column >= block)
    if rows.added is not None:
        there = there & (rows.added if added else ~rows.added)
    return inverse(torch.where(there, at, -1), sequences * width).view(sequences, width)


def row_results(
    rows: StepRows,
    token: Tensor,
    confidence: Tensor,
    kept: Tensor | None = None,
    measured: Mapping[Statistic, Tensor] | None = None,
    draw: Tensor | None = None,
) -> RowResults:
    """Scatter outputs of a step program (K entries, padding at the end) to the rows of the step.

    token and draw i64[K], confidence and measured f32[K]; kept i64[K]: the row of each entry, -1 for padding; None:
    entry i is row i.
    """
    n = len(rows.masked)
    entry = None if kept is None else inverse(kept, n)

    def per_row(values: Tensor, filler: float) -> Tensor:
        return values[:n] if entry is None else read(values, entry, filler)

    survived = torch.ones_like(rows.masked) if entry is None else entry >= 0
    token = per_row(token, -1)
    committable = rows.candidate & survived & (token >= 0)

    def decided(values: Tensor, filler: float) -> Tensor:
        return torch.where(committable, per_row(values.float(), filler), filler)

    found = {s.name: decided(values, s.filler) for s, values in (measured or {}).items()}
    drawn = None if draw is None else per_row(draw, -1)
    return RowResults(token, decided(confidence, -math.inf), survived, found, drawn)


def offsets_of(counts: Tensor) -> Tensor:
    """i32[b+1]: offsets of the sequences' rows, from counts [b]; the last is their total."""
    return counts.expand(len(counts) + 1, -1).tril(-1).sum(dim=1).int()


def inverse(index: Tensor, count: int) -> Tensor:
    """i64[count]: place of each number from 0 in index, -1 for numbers that are not in it.

    index i64[n]: numbers below count, each at most once, and any number of -1.
    """
    places = torch.full((count + 1,), -1, dtype=torch.int64, device=index.device)  # the last is for -1
    return places.scatter_(0, torch.where(index >= 0, index, count), torch.arange(len(index), device=index.device))[:-1]


def read(values: Tensor, at: Tensor, fill: float) -> Tensor:
    """values[at] in the shape of `at`, and `fill` where it is -1."""
    return torch.where(at >= 0, values[at.clamp(min=0)], fill)


def choose(sequences: Tensor | bool, value: Tensor, other: Tensor) -> Tensor:
    """`value` [b, ...] for the sequences bool[b], `other` for the rest; one bool decides for all of them."""
    if isinstance(sequences, bool):
        return value if sequences else other
    return torch.where(sequences.view(-1, *(1,) * (value.dim() - 1)), value, other)


def packed(live: Tensor, capacity: int, prompts: int = 0) -> tuple[Tensor, Tensor]:
    """i64[capacity]: places in live.flatten() that are set, ascending, then -1; i32[b+1]: offsets of the sequences.

    Places beyond `capacity` are left out.

    Args:
        live: bool[b, W].
        capacity: length of the result.
        prompts: number of columns at the left that hold rows of prompts. The set ones among them are the last of these
            columns. There are many of them, so they are found by their count, without a tensor of their size.
    """
    width, cu_rows = live.shape[1], offsets_of(live.sum(dim=1))
    own, others = live[:, :prompts].sum(dim=1), live[:, prompts:]
    row = (cu_rows[:-1] + own)[:, None] + others.cumsum(dim=1) - 1
    index = inverse(torch.where(others & (row < capacity), row, -1).flatten(), capacity)
    if not prompts:
        return index, cu_rows
    index = torch.where(index >= 0, index // others.shape[1] * width + prompts + index % others.shape[1], -1)
    number = torch.arange(capacity, device=live.device)
    sequence = (cu_rows[1:-1, None] <= number).sum(dim=0)
    place = number - cu_rows[sequence]
    first = sequence * width + prompts - own[sequence] + place
    return torch.where((place < own[sequence]) & (number < cu_rows[-1]), first, index), cu_rows


def prefill_rows(canvas: Tensor, begin: Tensor, end: Tensor, block: int, count: int, causal: bool = False) -> StepRows:
    """Pack the positions [begin, end) of every sequence of canvas i64[b, T]; both i64[b]; `count` rows in all.

    A row sees its whole block, where begin and end are multiples of the block; or, if causal, itself and all before it.
    """
    width = canvas.shape[1]
    column = torch.arange(width, device=canvas.device)
    live = (column >= begin[:, None]) & (column < end[:, None])
    index = torch.nonzero_static(live.flatten(), size=count)[:, 0]
    sequence, positions = index // width, index % width
    return StepRows(
        sequence=sequence,
        column=positions,
        input_ids=canvas.flatten()[index],
        positions=positions,
        limit=(positions + 1 if causal else (positions // block + 1) * block).int(),
        masked=torch.zeros(count, dtype=torch.bool, device=canvas.device),
        candidate=torch.zeros(count, dtype=torch.bool, device=canvas.device),
        cu_rows=offsets_of(end - begin),
        encoded=torch.full((count,), causal, device=canvas.device),
        origin=(positions if causal else positions // block * block).int(),
    )


def first_limits(spec: ModelSpec, positions: Tensor, known: int, block: int) -> Tensor:
    """i64[n]: limit of each row of a sequence that is forwarded as a whole.

    positions i64[n]: from 0; those from `known` on are masks, as before the first step that denoises them.
    """
    if spec.attention != "block_causal":
        return torch.full_like(positions, len(positions))
    if spec.aligned:
        return ((positions // block + 1) * block).clamp(max=len(positions))
    after = known + ((positions - known) // block + 1) * block
    return torch.where(positions < known, positions + 1, after.clamp(max=len(positions)))


def prefill_chunk(
    spans: Sequence[tuple[int, int]], block: int, most: int, part: int | None = None
) -> list[tuple[int, int]]:
    """Next part (begin, end) of each prompt; empty for prompts that must wait.

    Parts are whole blocks, in the order of the prompts.

    Args:
        spans: rest [begin, length) of each prompt.
        block: positions of a block.
        most: rows together at most; at least one block.
        part: rows of each prompt at most, at least one block; None for `most`.
    """
    found = []
    for begin, length in spans:
        step = min(length - begin, most // block * block, part or most)
        most -= step
        found.append((begin, begin + step))
    return found


def idle_rows(rows: int, sequences: int, block: int, device: torch.device) -> StepRows:
    """Make that many live dummy rows, filled sequence by sequence, two blocks each, or more if these do not suffice.

    No row is a candidate, so that a program which evicts keeps all of them and runs every stage on the same bucket.
    """
    index, each = torch.arange(rows, device=device), max(2 * block, -(-rows // sequences))
    positions, zeros, none = index % each, torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    bounds = torch.arange(sequences + 1, device=device) * each
    return StepRows(
        sequence=index // each,
        column=zeros,
        input_ids=zeros,
        positions=positions,
        limit=(positions + 1).int(),
        masked=none,
        candidate=none,
        cu_rows=bounds.clamp(max=rows).int(),
        full=~none,
        changed=~none,
        slots=positions,
        added=none,
        gap=torch.zeros((rows, 2), dtype=torch.int32, device=device),
        encoded=~none,
        origin=positions.int(),
    )


def key_sizes(keys: int) -> list[int]:
    """Sizes of key rows of steps, ascending, up to the first that is at least `keys`."""
    sizes = [KEY_ROWS]
    while sizes[-1] < keys:
        sizes.append(sizes[-1] * KEY_STRIDE)
    return sizes
