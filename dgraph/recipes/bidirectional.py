"""Caches of bidirectional models: the rows that a step forwards, and how often it forwards all of them."""

from __future__ import annotations

from dataclasses import dataclass

from dgraph.errors import InputError, UnknownName
from dgraph.plans.papers import DINFER, DKV_CACHE, FAST_DLLM
from dgraph.plans.regions import All, Block, Extent, Next, Suffix
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes.base import Recipe
from dgraph.recipes.dense import ENDING, ending, phases_of
from dgraph.recipes.former import builders
from dgraph.recipes.options import RecipeOptions, former
from dgraph.spec import ModelSpec

CACHES: dict[str, type[Suffix] | type[Block]] = {"prefix": Suffix, "dual": Block}
"""Fast-dLLM's caches, and the region that a step forwards under each."""


DKV_VARIANTS = ("decode", "greedy")

BY_FAMILY = "leave it out, the model's family decides it"


@dataclass(frozen=True, kw_only=True)
class CanvasCache(RecipeOptions):
    """Base of recipes that keep keys of a bidirectional model's canvas between the steps that forward it whole."""

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        if spec.attention != "bidirectional":
            raise InputError(
                f"recipe {self.name!r} approximates the keys of a bidirectional model; those of {spec.family} are "
                f"exact once a block is committed (its attention is {spec.attention}). Use 'dense' or 'focus'."
            )
        plan, block_cache = self.rows(spec)
        return Recipe(self.name, 2, phases_of(spec, *ending(spec), optional=ENDING), block_cache, plan=plan)

    def rows(self, spec: ModelSpec) -> tuple[RowPlan, str]:
        """The rows that a step forwards, and `Recipe.block_cache`; each recipe implements it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FastDLLM(CanvasCache):
    """Fast-dLLM: the whole canvas where a block starts, then the block alone (dual) or with all after it (prefix).

    It is as published, for LLaDA and for Dream, with one difference that changes no token. A block that its first step
    completes takes no second one. On a model with shifted logits (Dream) the first step of a block commits its first
    position alone, whatever its confidence. Later steps leave out the row before the block.

    Attributes:
        cache: "prefix" or "dual".
        every: interval of steps of a block at which the whole canvas is forwarded; 0 for its first step only.
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        first: former option: tokens that a block's first step commits, "policy", "position" or "published".
    """

    cache: str = "dual"
    every: int = 0
    block_cache: str = "off"
    first: str | None = former(BY_FAMILY)

    name = "fast_dllm"
    papers = (FAST_DLLM,)
    extent = Extent.BLOCK

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache not in CACHES:
            raise UnknownName("cache of fast_dllm", self.cache, CACHES)

    def rows(self, spec: ModelSpec) -> tuple[RowPlan, str]:
        """See `CanvasCache`."""
        first = first_commit(spec, self.first)
        return RowPlan(CACHES[self.cache](lead=first != "position"), Counted(every=self.every), first), self.block_cache


def first_commit(spec: ModelSpec, first: str | None = None) -> str:
    """`RowPlan.first` of published block-wise code: on Dream a block's first step commits the first position.

    Args:
        spec: the model.
        first: the former option, which decides if it is given.
    """
    if first not in (None, "published"):
        return first
    return "position" if spec.logit_shift else "policy"


@dataclass(frozen=True, kw_only=True)
class DKVCache(CanvasCache):
    """dKV-Cache: rows not yet decoded and rows decoded in the step before, or few more rows than are decoded next.

    Variant "decode": a token's keys are cached one step after it was decoded; all rows that are not decoded are
    forwarded in every step. The first two steps of a block, and every `every`-th, forward the whole canvas.

    Variant "greedy": a step forwards the rows that it decodes from, with `around` masked rows around each (see `Next`).
    It also forwards the rows that were decoded in the step before. A block's first step, and every `every`-th, forward
    the whole canvas. It takes a policy that knows the step's commits before the step. Such policies are "dkv_greedy"
    (LLaDA's random remasking in an order drawn once per block, as published) and "sequential". Nothing is published for
    a model with shifted logits (Dream). There a token is decoded from the row before it, and its own row is the one
    that was decoded.

    Attributes:
        variant: "decode" or "greedy".
        every: steps between full ones, 0 for none but a block's first; default 8, for "greedy" 2, both as in the
            published examples.
        around: masked rows around each row that "greedy" decodes from; default 4, as there.
    """

    variant: str = "decode"
    every: int | None = None
    around: int | None = None

    name = "dkv_cache"
    papers = (DKV_CACHE,)
    extent = Extent.CANVAS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in DKV_VARIANTS:
            raise UnknownName("variant of dkv_cache", self.variant, DKV_VARIANTS)
        if self.variant == "decode" and self.around is not None:
            raise InputError(f"around={self.around} belongs to the variant 'greedy' of dkv_cache; leave it out.")

    def rows(self, spec: ModelSpec) -> tuple[RowPlan, str]:
        """See `CanvasCache`."""
        if self.variant == "decode":
            return RowPlan(All(), Counted(2, 8 if self.every is None else self.every)), "dc"
        region = Next(4 if self.around is None else self.around)
        return RowPlan(region, Counted(every=2 if self.every is None else self.every)), "off"


@dataclass(frozen=True, kw_only=True)
class Vicinity(CanvasCache):
    """dInfer's vicinity cache: the block and rows around it; the whole canvas where a block starts.

    Attributes:
        before: rows before the block that go with it.
        after: rows after it that do.
        warm_up: full steps at the beginning of a response.
        every: interval of steps of a block at which the whole canvas is forwarded; 0 for its first step only.
    """

    before: int = 16
    after: int = 16
    warm_up: int = 4
    every: int = 0

    name = "vicinity"
    papers = (DINFER,)
    extent = Extent.BEFORE

    def rows(self, spec: ModelSpec) -> tuple[RowPlan, str]:
        """See `CanvasCache`."""
        return RowPlan(Block(self.before, self.after), Counted(every=self.every, warm_up=self.warm_up)), "off"


__getattr__ = builders(fast_dllm=FastDLLM, dkv_cache=DKVCache, vicinity=Vicinity)
