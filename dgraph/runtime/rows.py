"""The packed rows of a step, and what a program says about them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepRows:
    """The packed rows of one forward: N rows of b sequences, per sequence contiguous and ascending in
    position.

    sequence i64[N]; column i64[N] in the window; input_ids i64[N]; positions i64[N]; limit i32[N]; masked
    bool[N]; cu_rows i32[b+1].
    """

    sequence: Tensor
    column: Tensor
    input_ids: Tensor
    positions: Tensor
    limit: Tensor
    masked: Tensor
    cu_rows: Tensor


@dataclass(frozen=True)
class RowResults:
    """What a step program says about each of its N rows.

    token i64[N]: -1 where there is none; confidence f32[N]: -inf on rows that cannot be committed (not
    masked, evicted or without a token); kept bool[N]: rows that reached the last stage.
    """

    token: Tensor
    confidence: Tensor
    kept: Tensor


def row_results(rows: StepRows, token: Tensor, confidence: Tensor, kept: Tensor | None = None) -> RowResults:
    """Outputs of a step program (K entries, padding at the end) -> per row of the step.

    token i64[K], confidence f32[K]; kept i64[K]: the row of each entry, -1 for padding; None: entry i is
    row i.
    """
    n = len(rows.masked)
    if kept is None:
        token, confidence, survived = token[:n], confidence[:n].float(), torch.ones_like(rows.masked)
    else:
        slot = torch.where(kept >= 0, kept, n)  # padding goes to one extra row
        survived = rows.masked.new_zeros(n + 1).scatter_(0, slot, True)[:n]
        token = token.new_full((n + 1,), -1).scatter_(0, slot, token)[:n]
        confidence = torch.full((n + 1,), -math.inf, device=slot.device).scatter_(0, slot, confidence.float())[:n]
    committable = rows.masked & survived & (token >= 0)
    return RowResults(token, torch.where(committable, confidence, -math.inf), survived)


def prefill_rows(canvas: Tensor, begin: Tensor, end: Tensor, block: int, count: int) -> StepRows:
    """Positions [begin, end) of every sequence of canvas i64[b, T]; both i64[b], multiples of the block; `count` rows
    in all.
    """
    b, width = canvas.shape
    column = torch.arange(width, device=canvas.device)
    live = (column >= begin[:, None]) & (column < end[:, None])
    index = torch.nonzero_static(live.flatten(), size=count)[:, 0]
    sequence, positions = index // width, index % width
    cu_rows = torch.zeros(b + 1, dtype=torch.int32, device=canvas.device)
    cu_rows[1:] = (end - begin).cumsum(0)
    return StepRows(
        sequence=sequence,
        column=positions,
        input_ids=canvas.flatten()[index],
        positions=positions,
        limit=((positions // block + 1) * block).int(),
        masked=torch.zeros(count, dtype=torch.bool, device=canvas.device),
        cu_rows=cu_rows,
    )


def prefill_chunks(lengths: Sequence[int], block: int, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Ranges (begin, end) per sequence that together cover [0, length) of each, at most `most` rows a chunk.

    A sequence is split at blocks only, and its chunks come in order: a later block reads the keys of earlier ones.
    `most` is at least one block.
    """
    begin, end, room = [0] * len(lengths), [0] * len(lengths), most
    for s, length in enumerate(lengths):
        while end[s] < length:
            step = min(length - end[s], room // block * block)
            end[s] += step
            room -= step
            if room < block:
                yield begin, end
                begin, room = list(end), most
                end = list(end)
    if begin != end:
        yield begin, end
