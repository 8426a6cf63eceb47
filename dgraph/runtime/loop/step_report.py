"""Report of a batch to the host after a step: a few integers per slot, and the tokens of its block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgraph.errors import DgraphError
from dgraph.runtime.requests import Request
from dgraph.runtime.state.report import REPORT, SHOWN

Numbers = NDArray[np.int64]
ALL_ROWS = REPORT.index("all_rows")


class Report:
    """One report; see `report_of`.

    Every name of `REPORT` is an attribute, i64[b]. The properties describe the block of the step.
    """

    def __init__(self, numbers: Numbers):
        self._numbers = numbers

    def __getattr__(self, name: str) -> Any:
        if name not in REPORT:
            raise AttributeError(name)
        return self._numbers[:, REPORT.index(name)]

    @property
    def shown(self) -> Numbers:
        """i64[b, W]: tokens of the open blocks, -1 for masks."""
        return self._of_block("shown")

    @property
    def confidence(self) -> NDArray[np.float32]:
        """f32[b, W]: confidence with which each token was committed."""
        return self._of_block("shown_confidence").astype(np.int32).view(np.float32)

    @property
    def kept(self) -> NDArray[np.bool_]:
        """bool[b, W]: False if the step evicted the row of a position."""
        return self._of_block("shown_kept") != 0

    def named(self) -> dict[str, Numbers]:
        """Everything in it, by name."""
        return {**{name: getattr(self, name) for name in REPORT}, **{name: self._of_block(name) for name in SHOWN}}

    def _of_block(self, name: str) -> Numbers:
        block = (self._numbers.shape[1] - len(REPORT)) // len(SHOWN)
        begin = len(REPORT) + SHOWN.index(name) * block
        return self._numbers[:, begin : begin + block]


def all_rows(numbers: Numbers) -> int:
    """Rows of the next step, from a report as it arrived. The device waits for this number, but not for the others."""
    return int(numbers[0, ALL_ROWS])


def broken(request: Request, start: int) -> DgraphError:
    """Error for a request of which a step committed nothing, because of its numbers or of its rule."""
    rule = request.decoding.rule
    return DgraphError(
        f"program 'step' gave no usable confidence for prompt {request.index} (block at position {start}), or "
        f"{type(rule).__name__} chose none of its masks. Causes are NaN, no candidate with a confidence, or a rule "
        f"that waits without may_wait. Check the weights, whether their dtype overflows, and the rule."
    )
