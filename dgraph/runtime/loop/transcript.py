"""Tokens of a batch's sequences so far, on the host."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from dgraph.runtime.loop.step_report import Report
from dgraph.runtime.requests import Request, Stops

NONE = Stops()
"""No token ends a response."""


class Transcripts:
    """Tokens of every slot by position, with the step that committed each and its confidence.

    They come from the fixed tokens of responses, and from a batch's reports.

    Args:
        slots, columns: sizes of the batch.
        block: columns of a block.
    """

    def __init__(self, slots: int, columns: int, block: int):
        self._tokens = np.full((slots, columns), -1)
        self._steps = np.zeros((slots, columns), dtype=np.int64)
        self._confidence = np.zeros((slots, columns), dtype=np.float32)
        self._columns = np.arange(block)

    def begin(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Reset these slots to the fixed tokens of their responses, with step 0 and confidence 1."""
        self._tokens[list(slots)] = -1
        for slot, request in zip(slots, requests, strict=True):
            at = slice(len(request.ids), len(request.ids) + len(request.canvas))
            self._tokens[slot, at] = [-1 if token is None else token for token in request.canvas]
            self._steps[slot, at], self._confidence[slot, at] = 0, 1

    def write(self, report: Report, slots: Sequence[int]) -> None:
        """Copy a report's tokens of these slots."""
        rows = np.array(slots, dtype=np.int64)[:, None]
        at = report.shown_start[rows] + self._columns
        before, after = self._tokens[rows, at], report.shown[rows[:, 0]]
        self._steps[rows, at] = np.where(before == after, self._steps[rows, at], report.counter[rows])
        self._tokens[rows, at], self._confidence[rows, at] = after, report.confidence[rows[:, 0]]

    def tokens(self, slot: int, begin: int, end: int) -> list[int]:
        """Positions [begin, end) of a slot, -1 where nothing is committed yet."""
        found: list[int] = self._tokens[slot, begin:end].tolist()
        return found

    def steps(self, slot: int, begin: int, end: int) -> list[int]:
        """The slot's step that committed each of these positions, from 1; 0 for fixed tokens."""
        found: list[int] = self._steps[slot, begin:end].tolist()
        return found

    def confidence(self, slot: int, begin: int, end: int) -> list[float]:
        """Confidence with which each of these positions was committed."""
        found: list[float] = self._confidence[slot, begin:end].tolist()
        return found

    def until_stop(self, slot: int, begin: int, end: int, stops: Stops) -> tuple[list[int], bool]:
        """Tokens of a sequence from position `begin` up to a mask, `end`, or a stop token; True if that ends them."""
        tokens = self.tokens(slot, begin, end)
        for at, token in enumerate(tokens):
            if token < 0:
                return tokens[:at], False
            if begin + at >= stops.first.get(token, sys.maxsize):
                return tokens[: at + (token in stops.kept)], True
        return tokens, False

    def response(self, slot: int, begin: int, end: int, stops: Stops = NONE) -> list[int]:
        """Tokens of a sequence from position `begin` up to a mask, `end`, or a stop token."""
        return self.until_stop(slot, begin, end, stops)[0]
