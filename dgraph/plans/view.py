"""Facts that a decode loop knows before a step, which regions and schedules read on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FACTS = (
    *("step", "block_step", "decoded", "prompt_end", "end", "start", "block", "shift"),
    *("positions", "masked", "changed", "wanted", "coming", "decoded_in", "entropy"),
)
"""Names of what a view may know; see `View`."""


class Unknown(Exception):
    """A fact that only the device knows; the host cannot count rows ahead by it."""


class View:
    """Known facts of b sequences before a step.

    The device knows all facts, as tensors, and a compiled or captured transition computes with them: no value is read,
    no shape depends on one. The host knows a part of them ahead, as the same tensors on a CPU. Asking for another fact
    raises `Unknown`. So the same formula gives the row count of a step without a host read, wherever that is possible
    at all.

    Attributes:
        step, block_step: i64[b], steps that a sequence has done, and those of its current block.
        decoded: i64[b], tokens that it has decoded.
        prompt_end, end: i64[b], positions where its prompt and its response end. A rule that extends moves the latter.
        start: i64[b], position where its current block begins.
        block, shift: ints, positions of a block, and 1 if a row predicts the position after its own, else 0.
        positions: i64[T], of the rows of a canvas, from 0.
        masked: bool[b, T], positions of the response that are not decoded.
        changed: bool[b, T], positions that were decoded in the step before.
        wanted: bool[b, T], rows that predict positions of the current block that are not decoded.
        coming: i64[b, n], columns of the current block that the step will decode, in their order, and -1 for none; only
            of policies that know them before the step. Asked of other policies by a region that `foresees` alone.
        decoded_in: i64[b, T], the sequence's step that decoded each position, from 1; 0 without one. Known under a plan
            that `notes`.
        entropy: f32[b], the largest entropy, in nats, of the distributions from which the step before decoded; -inf
            without one. Known under a plan that `notes`.
    """

    step: Tensor
    block_step: Tensor
    decoded: Tensor
    prompt_end: Tensor
    end: Tensor
    start: Tensor
    block: int
    shift: int
    positions: Tensor
    masked: Tensor
    changed: Tensor
    wanted: Tensor
    coming: Tensor
    decoded_in: Tensor
    entropy: Tensor

    def __init__(self, **known: Any):
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name not in FACTS:
            raise AttributeError(f"a view has no {name!r}; it may know: {', '.join(FACTS)}.")
        raise Unknown(name)

    @property
    def length(self) -> Tensor:
        """i64[b]: tokens of the response, decoded or not."""
        return self.end - self.prompt_end

    @property
    def inside(self) -> Tensor:
        """bool[b, T]: rows of the sequence."""
        return self.positions < self.end[:, None]

    def since(self, position: Tensor) -> Tensor:
        """bool[b, T]: rows from the one that predicts a position i64[b] on; its own row is among them."""
        return self.inside & (self.positions >= (position - self.shift)[:, None])

    def around_block(self, before: int = 0, after: int = 0) -> Tensor:
        """bool[b, T]: rows of the current block and its lead, with `before` rows before them and `after` after them.

        The lead is the row that predicts the block's first position, if that is another row than the position's own.
        """
        end = self.start + self.block + after
        return self.since(self.start - before) & (self.positions < end[:, None])


def ahead(found: Callable[[View], Tensor], view: View) -> Tensor | None:
    """The value of a formula over a partly known view; None if it needs an unknown fact."""
    try:
        return found(view)
    except Unknown:
        return None


FIRST = View(
    step=torch.zeros(1, dtype=torch.int64),
    block_step=torch.zeros(1, dtype=torch.int64),
    decoded=torch.zeros(1, dtype=torch.int64),
    start=torch.ones(1, dtype=torch.int64),
    prompt_end=torch.ones(1, dtype=torch.int64),
    end=torch.full((1,), 2),
    block=1,
    shift=0,
    positions=torch.arange(2),
)
"""The first step of some response, as a schedule sees it."""
LATER_BLOCK = View(**{**vars(FIRST), "step": torch.full((1,), 1 << 30)})
"""The first step of a block that comes late."""
