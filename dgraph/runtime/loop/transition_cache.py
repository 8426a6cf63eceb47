"""The transitions between the steps of a session: one that was captured serves later batches of its shape."""

from __future__ import annotations

from collections.abc import Hashable

from dgraph.lowering.traced import TraceCompiler
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.batch_config import BatchConfig
from dgraph.runtime.loop.transition import StepTransition
from dgraph.runtime.state.base import DecodeState

CANVAS_COLUMNS = 512
"""Columns of which the canvas has a multiple if transitions are captured."""
WARM_COLUMNS = 4096
"""Columns up to which canvases of a block-causal model are padded to the size of the warm-up."""


class Transitions:
    """Make the transition of a batch, or reuse the one of the batch before.

    Args:
        pool: where it is captured; None to run it op by op.
        compiler: provides the compiled transition, and compiles it in a warm-up; None captures it op by op.
    """

    def __init__(self, pool: GraphPool | None, compiler: TraceCompiler | None):
        self._pool, self._compiler = pool, compiler
        self._last: tuple[Hashable, StepTransition] | None = None
        self._columns = 0

    @property
    def compiles(self) -> bool:
        """True if transitions are compiled."""
        return self._compiler is not None

    def stride(self, block: int) -> int:
        """Columns of which canvases have a multiple."""
        return -(-self._columns // block) * block if self._columns else max(block, CANVAS_COLUMNS // block * block)

    def widen(self, columns: int, block: int) -> None:
        """Pad later canvases to that many columns, rounded up to the stride, if they are at most `WARM_COLUMNS`."""
        if columns <= WARM_COLUMNS:
            self._columns = -(-columns // self.stride(block)) * self.stride(block)

    def passing(self, config: BatchConfig, state: DecodeState) -> StepTransition:
        """The transition of a batch whose shape no other will have: nothing is captured."""
        return StepTransition(config, state, state.capacity)

    def lasting(self, config: BatchConfig, state: DecodeState) -> StepTransition:
        """A captured transition for a batch of this shape with idle slots: that of the call before, if it fits."""
        key = (config.key, state.block, state.most_rows, tuple(state.canvas.shape), tuple(state.wanted().shape))
        if self._last is None or self._last[0] != key:
            if self._last is not None:
                self._last[1].let_go()
                self._last = None  # frees its tensors before new ones are made
            self._last = (key, StepTransition(config, state, state.capacity, self._pool, self._compiler))
        return self._last[1]
