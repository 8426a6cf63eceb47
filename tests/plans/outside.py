"""A region and a schedule as another package would write them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dgraph.plans.regions import Region
from dgraph.plans.schedules import Schedule
from dgraph.plans.view import View


@dataclass(frozen=True)
class Stride(Region):
    """The response, but of what comes after the block every other position does not exist."""

    stride: int = 2
    hides = True
    version = 3

    def rows(self, view: View) -> Tensor:
        return view.since(view.prompt_end)

    def seen(self, view: View) -> Tensor:
        later = view.positions - (view.start + view.block)[:, None]
        return view.inside & ((later < 0) | (later % self.stride == 0))


@dataclass(frozen=True)
class Thirds(Schedule):
    """Every third step."""

    def full(self, view: View) -> Tensor:
        return view.step % 3 == 0
