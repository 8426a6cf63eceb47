"""Schedules: rules for the steps that are full, and for those that forward every row.

A schedule from outside is a frozen dataclass of its own, as a region is (see `dgraph.plans.regions`). The host can
compute ahead a schedule that reads `View.step` alone. The loop then reads nothing between such steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.plans.parts import Part, check_counts
from dgraph.plans.view import View


@dataclass(frozen=True)
class Schedule(Part, ABC):
    """Schedule of full steps. Schedules combine: a step of `a | b` is full, or whole, if it is under either."""

    @property
    def notes(self) -> bool:
        """True if it reads `View.decoded_in` or `View.entropy`, which the decode loop then keeps."""
        return False

    @abstractmethod
    def full(self, view: View) -> Tensor:
        """bool[b]: in the step everything is recomputed of the rows that it forwards. The first step of a response
        must be full.
        """

    def whole(self, view: View) -> Tensor:
        """bool[b]: the step forwards every row. A full step does, unless a schedule says otherwise."""
        return self.full(view)

    def always(self, view: View) -> Tensor | None:
        """bool[b, T]: rows that are wholly recomputed whenever they are forwarded; None if there are no such rows."""
        return None

    def sparing(self, full_steps: int) -> Schedule:
        """The same whole steps, of which only some are full: that many first steps of a response, at least 1.

        In the other whole steps a program may skip rows that have hardly changed (DyLLM).
        """
        return FewFull(self, full_steps)

    def __or__(self, other: Schedule) -> Either:
        return Either(self, other)


@dataclass(frozen=True)
class Counted(Schedule):
    """Full steps by their number.

    Attributes:
        full_steps: full steps at the beginning of every block; 0 only with a warm-up.
        every: interval of further full steps within a block, in steps; 0 for no further ones.
        warm_up: full steps at the beginning of a response.
        widen: interval of steps after the warm-up at which every row is forwarded, though not in a full step; 0 for
            never.
    """

    full_steps: int = 1
    every: int = 0
    warm_up: int = 0
    widen: int = 0

    def __post_init__(self) -> None:
        check_counts(self)
        if self.full_steps + self.warm_up < 1:
            raise InputError(
                "the first step of a response must be a full one; set full_steps or warm_up to at least 1."
            )

    def full(self, view: View) -> Tensor:
        found = view.step < self.warm_up
        if self.full_steps:
            found = found | (view.block_step < self.full_steps)
        if self.every:
            found = found | (view.block_step % self.every == 0)
        return found

    def whole(self, view: View) -> Tensor:
        found = self.full(view)
        return found | ((view.step - self.warm_up) % self.widen == 0) if self.widen else found

    def sparing(self, full_steps: int) -> Schedule:
        """See `Schedule`. Without full steps of blocks, these are the warm-up."""
        return super().sparing(full_steps) if self.full_steps else replace(self, warm_up=full_steps)


@dataclass(frozen=True)
class Apart(Schedule):
    """Prompt and response are recomputed at intervals of their own (dLLM-Cache).

    Attributes:
        prompt_every: interval of steps of a response at which every row is forwarded and the prompt recomputed.
        response_every: interval of steps at which all rows of the response are recomputed.
    """

    prompt_every: int
    response_every: int

    def __post_init__(self) -> None:
        check_counts(self)
        if not (self.prompt_every and self.response_every):
            raise InputError(f"prompt_every and response_every must both be at least 1, got {self}.")

    def full(self, view: View) -> Tensor:
        return view.step % self.response_every == 0

    def whole(self, view: View) -> Tensor:
        return view.step % self.prompt_every == 0

    def always(self, view: View) -> Tensor | None:
        return ~view.since(view.prompt_end)  # the prompt is forwarded to be recomputed, whatever the response is


@dataclass(frozen=True)
class FirstShare(Schedule):
    """Steps are full until a share of the response is decoded (SparseD: full attention in the first steps).

    Where every step decodes as many tokens, this is the same share of all steps. For a number of steps that is known,
    take `Counted(full_steps=0, warm_up=...)`, which the host can count ahead.

    Attributes:
        share: of the tokens of the response, in (0, 1], rounded to a number of tokens, and at least one.
    """

    share: float

    def __post_init__(self) -> None:
        if type(self.share) not in (int, float) or not 0 < self.share <= 1:
            raise InputError(f"FirstShare: share must be a number in (0, 1], got {self.share!r}.")

    def full(self, view: View) -> Tensor:
        return view.decoded < (view.length.double() * self.share).round().clamp(min=1)


@dataclass(frozen=True)
class Either(Schedule):
    """A step is full, or whole, if it is so under one of two schedules; so are rows that are always recomputed."""

    first: Schedule
    second: Schedule

    @property
    def notes(self) -> bool:
        """See `Schedule`."""
        return self.first.notes or self.second.notes

    def full(self, view: View) -> Tensor:
        return self.first.full(view) | self.second.full(view)

    def whole(self, view: View) -> Tensor:
        return self.first.whole(view) | self.second.whole(view)

    def always(self, view: View) -> Tensor | None:
        some = [rows for rows in (self.first.always(view), self.second.always(view)) if rows is not None]
        return torch.stack(some).any(dim=0) if some else None


@dataclass(frozen=True)
class FewFull(Schedule):
    """Steps are whole as under another schedule, and full at the beginning of a response.

    A refresh of the canvas where a block starts is then whole and not full, so a saliency gate may skip rows in it.

    Attributes:
        of: the schedule that says which steps are whole.
        full_steps: full steps at the beginning of a response, at least 1.
    """

    of: Schedule
    full_steps: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.of, Schedule):
            raise InputError(f"FewFull: of must be a Schedule, such as Counted(every=4), got {self.of!r}.")
        check_counts(self)
        if not self.full_steps:
            raise InputError("the first step of a response must be a full one; set full_steps to at least 1.")

    @property
    def notes(self) -> bool:
        """See `Schedule`."""
        return self.of.notes

    def full(self, view: View) -> Tensor:
        return view.step < self.full_steps

    def whole(self, view: View) -> Tensor:
        return self.of.whole(view)

    def always(self, view: View) -> Tensor | None:
        return self.of.always(view)


SCHEDULES: dict[str, type[Schedule]] = {cls.__name__: cls for cls in (Counted, Apart, FirstShare, Either, FewFull)}
"""The schedules that come with dgraph, by name."""
