"""Keys that a method keeps, on top of a recipe that chooses the rows that a step forwards."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dgraph.errors import InputError
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.sparse_kv import SparseKV
from dgraph.plans.kv import KVPlan
from dgraph.plans.regions import Block, Response, Suffix
from dgraph.plans.schedules import Counted, Schedule
from dgraph.recipes.base import Phase, Recipe


@dataclass(frozen=True)
class Kept:
    """Keys that a method keeps; it goes with any recipe that chooses the rows that a step forwards.

    Attributes:
        plan: the window, when keys are chosen, and how many.
        select: the pass that chooses them; its budget is the plan's.
    """

    plan: KVPlan
    select: SparseKV

    def on(self, recipe: Recipe, name: str) -> Recipe:
        """The recipe, with keys kept like this.

        Raises:
            InputError: its steps need keys that are not kept.
        """
        plan = recipe.plan
        if plan is None:
            return self._after_prefill(recipe, name)
        region = plan.region
        if not isinstance(region, Block | Response | Suffix) or (isinstance(region, Block) and region.before):
            raise InputError(
                f"{name}: recipe {recipe.name!r} forwards rows before the block in steps that keep what they have of "
                f"them (its region is {region}); those rows have no place in the cache here. Combine it with one "
                f"whose steps forward the block or the response."
            )
        if self.plan.window == "block":
            if not isinstance(region, Block) or region.after:
                raise InputError(
                    f"{name}: recipe {recipe.name!r} forwards rows after the block (its region is {region}), but "
                    f"only the block is seen as a whole here. Combine it with one whose steps forward the block."
                )
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
        phases = (recipe.phase("prefill"), *self._phases(recipe, replace(self.select, cached=True)))
        return replace(recipe, name=name, phases=phases, kv=self.plan)

    def _phases(self, recipe: Recipe, select: SparseKV) -> tuple[Phase, ...]:
        """The recipe's step twice: where some sequence chooses, and where all of them reuse."""
        step = recipe.phase("step")
        at = next((i for i, p in enumerate(step.passes) if isinstance(p, ChunkLMHead)), len(step.passes))
        before, after = step.passes[:at], step.passes[at:]
        return tuple(
            Phase(phase, (*before, replace(select, reuse=reuse), *after), step.optional)
            for phase, reuse in (("select", False), ("step", True))
        )
