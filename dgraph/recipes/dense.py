"""The baseline: every masked row of the block through every layer in every step."""

from __future__ import annotations

from dataclasses import dataclass

from dgraph.errors import InputError
from dgraph.passes.base import Pass
from dgraph.passes.bound_rows import BoundRows
from dgraph.passes.cache_kv import CacheKV
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.encode_rows import EncodeRows
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.passes.fuse_projections import FuseProjections
from dgraph.passes.only_kv import OnlyKV
from dgraph.passes.only_masked import OnlyMasked
from dgraph.passes.pack_rows import PackRows
from dgraph.passes.self_condition import SelfCondition
from dgraph.plans.papers import OURS
from dgraph.plans.regions import Extent
from dgraph.plans.rows import RowPlan
from dgraph.recipes.base import Phase, Recipe
from dgraph.recipes.former import builders
from dgraph.recipes.options import RecipeOptions
from dgraph.spec import ModelSpec

CACHED: tuple[Pass, ...] = (PackRows(), FuseProjections(), CacheKV())
"""First passes of every recipe for a block-causal model."""

STACKED = frozenset({"FuseProjections"})
"""Optional wherever it is used: projections that are stored in different ways stay apart."""

PREFILL = Phase("prefill", (*CACHED, OnlyKV()), STACKED)
"""The prompt's whole blocks: keys and values only."""

ENCODED = Phase("prefill", (*CACHED, EncodeRows(), OnlyKV()), STACKED)
"""Passes of a prefill for a model whose rows are flagged as encoded or not."""

GATED = frozenset({"FuseGLU"})
"""Optional where it is used: a mixture of experts may have no gated unit beside its experts."""

BOUNDED = GATED | {"BoundRows"}
"""The same with BoundRows, which leaves a norm alone that experts read, and keys of which a part is rotated."""

ENDING = BOUNDED | {"OnlyMasked"}
"""Optional after the layers: a program that keeps its logits runs its last layer on all rows."""


def phases_of(spec: ModelSpec, *after: Pass, optional: frozenset[str] = frozenset()) -> tuple[Phase, ...]:
    """The phases of a recipe whose step runs these passes after `CACHED`; the optional ones may apply nowhere.

    A bidirectional model has no prefill: its first step forwards the prompt with everything else.

    Raises:
        InputError: one of these passes cannot be used with the model; the message says why.
    """
    for each in after:
        if reason := each.obstacle(spec):
            raise InputError(f"{each.name} cannot be used with {spec.family}: {reason}. Use the recipe 'dense'.")
    prefill = ENCODED if spec.noise == "uniform" else PREFILL
    step = Phase("step", (*CACHED, *after), STACKED | (optional & {p.name for p in after}))
    return (prefill, step) if spec.attention == "block_causal" else (step,)


def ending(spec: ModelSpec) -> tuple[Pass, ...]:
    """Last passes of a step: logits of masked rows only.

    On a bidirectional model, whose steps may forward the whole canvas, the last layer also runs on these rows only. On
    a model without a mask token, the next step reads the predictions of all rows.
    """
    if spec.noise == "uniform":
        return (SelfCondition(),)
    head = ChunkLMHead()
    return (head, OnlyMasked(), FuseGLU(), BoundRows()) if spec.attention == "bidirectional" else (head,)


@dataclass(frozen=True, kw_only=True)
class Dense(RecipeOptions):
    """The model as published: every row of the block (of the canvas, if it is bidirectional) in every step.

    A block-causal model keeps the keys and values of earlier blocks, which is exact. A bidirectional one recomputes the
    whole canvas, but for what nothing would read: the last layer of rows that are not masked.

    Attributes:
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        recommit: forward a finished block once more before it is committed (block-causal models).
        rings: of a model whose layers see a window: let keys behind it go; see `CacheKV`.
    """

    block_cache: str = "off"
    recommit: bool = True
    rings: bool = True

    name = "dense"
    papers = OURS
    extent = Extent.CANVAS

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        plan = RowPlan() if spec.attention == "bidirectional" else None
        phases = phases_of(spec, *ending(spec), optional=ENDING)
        made = Recipe(self.name, 2, phases, self.block_cache, self.recommit, plan)
        return made if self.rings else made.with_all_keys()


__getattr__ = builders(dense=Dense)
