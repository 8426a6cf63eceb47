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
from dgraph.plans.schedules import Counted
from dgraph.recipes.base import Cost, Recipe, caching, costing
from dgraph.recipes.dense import BOUNDED, ENDING, ending, phases_of
from dgraph.spec import ModelSpec

COUNTS = ("host", "device")


@costing(
    Cost("tiny_sdar", "hard tasks", 160, 0.0, (-2.1, 2.1), 1.11, "focus"),
    Cost("tiny_llada", "hard tasks", 100, +1.0, (-3.0, 5.1), 1.01, "hard"),
    Cost("six conversions to smol_sdar", "GSM8K, SVAMP and MAWPS", 2692, -0.1, (-0.6, 0.4), 1.22, "smol"),
)
@caching
def focus(
    spec: ModelSpec,
    alpha: float = 1.5,
    after: int = 1,
    signal: str = "delta",
    select: str = "top",
    keep: int = 0,
    signal_pool: int = 3,
    full_steps: int | None = None,
    block_cache: str = "dc+",
    recommit: bool = True,
    max_num_logits: int = 2048,
    count: str = "host",
) -> Recipe:
    """FOCUS: evicts rows after layer `after`, caches decoded rows within the block.

    Paper: *FOCUS: DLLMs Know How to Tame Their Compute Bound*, arXiv 2601.23278.

    The first step of each block evicts nothing, and rows that are evicted later are seen with their last keys. This is
    published for bidirectional models, whose first step forwards the whole canvas (paper, appendix B). On block-causal
    models the published FOCUS evicts in the first step, too: `full_steps=0`. There it does not know yet how many tokens
    a step commits, and it hides all keys after the last kept row. Costs of both are in benchmarks/results/focus.md. If
    rows predict the next position, the row before a mask stands for it (see `EvictTokens`). In a model that encodes a
    denoised block, the forwards that encode evict nothing, and all others may.

    Args:
        spec: the model.
        alpha: retention over the average number of decoded tokens per step, at least 1; the paper's default is 1.5.
        after: the layer whose keys and values are written before rows are evicted.
        signal: "delta" (change of importance from the layer before) or "importance".
        select: keep the "top", "random" or "bottom" rows of the signal; "scripted": the rows of a script of commits, to
            measure speed (see `EvictTokens`).
        keep: a fixed number of masked rows instead of the dynamic budget; 0 for the budget.
        signal_pool: width of the max-pooling of the signal over neighbouring masked rows; odd.
        full_steps: steps at the beginning of a block that evict nothing, default 1; 0 on block-causal models alone, as
            published, and always on models that work in two modes.
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        recommit: forward a finished block once more before it is committed (as the paper's quality figures do).
        max_num_logits: rows whose logits exist at a time.
        count: place where the kept rows are counted. The "host" reads their number and runs a bucket of them. The
            "device" runs a step without that read (see `CountRows`).
    """
    if count not in COUNTS:
        raise InputError(f"count must be one of {', '.join(map(repr, COUNTS))}, got {count!r}.")
    if reason := EvictTokens.obstacle(spec):
        raise InputError(f"focus cannot evict rows of {spec.family}: {reason}.")
    causal = spec.attention == "block_causal"
    if full_steps is None:
        full_steps = 0 if spec.two_modes else 1
    if spec.two_modes and full_steps:
        raise InputError(
            f"full_steps={full_steps} counts the steps of a block, but {spec.family} works in two modes: its blocks "
            f"begin with a step that encodes, which writes no keys of rows that are denoised. Leave it out."
        )
    if not causal and full_steps == 0:
        raise InputError(
            f"full_steps=0 evicts rows in the first step of a block, but {spec.family} is bidirectional: that step "
            f"forwards the whole canvas, whose keys the later ones read. Give at least 1."
        )
    # The plan of a bidirectional model says which steps are full.
    evict = EvictTokens(alpha, after, signal, select, keep, signal_pool, full_steps if causal else 0)
    passes: tuple[Pass, ...] = (evict, *ending(spec, max_num_logits))
    if count == "device":
        passes = (*(p for p in passes if p.name not in BOUNDED), CountRows(), FuseGLU(), BoundRows())
    phases = phases_of(spec, *passes, optional=ENDING)
    plan = None if causal else RowPlan(Block(), Counted(full_steps))
    return Recipe("focus", 3, phases, block_cache, recommit, plan)
