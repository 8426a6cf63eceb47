"""EntropyCache (arXiv 2603.18489): everything is computed anew after a step that was unsure of what it decoded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dgraph import ModelSpec, Recipe
from dgraph.errors import InputError
from dgraph.plans.papers import Paper
from dgraph.plans.regions import Region
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Schedule
from dgraph.plans.view import View
from dgraph.recipes import FastDLLM, RecipeOptions

ENTROPY_CACHE = Paper(
    "EntropyCache: Decoded Token Entropy Guided KV Caching for Diffusion Language Models", "2603.18489"
)


@dataclass(frozen=True)
class WhenUnsure(Schedule):
    """A response's first step is full, and so is every step after one that decoded with an entropy above `tau` nats."""

    tau: float

    notes: ClassVar[bool] = True

    def full(self, view: View) -> Tensor:
        """See `Schedule`."""
        return (view.step == 0) | (view.entropy > self.tau)


@dataclass(frozen=True)
class Latest(Region):
    """The block, and the `count` positions that were decoded last (of one step: the lower positions first)."""

    count: int

    notes: ClassVar[bool] = True

    def rows(self, view: View) -> Tensor:
        """See `Region`."""
        width = len(view.positions)
        order = view.decoded_in * width + width - 1 - view.positions
        last = order.topk(min(self.count, width), dim=1).indices
        chosen = torch.zeros_like(view.masked).scatter(1, last, True)
        return view.around_block() | (chosen & (view.decoded_in > 0))


@dataclass(frozen=True, kw_only=True)
class EntropyCache(RecipeOptions):
    """EntropyCache: between full steps, the block and the tokens decoded last are forwarded.

    Attributes:
        tau: nats, at least 0; 0 makes every step full. The default is ours.
        count: tokens decoded last, at least 0; the default is ours.
    """

    tau: float = 1.0
    count: int = 16

    name = "entropycache"
    papers = (ENTROPY_CACHE,)

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        if not self.tau >= 0 or type(self.count) is not int or self.count < 0:
            raise InputError(f"entropycache: tau and count are at least 0, got {self.tau!r} and {self.count!r}.")
        return replace(FastDLLM().build(spec), name=self.name, plan=RowPlan(Latest(self.count), WhenUnsure(self.tau)))
