"""The packed rows of a step, and what a program says about them."""

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
"""Rows of keys of a step in which sequences see everything: the fewest where it is recorded as a CUDA graph, which has
one number of them, and each size to the one before.
"""


@dataclass(frozen=True)
class StepRows:
    """The packed rows of one forward: rows of b sequences, per sequence contiguous and ascending in position.

    sequence i64[N]; column i64[N]: from B on, B more than the column of the current block that the row predicts; below
    0 of rows of a prompt that are encoded; the others are as the kind of state says; input_ids i64[N]; positions
    i64[N]; limit i32[N]; cu_rows i32[b+1]. The first cu_rows[b] rows are live. What follows is padding, which belongs
    to no sequence: 0 or False everywhere.

    masked bool[N]: the row's own position is one of the current block that holds a mask. candidate bool[N]: the
    position that the row predicts is one whose token the step may commit: a mask of the current block, or what a policy
    that edits may replace. Without a logit shift and edits the two are equal.

    Where there is a plan, else None: full bool[N]: everything is recomputed for the row, because its sequence takes a
    full step or the row commits a block; changed bool[N]: the row's token was decoded in the step before, or full.

    Where a plan hides rows, else None: slots i64[N]: where the keys of the row lie in the pages of its sequence. The
    rows that exist lie side by side in the order of their positions, and limit counts them.

    Of a model whose rows are encoded or denoised by a flag, else None: encoded bool[N]: which are encoded; origin
    i32[N]: where windows count back from: where an encoded row stands, or where the block of a denoised one begins.
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
    """What a step program says about each of its N rows.

    token i64[N]: -1 where there is none; draw i64[N]: drawn from the distribution of which token is the most likely
    one, None from a program that gives one of both; confidence f32[N]: -inf on rows that cannot be committed (no
    candidate, evicted or without a token); kept bool[N]: rows that reached the last stage. measured: by name, f32[N]:
    the statistics that the program computed, with their fillers on such rows.
    """

    token: Tensor
    confidence: Tensor
    kept: Tensor
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    draw: Tensor | None = None


def row_results(
    rows: StepRows,
    token: Tensor,
    confidence: Tensor,
    kept: Tensor | None = None,
    measured: Mapping[Statistic, Tensor] | None = None,
    draw: Tensor | None = None,
) -> RowResults:
    """Outputs of a step program (K entries, padding at the end) -> per row of the step.

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
    """i32[b+1]: where each sequence's rows begin, and where the last one's end, from counts [b]."""
    return counts.expand(len(counts) + 1, -1).tril(-1).sum(dim=1).int()


def inverse(index: Tensor, count: int) -> Tensor:
    """i64[count]: where each of the numbers from 0 stands in index, -1 for those that do not.

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
    """i64[capacity]: the places in live.flatten() that are set, ascending, and -1 after them; i32[b+1]: where those
    of each sequence begin, and where the last one's end. live bool[b, W].

    Where more than `capacity` are set, the others are left out. prompts: so many columns at the left hold rows of
    prompts, of which those next to the other columns are set. There are many of them, so they are found by their
    number, with nothing of their size in memory.
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
    """Positions [begin, end) of every sequence of canvas i64[b, T]; both i64[b]; `count` rows in all.

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
    """What each row of a sequence that is forwarded as a whole sees: positions i64[n] from 0, of which those from
    `known` on are masks, as the first step that denoises these finds them.
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
    """The next part (begin, end) of each of the prompts, of which [begin, length) is left: whole blocks, in order, at
    most `most` rows together, and `part` of each; empty for those that must wait. Both are at least one block.
    """
    found = []
    for begin, length in spans:
        step = min(length - begin, most // block * block, part or most)
        most -= step
        found.append((begin, begin + step))
    return found


def idle_rows(rows: int, sequences: int, block: int, device: torch.device) -> StepRows:
    """That many live rows, filled sequence by sequence, two blocks each, or more if that is not all of them.

    None is a candidate, so that a program which evicts keeps all of them and runs every stage on the same bucket.
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
        encoded=~none,
        origin=positions.int(),
    )


def key_sizes(keys: int) -> list[int]:
    """The numbers of rows of keys that steps have, up to the first that is at least so many."""
    sizes = [KEY_ROWS]
    while sizes[-1] < keys:
        sizes.append(sizes[-1] * KEY_STRIDE)
    return sizes
