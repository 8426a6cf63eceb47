"""DyLLM: recompute a layer only for the rows whose attention context has changed."""

from __future__ import annotations

from dataclasses import dataclass

from dgraph.errors import InputError
from dgraph.passes.base import Pass
from dgraph.passes.bound_rows import BoundRows
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.passes.gate_ffn import GateFFN
from dgraph.passes.only_masked import OnlyMasked
from dgraph.passes.partial_attention import PartialAttention
from dgraph.plans.papers import DYLLM
from dgraph.plans.regions import Block, Extent, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes.base import Recipe
from dgraph.recipes.dense import ENDING, phases_of
from dgraph.recipes.former import builders
from dgraph.recipes.options import RecipeOptions
from dgraph.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class DyLLM(RecipeOptions):
    """DyLLM: feed-forward, keys and values of rows whose attention context changed; the others' are kept.

    The first steps of a response compute everything. After them, a step forwards the response alone, and the prompt
    with it every `response_only_period` steps. A row is salient in a layer if its context has changed: the cosine with
    that of the step before is below tau. Salient rows go through the feed-forward network, give the next layer new keys
    and values, and attend exactly there. The context of the others is updated.

    On a block-causal model the same is done within each block, whose first steps compute everything. So do the rows
    that commit the block before: keys of finished blocks are those of the dense model for these tokens. A row that a
    block cache skips keeps its keys as they were last written. Skipped rows at the tail of a block are out of sight.
    Their contributions stay in the contexts that are updated.

    Attributes:
        tau: the cosine below which a row is salient, or one for each layer; lower is faster. The paper uses 0.99 or
            0.995 for LLaDA, 0.995 or 0.9975 for Dream. Above 1, and with a `response_only_period` of 1, it is the dense
            model.
        full_steps: steps that compute everything, at least 1: at the beginning of a response, default 4; of each block
            of a block-causal model, default 1.
        every: interval of further such steps within a block, in steps, from its first on; 0 for no further ones.
        response_only_period: interval of steps after the first full ones at which all rows are forwarded; the first one
            is such a step. 0: the prompt's rows are never forwarded again. Bidirectional models only; default 4, as
            published. 8 avoids half of the steps that take most of the time, and changed next to nothing on the
            embedded model. If several tokens are committed per step, full steps take most of the time. At four tokens
            per step, full_steps=2, a period of 0 and update=False are 1.6 times faster than Fast-dLLM's dual cache.
            They are as near to the dense model (benchmarks/results/dyllm.md).
        gate: True if feed-forward networks run on salient rows only.
        partial: True if keys and values are projected for salient rows only, and attention is updated.
        update: for partial attention. True: the context of the other rows is that of the step before, updated by the
            contribution of the changed values (as published). False: they attend to all current keys and values. That
            is exact, and at 1280 keys on an H200 faster, too (benchmarks/results/dyllm.md). On a bidirectional model
            the last layer then runs on masked rows alone, and stores nothing of them.
        block_cache: "off", "dc" or "dc+"; see `Recipe`. Block-causal models only.
        recommit: forward a finished block once more before it is committed (block-causal models).
    """

    tau: float | tuple[float, ...] = 0.99
    full_steps: int | None = None
    every: int = 0
    response_only_period: int | None = None
    gate: bool = True
    partial: bool = True
    update: bool = True
    block_cache: str = "off"
    recommit: bool = True

    name = "dyllm"
    papers = (DYLLM.at("algorithms 1 to 4"),)
    extent = Extent.RESPONSE
    carries = PartialAttention.carries

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gate", "partial", "update"):
            if not isinstance(given := getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, got {given!r}.")
        if not self.gate and not self.partial:
            raise InputError("gate and partial are both False, which leaves the dense model; use 'dense' instead.")
        if not self.partial and not self.update:
            raise InputError(
                "update=False says how partial attention is made, and partial is False; leave one of them out."
            )
        for name, least in (("full_steps", 1), ("every", 0), ("response_only_period", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InputError(f"{name} must be an integer of at least {least}, got {value!r}.")

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        causal = spec.attention == "block_causal"
        passes: tuple[Pass, ...] = (ChunkLMHead(),)
        passes += () if self.update or causal else (OnlyMasked(),)
        passes += (GateFFN(self.tau),) if self.gate else ()
        passes += (PartialAttention(self.tau, self.update),) if self.partial else ()
        phases = phases_of(spec, *passes, FuseGLU(), BoundRows(), optional=ENDING)
        plan = self._in_blocks(spec) if causal else self._in_response(spec)
        return Recipe(self.name, 2, phases, self.block_cache, self.recommit, plan)

    def _in_blocks(self, spec: ModelSpec) -> RowPlan:
        """The rows of a block-causal model."""
        if self.response_only_period is not None:
            raise InputError(
                f"response_only_period={self.response_only_period} says how often a bidirectional model forwards its "
                f"prompt again; {spec.family} is block-causal, and the keys of its prompt are final. Leave it out."
            )
        return RowPlan(Block(), Counted(1 if self.full_steps is None else self.full_steps, self.every))

    def _in_response(self, spec: ModelSpec) -> RowPlan:
        """The rows of a bidirectional model."""
        if self.block_cache != "off":
            raise InputError(
                f"block_cache={self.block_cache!r} skips rows of the current block; on {spec.family}, which is "
                f"bidirectional, dyllm forwards the whole response, and skips what has not changed of it. Leave it "
                f"'off'."
            )
        full = 4 if self.full_steps is None else self.full_steps
        period = 4 if self.response_only_period is None else self.response_only_period
        return RowPlan(Response(), Counted(0, self.every, warm_up=full, widen=period))


__getattr__ = builders(dyllm=DyLLM)
