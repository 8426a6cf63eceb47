"""WINO (arXiv 2507.18578): commit many tokens, and take those back that the rest of the text speaks against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from dgraph import RECIPES, ModelSpec, Recipe
from dgraph.errors import InputError
from dgraph.passes import AddRows
from dgraph.plans.papers import WINO, Paper
from dgraph.plans.regions import Decoded
from dgraph.recipes import build
from dgraph.runtime.policies import Candidates, DecodeRule, Traits
from dgraph.runtime.policies.base import best, rank


@dataclass(frozen=True)
class Wino(DecodeRule):
    """Commit what is above a low threshold, and take back what an added row gives less than a high one.

    Attributes:
        draft, verify: the thresholds; published: 0.6 and 0.9. verify=0 takes nothing back.
    """

    draft: float = 0.6
    verify: float = 0.9

    papers: ClassVar[tuple[Paper, ...]] = (WINO,)
    name: ClassVar[str] = "wino"
    needs: ClassVar[frozenset[str]] = frozenset({"added", "current", "editable"})
    traits: ClassVar[Traits] = Traits(edits=True, remasks=True)

    def __post_init__(self) -> None:
        self.check_threshold("draft")
        self.check_number("verify", 0, 1, "a probability in [0, 1]", "0 takes nothing back.")

    def choose(self, candidates: Candidates) -> Tensor:
        most = (candidates.masked.sum(dim=1) * 7 // 10).clamp(5, 20)[:, None]
        offered = candidates.offered
        sure = (offered > self.draft) & (rank(offered) < most)
        return (sure | (best(offered) & ~sure.any(dim=1, keepdim=True))) & candidates.committable

    def remask(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        likely, there = candidates.added["current"], candidates.added["token"] >= 0
        doubted = candidates.need("editable", self) & there & (likely < self.verify)
        return doubted & (rank(torch.where(doubted, -likely, -torch.inf)) < chosen.sum(dim=1)[:, None] - 1)

    def settled(self, candidates: Candidates, chosen: Tensor) -> Tensor:
        return ~((candidates.masked & ~chosen) | self.remask(candidates, chosen)).any(dim=1)


def wino(spec: ModelSpec, on: str = "dense") -> Recipe:
    """WINO: steps also have a row for each decoded position of the block, which verifies its token; decode by `Wino`.

    Args:
        spec: the model; bidirectional.
        on: the recipe whose steps these are: "dense", "fast_dllm" or another one that keeps all rows.
    """
    recipe = build(RECIPES, on, spec, {})
    if recipe.plan is None or spec.attention != "bidirectional":
        raise InputError(
            f"wino: {on!r} on {spec.family} has no row plan. Use 'dense' or 'fast_dllm' on LLaDA or Dream."
        )
    plan = replace(recipe.plan, added=Decoded())
    return replace(recipe.inserting(AddRows(), after="CacheKV"), name="wino", plan=plan)
