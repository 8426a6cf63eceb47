"""Saliency gates, on top of a recipe that chooses the rows that a step forwards, and of one that selects keys."""

from __future__ import annotations

from dataclasses import replace

from dgraph.errors import InputError
from dgraph.passes.base import Pass
from dgraph.passes.bound_rows import BoundRows
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.passes.only_masked import OnlyMasked
from dgraph.passes.sparse_kv import SparseKV
from dgraph.plans.kv import PAGES, KVPlan
from dgraph.plans.regions import All, Block, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Schedule
from dgraph.recipes.base import Phase, Recipe
from dgraph.recipes.dense import BOUNDED
from dgraph.recipes.options import RecipeOptions
from dgraph.spec import ModelSpec

LAST: tuple[Pass, ...] = (FuseGLU(), BoundRows())
"""Passes that follow a gate: they bound what the gate moves to listed rows."""


class GateOptions(RecipeOptions):
    """Base of the half of a recipe that decides, layer by layer, which of the forwarded rows are computed anew.

    A recipe inherits it first, then the half that selects keys, if there is one, then the half with the rows:

        @dataclass(frozen=True, kw_only=True)
        class Three(DyLLMGate, DLLMServeKeys, Focus):
            name = "dllm_serve+dyllm+focus"

    The rows that a step keeps something of need a place each. So every position of a bidirectional model has pages,
    also where keys are selected; those that heads keep are found there by their positions.
    """

    def gating(self, spec: ModelSpec, rows: Recipe) -> tuple[Pass, ...]:
        """The passes of the gate, for the recipe whose steps they are put into; each method implements it."""
        raise InputError(f"recipe {self.name!r} gates no rows: its class has no method gating(spec, rows).")

    def of_blocks(self) -> RowPlan:
        """Full steps of a block-causal model, whose rows ask for none."""
        return RowPlan(Block())

    def of_canvas(self, rows: RowPlan) -> Schedule:
        """Full steps of a bidirectional model, whose whole steps are those of its rows."""
        return rows.schedule.sparing(1)

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`.

        Raises:
            InputError: the recipe's rows are reused by another pass already, or the gate carries values that miss rows
                or keys of its steps.
        """
        rows = replace(super().build(spec), name=super().name)
        steps = tuple(step for phase in rows.phases for step in phase.passes)
        if reused := next((step.reuses for step in steps if step.reuses), ""):
            raise InputError(
                f"{self.name}: recipe {rows.name!r} reuses {reused} already, so no gate goes with it. Combine it "
                f"with a recipe that runs every layer on all of its rows."
            )
        gate = self.gating(spec, rows)
        carries = next((step.carries for step in gate if step.carries), "")
        if carries and (missed := leaves_out(rows)):
            raise InputError(
                f"{self.name}: the gate carries {carries}, but recipe {rows.name!r} {missed}. Choose options under "
                f"which it carries nothing, as update=False of dyllm."
            )
        plan = self.of_blocks() if rows.plan is None else replace(rows.plan, schedule=self.of_canvas(rows.plan))
        kv = rows.kv
        if kv is not None and spec.attention == "bidirectional":
            kv = replace(kv, kept=PAGES)
        phases = tuple(p if p.name == "prefill" else gated(p, gate, spec, kv) for p in rows.phases)
        return replace(rows, name=self.name, phases=phases, plan=plan, kv=kv)


def leaves_out(rows: Recipe) -> str:
    """Rows or keys that steps of a recipe leave out, though what they hold has changed; "" if there are none."""
    if rows.kv is not None:
        return "drops keys"
    if any(step.evicts for phase in rows.phases for step in phase.passes):
        return "evicts rows"
    if rows.plan is not None and not isinstance(rows.plan.region, All | Response):
        return "forwards a part of the response"
    if rows.plan is not None and rows.block_cache != "off":
        return "skips decoded rows"  # until a whole step, which forwards them again
    return ""


def gated(phase: Phase, gate: tuple[Pass, ...], spec: ModelSpec, kv: KVPlan | None) -> Phase:
    """The phase with a gate after passes that choose rows, and before passes that choose among the keys it leaves.

    Where keys are selected, the last layer is gated as the others are. Else it runs on masked rows alone, if the phase
    has that pass.

    Raises:
        InputError: a pass of the gate cannot be used with the model.
    """
    for step in gate:
        if reason := step.obstacle(spec):
            raise InputError(f"{step.name} cannot be used with {spec.family}: {reason}. Use the recipe 'dense'.")
    passes = [p for p in phase.passes if p.name not in {last.name for last in LAST}]
    if any(step.carries for step in gate):  # of every row, so the last layer runs on all of them
        passes = [p for p in passes if not isinstance(p, OnlyMasked)]
    at = next((i for i, p in enumerate(passes) if isinstance(p, SparseKV)), None)
    if at is None:
        at = max((i + 1 for i, p in enumerate(passes) if isinstance(p, ChunkLMHead | OnlyMasked)), default=len(passes))
    # A step computes keys of the rows that its gate leaves, so the keys to choose from are those of the cache.
    after = [replace(p, cached=True, kept=kv.kept) if kv and isinstance(p, SparseKV) else p for p in passes[at:]]
    # An eviction reads keys of all rows where it ranks them, which may leave a small model no layer for all of a gate.
    few = {step.name for step in gate[1:]} if any(p.evicts for p in passes) else set()
    return Phase(phase.name, (*passes[:at], *gate, *after, *LAST), phase.optional | BOUNDED | few)
