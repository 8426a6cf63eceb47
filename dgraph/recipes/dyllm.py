"""DyLLM: recompute a layer only for the rows whose attention context has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dgraph.errors import InputError
from dgraph.passes.base import Pass
from dgraph.passes.bound_rows import BoundRows
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.passes.gate_ffn import GateFFN
from dgraph.passes.only_masked import OnlyMasked
from dgraph.passes.partial_attention import CONTEXTS, PartialAttention
from dgraph.plans.papers import DYLLM, Paper
from dgraph.plans.regions import Block, Extent, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted, Schedule
from dgraph.recipes.base import Recipe
from dgraph.recipes.dense import ENDING, phases_of
from dgraph.recipes.former import builders
from dgraph.recipes.gated import GateOptions, leaves_out
from dgraph.recipes.options import RecipeOptions
from dgraph.spec import ModelSpec

TAU = {"llada": 0.99, "dream": 0.995}
"""The published threshold by family (section 4.2.3); a family that the paper does not name has that of LLaDA."""


@dataclass(frozen=True, kw_only=True)
class DyLLMGate(GateOptions):
    """Feed-forward, keys and values of rows whose attention context changed; the others' are kept.

    A row is salient in a layer if its context has changed: the cosine with that of the step in which it ran before is
    below tau. Salient rows go through the feed-forward network, and give the next layer new keys and values.

    In a combination the rows are those of the other half, and which of its steps are whole stays as it is. Only the
    first steps of a response compute everything; where a block starts, the canvas is forwarded under the gate. No
    context is updated there: all forwarded rows attend to the keys that their half leaves.

    Attributes:
        tau: the cosine below which a row is salient, or one for each layer; lower is faster. None: as published, 0.995
            for Dream and 0.99 for LLaDA and every other family. The paper also has 0.9975 and 0.995. Above 1, and with
            a `response_only_period` of 1, it is the dense model.
        full_steps: steps that compute everything, at least 1. At the beginning of a response: default 4 if its steps
            forward the whole response, else 1. A block-causal model has them in each block: default 1.
        every: interval of further such steps within a block, in steps, from its first on; 0 for no further ones. Where
            the rows of a combination have such an option, it is theirs on a bidirectional model.
        gate: True if feed-forward networks run on salient rows only.
        partial: True if keys and values are projected for salient rows only, and attention is updated.
        update: for partial attention. True: the context of the other rows is that of the step before, updated by the
            contribution of the changed values (as published). False: they attend to all current keys and values. That
            is exact, and at 1280 keys on an H200 faster, too (benchmarks/results/dyllm.md). On a bidirectional model
            the last layer then runs on masked rows alone, and stores nothing of them. None: True where each step
            forwards the response and no key is dropped, else False.
    """

    tau: float | tuple[float, ...] | None = None
    full_steps: int | None = None
    every: int = 0
    gate: bool = True
    partial: bool = True
    update: bool | None = None

    name = "dyllm"
    papers: ClassVar[tuple[Paper, ...]] = (DYLLM.at("algorithms 1 to 4"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gate", "partial"):
            if not isinstance(given := getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, got {given!r}.")
        if self.update is not None and not isinstance(self.update, bool):
            raise InputError(f"update must be True or False, or None, got {self.update!r}.")
        if not self.gate and not self.partial:
            raise InputError("gate and partial are both False, which leaves the dense model; use 'dense' instead.")
        if not self.partial and self.update is False:
            raise InputError(
                "update=False says how partial attention is made, and partial is False; leave one of them out."
            )
        for name, least in (("full_steps", 1), ("every", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InputError(f"{name} must be an integer of at least {least}, got {value!r}.")

    def gating(self, spec: ModelSpec, rows: Recipe) -> tuple[Pass, ...]:
        """See `GateOptions`."""
        update = not leaves_out(rows) if self.update is None else self.update
        tau = TAU.get(spec.family, TAU["llada"]) if self.tau is None else self.tau
        passes: tuple[Pass, ...] = (GateFFN(tau),) if self.gate else ()
        return (*passes, PartialAttention(tau, update)) if self.partial else passes

    def of_blocks(self) -> RowPlan:
        """See `GateOptions`."""
        return RowPlan(Block(), Counted(1 if self.full_steps is None else self.full_steps, self.every))

    def of_canvas(self, rows: RowPlan) -> Schedule:
        """See `GateOptions`."""
        default = 4 if isinstance(rows.region, Response) else 1
        return rows.schedule.sparing(default if self.full_steps is None else self.full_steps)


@dataclass(frozen=True, kw_only=True)
class ResponseRows(RecipeOptions):
    """The rows of DyLLM: the response, and the prompt now and then; of a block-causal model, the block.

    Attributes:
        response_only_period: interval of steps after the first full ones at which all rows are forwarded; the first one
            is such a step. 0: the prompt's rows are never forwarded again. Bidirectional models only; default 4, as
            published. 8 avoids half of the steps that take most of the time, and changed next to nothing on the
            embedded model. If several tokens are committed per step, full steps take most of the time. At four tokens
            per step, full_steps=2, a period of 0 and update=False are 1.6 times faster than Fast-dLLM's dual cache.
            They are as near to the dense model (benchmarks/results/dyllm.md).
        every: as in `DyLLMGate`.
        update: False if the last layer of a bidirectional model runs on masked rows alone; see `DyLLMGate`.
        block_cache: "off", "dc" or "dc+"; see `Recipe`. Block-causal models only.
        recommit: forward a finished block once more before it is committed (block-causal models).
    """

    response_only_period: int | None = None
    every: int = 0
    update: bool | None = None
    block_cache: str = "off"
    recommit: bool = True

    name = "dyllm"
    papers: ClassVar[tuple[Paper, ...]] = (DYLLM.at("algorithms 1 to 4"),)
    extent = Extent.RESPONSE

    def __post_init__(self) -> None:
        super().__post_init__()
        period = self.response_only_period
        if period is not None and (type(period) is not int or period < 0):
            raise InputError(f"response_only_period must be an integer of at least 0, got {period!r}.")

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        causal = spec.attention == "block_causal"
        masked: tuple[Pass, ...] = (OnlyMasked(),) if self.update is False and not causal else ()
        phases = phases_of(spec, ChunkLMHead(), *masked, FuseGLU(), BoundRows(), optional=ENDING)
        plan = None if causal else RowPlan(Response(), Counted(0, self.every, warm_up=1, widen=self._period))
        if causal and self.response_only_period is not None:
            raise InputError(
                f"response_only_period={self.response_only_period} says how often a bidirectional model forwards its "
                f"prompt again; {spec.family} is block-causal, and the keys of its prompt are final. Leave it out."
            )
        if self.block_cache != "off" and not causal:
            raise InputError(
                f"block_cache={self.block_cache!r} skips rows of the current block; on {spec.family}, which is "
                f"bidirectional, dyllm forwards the whole response, and skips what has not changed of it. Leave it "
                f"'off'."
            )
        return Recipe(self.name, 2, phases, self.block_cache, self.recommit, plan)

    @property
    def _period(self) -> int:
        return 4 if self.response_only_period is None else self.response_only_period


@dataclass(frozen=True, kw_only=True)
class DyLLM(DyLLMGate, ResponseRows):
    """DyLLM: feed-forward, keys and values of rows whose attention context changed; the others' are kept.

    The first steps of a response compute everything. After them, a step forwards the response alone, and the prompt
    with it every `response_only_period` steps. A row is salient in a layer if its context has changed: the cosine with
    that of the step before is below tau. Salient rows go through the feed-forward network, give the next layer new keys
    and values, and attend exactly there. The context of the others is updated.

    On a block-causal model the same is done within each block, whose first steps compute everything. So do the rows
    that commit the block before: keys of finished blocks are those of the dense model for these tokens. A row that a
    block cache skips keeps its keys as they were last written. Skipped rows at the tail of a block are out of sight.
    Their contributions stay in the contexts that are updated.
    """

    papers: ClassVar[tuple[Paper, ...]] = DyLLMGate.papers
    carries = CONTEXTS
    reuses = f"{GateFFN.reuses}, and {PartialAttention.reuses}"


__getattr__ = builders(dyllm=DyLLM)
