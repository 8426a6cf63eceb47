"""Regions: the rows of the canvas that a step forwards if it is not whole, and the rows that exist at all.

A region from outside is a frozen dataclass of its own:

    @dataclass(frozen=True)
    class Odd(Region):
        def rows(self, view):
            return view.around_block() & (view.positions % 2 == 1) | view.masked

Its methods run in the transition between steps, which may be compiled or captured as a CUDA graph: they are tensor code
whose shapes depend on no value, and read none on the host. A draw is a hash of positions
(`dgraph.runtime.sampling.random_numbers`), not a call of a generator.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.plans.parts import Part, check_counts
from dgraph.plans.view import View


class Extent(enum.Enum):
    """Part of the canvas that a region stays within."""

    BLOCK = "the block"
    RESPONSE = "the response"
    BEFORE = "the block and rows before it"
    CANVAS = "the canvas"


@dataclass(frozen=True)
class Region(Part, ABC):
    """Rows that a step forwards.

    Attributes:
        foresees: True if `rows` reads `View.coming`, which only policies that know it serve.
        hides: True if `seen` hides rows. The programs must then address their caches by slot (the pass `SlotKV`).
    """

    foresees: ClassVar[bool] = False
    hides: ClassVar[bool] = False

    @property
    def extent(self) -> Extent:
        """The part of the canvas that its rows stay within."""
        return Extent.CANVAS

    @property
    def notes(self) -> bool:
        """True if it reads `View.decoded_in` or `View.entropy`, which the decode loop then keeps."""
        return False

    @abstractmethod
    def rows(self, view: View) -> Tensor:
        """bool[b, T]: rows that a step forwards. Rows outside of the sequence are left out anyway."""

    def seen(self, view: View) -> Tensor:
        """bool[b, T]: rows that exist, for a region that `hides`; others are not forwarded and their keys are not seen.

        Where this changes between two steps, the second one is whole and full. The current block and the row that
        predicts its first position are always seen.
        """
        return view.inside


def rows_of(region: Region, view: View) -> Tensor:
    """The result of a region's `rows`; raises `InputError` for a value that is no bool[b, T]."""
    return _checked(region, "rows", region.rows(view), view)


def seen_of(region: Region, view: View) -> Tensor:
    """The result of a region's `seen`, checked as in `rows_of`."""
    return _checked(region, "seen", region.seen(view), view)


def _checked(region: Region, method: str, found: object, view: View) -> Tensor:
    wanted = view.inside
    if isinstance(found, Tensor) and (found.dtype, found.shape) == (wanted.dtype, wanted.shape):
        return found
    got = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
    raise InputError(
        f"{type(region).__name__}.{method} returns a tensor {wanted.dtype} {list(wanted.shape)}, whether each position "
        f"of each sequence is among its rows; got {got}."
    )


@dataclass(frozen=True)
class All(Region):
    """Every row."""

    def rows(self, view: View) -> Tensor:
        return view.inside


@dataclass(frozen=True)
class Response(Region):
    """All rows after the prompt."""

    @property
    def extent(self) -> Extent:
        """See `Region`."""
        return Extent.RESPONSE

    def rows(self, view: View) -> Tensor:
        return view.since(view.prompt_end)


@dataclass(frozen=True)
class Suffix(Region):
    """The current block, and all after it.

    Attributes:
        lead: as in `Block`.
    """

    lead: bool = True

    def __post_init__(self) -> None:
        check_counts(self)

    @property
    def extent(self) -> Extent:
        """See `Region`."""
        return Extent.RESPONSE

    def rows(self, view: View) -> Tensor:
        return view.since(view.start) if self.lead else view.since(view.start + view.shift) | view.wanted


@dataclass(frozen=True)
class Block(Region):
    """The current block.

    Attributes:
        before, after: rows before the block, and after it, that go with it.
        lead: with shifted logits, steps in which the row before the block goes with it. That row predicts the block's
            first position and nothing else. True: in all steps; False: only in steps that still want that position.
    """

    before: int = 0
    after: int = 0
    lead: bool = True

    def __post_init__(self) -> None:
        check_counts(self)

    @property
    def extent(self) -> Extent:
        """See `Region`."""
        return Extent.BEFORE if self.before else Extent.RESPONSE if self.after else Extent.BLOCK

    def rows(self, view: View) -> Tensor:
        if self.lead:
            return view.around_block(self.before, self.after)
        return view.around_block(self.before - view.shift, self.after) | view.wanted


@dataclass(frozen=True)
class Decoded(Region):
    """Positions of the current block that are decoded."""

    @property
    def extent(self) -> Extent:
        """See `Region`."""
        return Extent.BLOCK

    def rows(self, view: View) -> Tensor:
        inside = (view.positions >= view.start[:, None]) & (view.positions < (view.start + view.block)[:, None])
        return view.inside & inside & ~view.masked


@dataclass(frozen=True)
class Next(Region):
    """Rows that the step decodes from, masked rows around them, and rows that were decoded in the step before.

    It serves policies that know the step's commits before the step (dKV-Cache-Greedy).

    Attributes:
        around: number of masked rows that each row that the step decodes from adds to the region. The rows add in the
            order in which they are decoded. Each takes the nearest masked rows of the response, in the block or after
            it, that are not in the region yet. It takes the left one first of two that are equally near.
    """

    around: int = 0

    foresees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(self)

    def rows(self, view: View) -> Tensor:
        coming, width = view.coming, len(view.positions)
        some, centres = coming >= 0, view.start[:, None] + coming - view.shift
        rows = torch.cat([view.changed, torch.zeros_like(view.changed[:, :1])], dim=1)
        rows = rows.scatter(1, torch.where(some, centres, width).clamp(min=0), True)[:, :-1]
        far, around = 2 * width, min(self.around, width)
        for column in range(coming.shape[1] if around else 0):
            away = view.positions - centres[:, column, None]
            distance = torch.where(view.masked & ~rows, 2 * away.abs() + (away > 0), far)  # the left one first
            distance, nearest = distance.topk(around, dim=1, largest=False)
            chosen = (distance < far) & some[:, column, None]
            rows = rows | torch.zeros_like(rows).scatter(1, nearest, chosen)
        return rows


REGIONS: dict[str, type[Region]] = {cls.__name__: cls for cls in (All, Response, Suffix, Block, Decoded, Next)}
"""The regions that come with dgraph, by name."""
