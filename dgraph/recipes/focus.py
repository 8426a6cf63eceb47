"""FOCUS: evict rows that will not be decoded, cache decoded rows within the block."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dgraph.errors import InputError
from dgraph.passes.base import Pass
from dgraph.passes.bound_rows import BoundRows
from dgraph.passes.count_rows import CountRows
from dgraph.passes.evict_tokens import EvictTokens
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.plans.papers import FOCUS
from dgraph.plans.regions import Block, Extent
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes.base import Recipe
from dgraph.recipes.dense import BOUNDED, ENDING, ending, phases_of
from dgraph.recipes.former import builders
from dgraph.recipes.options import RecipeOptions, former
from dgraph.spec import ModelSpec

COUNTS = ("host", "device")


@dataclass(frozen=True)
class Ablation:
    """Settings of FOCUS that its paper varies to explain the method, at their published values.

    Attributes:
        signal: "delta" (change of importance from the layer before) or "importance".
        select: keep the "top", "random" or "bottom" rows of the signal; "scripted": the rows of a script of commits, to
            measure speed (see `EvictTokens`).
        keep: a fixed number of masked rows instead of the dynamic budget; 0 for the budget.
        signal_pool: width of the max-pooling of the signal over neighbouring masked rows; odd.
        after: the layer whose keys and values are written before rows are evicted.
    """

    signal: str = "delta"
    select: str = "top"
    keep: int = 0
    signal_pool: int = 3
    after: int = 1

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return "+".join(f"{name}={value}" for name, value in changed.items())


PUBLISHED = Ablation()


@dataclass(frozen=True, kw_only=True)
class Focus(RecipeOptions):
    """FOCUS: evicts rows after the second layer, caches decoded rows within the block.

    The first step of each block evicts nothing, and rows that are evicted later are seen with their last keys. This is
    published for bidirectional models, whose first step forwards the whole canvas (paper, appendix B). On block-causal
    models the published FOCUS evicts in the first step, too: `full_steps=0`. It hides all keys after the last kept row
    then. Costs of both are in benchmarks/results/focus.md. If rows predict the next position, the row before a mask
    stands for it (see `EvictTokens`). In a model that encodes a denoised block, the forwards that encode evict nothing,
    and all others may.

    Appendix E.3.1 sets a warm-up flag that triggers "full processing" of the next block. In the public code that flag
    makes the first step of a block forward all of its rows, cached ones too. Eviction follows in that step. Every first
    step here forwards all rows of its block, so the flag asks for nothing more, and `full_steps=0` is the published
    system.

    Attributes:
        alpha: retention over the average number of decoded tokens per step, at least 1; the paper's default is 1.5.
        ablation: settings that the paper varies, as Ablation(signal="importance", after=2); on the command line
            ablation=signal=importance+after=2. See `Ablation`.
        full_steps: steps at the beginning of a block that evict nothing, default 1; 0 on block-causal models alone, as
            published, and always on models that work in two modes.
        average_over: steps whose decoded tokens are averaged. "sequence": all of its steps (paper, Eq. 17 to 19 and
            E.3.1), the default if the first step evicts (`full_steps=0`). "block": those of the block that decoded some
            (public code), the default otherwise.
        among: rows whose queries and keys importance is measured between: "candidates" (public code), or all of the
            "block" that the step forwards (paper, Eq. 2).
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        recommit: forward a finished block once more before it is committed (as the paper's quality figures do).
        count: place where the kept rows are counted. The "host" reads their number and runs a bucket of them. The
            "device" runs a step without that read (see `CountRows`).
        signal, select, keep, signal_pool, after: former names of the fields of `ablation`.
    """

    alpha: float = 1.5
    ablation: Ablation = PUBLISHED
    full_steps: int | None = None
    average_over: str | None = None
    among: str = "candidates"
    block_cache: str = "dc+"
    recommit: bool = True
    count: str = "host"
    signal: str | None = former("write ablation=Ablation(signal=...)")
    select: str | None = former("write ablation=Ablation(select=...)")
    keep: int | None = former("write ablation=Ablation(keep=...)")
    signal_pool: int | None = former("write ablation=Ablation(signal_pool=...)")
    after: int | None = former("write ablation=Ablation(after=...)")

    name = "focus"
    papers = (FOCUS,)
    extent = Extent.BLOCK

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ablation, Ablation):
            raise InputError(f"ablation must be a dgraph.recipes.Ablation, got {self.ablation!r}.")
        if self.count not in COUNTS:
            raise InputError(f"count must be one of {', '.join(map(repr, COUNTS))}, got {self.count!r}.")

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        if reason := EvictTokens.obstacle(spec):
            raise InputError(f"focus cannot evict rows of {spec.family}: {reason}.")
        causal, full_steps = spec.attention == "block_causal", self._full_steps(spec)
        names = (f.name for f in fields(Ablation))
        varied = replace(self.ablation, **{n: v for n in names if (v := getattr(self, n)) is not None})
        evict = EvictTokens(
            self.alpha,
            varied.after,
            varied.signal,
            varied.select,
            varied.keep,
            varied.signal_pool,
            full_steps if causal else 0,  # the plan of a bidirectional model says which steps are full
            average_over=self.average_over or ("block" if full_steps else "sequence"),
            among=self.among,
        )
        passes: tuple[Pass, ...] = (evict, *ending(spec))
        if self.count == "device":
            passes = (*(p for p in passes if p.name not in BOUNDED), CountRows(), FuseGLU(), BoundRows())
        phases = phases_of(spec, *passes, optional=ENDING)
        plan = None if causal else RowPlan(Block(), Counted(full_steps))
        return Recipe(self.name, 4, phases, self.block_cache, self.recommit, plan)

    def _full_steps(self, spec: ModelSpec) -> int:
        """Steps of a block that evict nothing."""
        if self.full_steps is None:
            return 0 if spec.two_modes else 1
        if spec.two_modes and self.full_steps:
            raise InputError(
                f"full_steps={self.full_steps} counts the steps of a block, but {spec.family} works in two modes. Its "
                f"blocks begin with a step that encodes, which writes no keys of rows that are denoised. Leave it out."
            )
        if spec.attention == "bidirectional" and self.full_steps == 0:
            raise InputError(
                f"full_steps=0 evicts rows in the first step of a block, but {spec.family} is bidirectional. That step "
                f"forwards the whole canvas, whose keys the later ones read. Give at least 1."
            )
        return self.full_steps


__getattr__ = builders(focus=Focus)
