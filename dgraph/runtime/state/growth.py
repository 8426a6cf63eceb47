"""Responses that grow while they are decoded: masks at their end, and masks between the positions of a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dgraph.errors import InputError


@dataclass(frozen=True)
class Growth:
    """Masks that a step adds to b responses.

    Attributes:
        at_end: i64[b], at the end.
        inserted: i64[b, B], after each column of the block; None if nothing can be inserted.
    """

    at_end: Tensor
    inserted: Tensor | None = None

    @classmethod
    def of(cls, more: Tensor, block: int, room: Tensor, fixed_ahead: Tensor) -> Growth:
        """The growth that a rule asks for, as far as there is room for it; see `DecodeRule.extend`.

        Args:
            more: what the rule returned.
            block: columns of a block.
            room: i64[b], tokens by which each response may still grow.
            fixed_ahead: bool[b], fixed tokens stand in the block or after it.

        Raises:
            InputError: the rule returned another shape or dtype.
        """
        shapes = ((len(room),), (len(room), block + 1))
        if more.dtype != torch.int64 or tuple(more.shape) not in shapes:
            raise InputError(
                f"extend returns a tensor i64[b], or i64[b, B + 1] of a rule that inserts (b = {len(room)}, "
                f"B = {block}), got {more.dtype} {list(more.shape)}."
            )
        more = more.clamp(min=0)
        if more.dim() == 1:
            return cls(torch.minimum(more, room))
        inserted, at_end = more[:, :block], more[:, block]
        fits = (inserted.sum(dim=1) <= room) & ~fixed_ahead
        inserted = torch.where(fits[:, None], inserted, 0)
        return cls(torch.minimum(at_end, room - inserted.sum(dim=1)), inserted)

    @property
    def total(self) -> Tensor:
        """i64[b]: masks that are added."""
        return self.at_end if self.inserted is None else self.at_end + self.inserted.sum(dim=1)


def shifted(values: Tensor, added: Tensor, fill: float) -> Tensor:
    """[b, T]: values [b, T] with added i64[b, T] places after each, which hold `fill`; the last ones fall off."""
    sequences, width = values.shape
    place = torch.arange(width, device=values.device) + added.cumsum(dim=1) - added
    found = values.new_full((sequences, width + 1), fill)
    return found.scatter(1, place.clamp(max=width), values)[:, :width]


def moved_columns(source: Tensor, now: Tensor, before: Tensor, new: float) -> Tensor:
    """[b, B]: values of columns as they are now, as they were before, or of a new mask; see `DecodeRule.move`."""
    return torch.cat([now, before, torch.full_like(now[:, :1], new)], dim=1).gather(1, source)
