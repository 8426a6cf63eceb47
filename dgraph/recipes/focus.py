"""FOCUS: evict rows that will not be decoded, cache decoded rows within the block."""

from __future__ import annotations

from dgraph.errors import InputError
from dgraph.passes.base import Pass
from dgraph.passes.bound_rows import BoundRows
from dgraph.passes.count_rows import CountRows
from dgraph.passes.evict_tokens import EvictTokens
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.plans.regions import Block
from dgraph.plans.rows import RowPlan
from dgraph.recipes.base import Recipe, caching
from dgraph.recipes.dense import BOUNDED, ENDING, ending, phases_of
from dgraph.spec import ModelSpec

COUNTS = ("host", "device")


@caching
def focus(
    spec: ModelSpec,
    alpha: float = 1.5,
    after: int = 1,
    signal: str = "delta",
    select: str = "top",
    keep: int = 0,
    block_cache: str = "dc+",
    recommit: bool = True,
    max_num_logits: int = 2048,
    count: str = "host",
) -> Recipe:
    """FOCUS: evicts rows after layer `after`, caches decoded rows within the block.

    On a bidirectional model it evicts from the block's rows, whose first step in each block forwards the whole canvas
    and evicts nothing; what is evicted is seen with the keys of that step (paper, appendix B).

    Args:
        spec: the model.
        alpha: retention over the average number of decoded tokens per step, at least 1; the paper's default is 1.5.
        after: the layer whose keys and values are written before rows are evicted.
        signal: "delta" (change of importance from the layer before) or "importance".
        select: keep the "top", "random" or "bottom" rows of the signal; "scripted": what a script of commits says, to
            measure speed (see `EvictTokens`).
        keep: a fixed number of masked rows instead of the dynamic budget; 0 for the budget.
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        recommit: forward a finished block once more before it is committed (as the paper's quality figures do).
        max_num_logits: rows whose logits exist at a time.
        count: who counts the kept rows: the "host", which reads their number and runs a bucket of them, or the
            "device", which runs a step without that read (see `CountRows`).
    """
    if count not in COUNTS:
        raise InputError(f"count must be one of {', '.join(map(repr, COUNTS))}, got {count!r}.")
    if reason := EvictTokens.obstacle(spec):
        raise InputError(f"focus cannot evict rows of {spec.family}: {reason}.")
    evict = EvictTokens(alpha=alpha, after=after, signal=signal, select=select, keep=keep)
    passes: tuple[Pass, ...] = (evict, *ending(spec, max_num_logits))
    if count == "device":
        passes = (*(p for p in passes if p.name not in BOUNDED), CountRows(), FuseGLU(), BoundRows())
    phases = phases_of(spec, *passes, optional=ENDING)
    plan = RowPlan(Block()) if spec.attention == "bidirectional" else None
    return Recipe("focus", 2, phases, block_cache, recommit, plan)
