"""What the host reads of a batch after a step: a few integers of each slot, and what is known of its block."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgraph.errors import DgraphError
from dgraph.runtime.decode_state import REPORT, SHOWN
from dgraph.runtime.requests import Request

Numbers = NDArray[np.int64]


class Report:
    """One report; see `DecodeState.report`.

    Every name of `REPORT` is an attribute, i64[b]. Of the block that the step was about: `shown` i64[b, B], its tokens,
    -1 where there is a mask; `confidence` f32[b, B], with which each was committed; `kept` bool[b, B], False where the
    step evicted the row of a position.
    """

    def __init__(self, numbers: Numbers):
        self._numbers = numbers

    def __getattr__(self, name: str) -> Any:
        if name not in REPORT:
            raise AttributeError(name)
        return self._numbers[:, REPORT.index(name)]

    @property
    def shown(self) -> Numbers:
        """i64[b, B]"""
        return self._of_block("shown")

    @property
    def confidence(self) -> NDArray[np.float32]:
        """f32[b, B]"""
        return self._of_block("shown_confidence").astype(np.int32).view(np.float32)

    @property
    def kept(self) -> NDArray[np.bool_]:
        """bool[b, B]"""
        return self._of_block("shown_kept") != 0

    def named(self) -> dict[str, Numbers]:
        """Everything in it, by name."""
        return {**{name: getattr(self, name) for name in REPORT}, **{name: self._of_block(name) for name in SHOWN}}

    def _of_block(self, name: str) -> Numbers:
        block = (self._numbers.shape[1] - len(REPORT)) // len(SHOWN)
        begin = len(REPORT) + SHOWN.index(name) * block
        return self._numbers[:, begin : begin + block]


class Reports:
    """Brings reports to the host, without waiting for the device until one is read.

    Args:
        source: i64[b, n] on the device that decodes; what it holds when `post` is called is what `read` gives.
    """

    def __init__(self, source: Tensor):
        self._source = source
        self._on_gpu = source.device.type == "cuda"
        # Two, since a step may be launched, and its report posted, before the one before it is read.
        self._buffers = [torch.empty(source.shape, dtype=source.dtype, pin_memory=self._on_gpu) for _ in range(2)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._on_gpu else []
        self._next = 0

    def post(self) -> None:
        """Copy the report as it will be when the work that has been launched is done."""
        self._buffers[self._next].copy_(self._source, non_blocking=True)
        if self._on_gpu:
            self._events[self._next].record()
        self._next = 1 - self._next

    def read(self) -> Report:
        """The report that was posted last, once it is there."""
        last = 1 - self._next
        if self._on_gpu:
            self._events[last].synchronize()
        return Report(self._arrays[last].copy())


def broken(request: Request, start: int) -> DgraphError:
    """The error of a request of which a step committed nothing, because of its numbers or of its rule."""
    rule = request.decoding.rule
    return DgraphError(
        f"program 'step' gave no usable confidence for prompt {request.index} (block at position {start}), or "
        f"{type(rule).__name__} chose none of its masks: NaN, no candidate with a token and a confidence, or a rule "
        f"that waits without may_wait. Check the weights, whether their dtype overflows, and the rule."
    )
