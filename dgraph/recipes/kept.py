"""Selection of keys and values, on top of a recipe that chooses the rows that a step forwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from dgraph.errors import InputError
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.sparse_kv import SparseKV
from dgraph.plans.kv import KVPlan
from dgraph.plans.regions import Extent
from dgraph.plans.schedules import Counted, Schedule
from dgraph.recipes.base import Phase, Recipe
from dgraph.recipes.options import RecipeOptions
from dgraph.spec import ModelSpec


@dataclass(frozen=True)
class KVSelection:
    """Keys and values that a method keeps; it goes with recipes that choose the rows that a step forwards.

    Attributes:
        plan: the window, when keys are chosen, and how many.
        select: the pass that chooses them; its budget is the plan's.
    """

    plan: KVPlan
    select: SparseKV

    def on(self, recipe: Recipe, name: str) -> Recipe:
        """The recipe under a name, with this selection.

        Raises:
            InputError: its steps need keys that are not kept.
        """
        plan = recipe.plan
        steps = recipe.phase("step").passes
        carries = next((step.carries for step in steps if step.carries), "")
        if reason := obstacle(self.plan.window, None if plan is None else plan.region.extent, carries):
            raise InputError(
                f"{name}: recipe {recipe.name!r} {reason}. Combine it with a recipe whose steps forward the block."
            )
        if plan is None:
            return self._after_prefill(recipe, name)
        if self.plan.window == "block":
            plan = replace(plan, schedule=self._choosing(plan.schedule))
        return replace(recipe, name=name, phases=self._phases(recipe, self.select), plan=plan, kv=self.plan)

    def _choosing(self, schedule: Schedule) -> Schedule:
        """The schedule, with full steps up to the one of a block that chooses, and wherever keys are chosen anew."""
        delay, every = self.plan.delay, self.plan.every
        if not isinstance(schedule, Counted):
            return schedule | Counted(delay + 1, every)
        return replace(schedule, full_steps=max(schedule.full_steps, delay + 1), every=schedule.every or every)

    def _after_prefill(self, recipe: Recipe, name: str) -> Recipe:
        """The same for a block-causal model, whose keys before the block are final and in the cache."""
        kv = self.plan.of_later_blocks
        phases = (recipe.phase("prefill"), *self._phases(recipe, replace(self.select, cached=True, kept=kv.kept)))
        return replace(recipe, name=name, phases=phases, kv=kv)

    def _phases(self, recipe: Recipe, select: SparseKV) -> tuple[Phase, ...]:
        """The recipe's step twice: where some sequence chooses, and where all of them reuse."""
        step = recipe.phase("step")
        at = next((i for i, p in enumerate(step.passes) if isinstance(p, ChunkLMHead)), len(step.passes))
        before, after = step.passes[:at], step.passes[at:]
        return tuple(
            Phase(phase, (*before, replace(select, reuse=reuse), *after), step.optional)
            for phase, reuse in (("select", False), ("step", True))
        )


def obstacle(window: str, extent: Extent | None, carries: str) -> str:
    """Reason why a selection of keys cannot go with a recipe's steps; "" if it can.

    Args:
        window: the selection's window of keys that are always seen, as in `KVPlan`.
        extent: the part of the canvas that the recipe's steps forward; None: not known yet.
        carries: values that its steps update by what changes in all keys; "" for none.
    """
    if carries:
        return f"carries {carries}, so no key may be dropped"
    if extent is Extent.CANVAS:
        return "forwards rows anywhere in the canvas, and reads the keys of all others, so no key may be dropped"
    if extent is Extent.BEFORE:
        return "forwards rows before the block, whose keys would have no place in the cache"
    if extent is Extent.RESPONSE and window == "block":
        return "forwards rows after the block, and only the block keeps all of its keys"
    return ""


@dataclass(frozen=True, kw_only=True)
class KeyOptions(RecipeOptions):
    """Base of the half of a recipe that selects keys and values. A recipe inherits it, then the half with the rows:

        @dataclass(frozen=True, kw_only=True)
        class Both(MaskKVKeys, Focus):
            name = "maskkv+focus"

    Class attributes:
        window: positions whose keys are always seen, as in `KVPlan`.
    """

    window: ClassVar[str]

    def selection(self, spec: ModelSpec) -> KVSelection:
        """The keys and values that are kept of a model; each method implements it."""
        raise InputError(f"recipe {self.name!r} selects no keys: its class has no method selection(spec).")

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        rows = replace(super().build(spec), name=super().name)
        return self.selection(spec).on(rows, self.name)
