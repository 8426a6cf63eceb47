"""DyLLM: recompute a layer only for the rows whose attention context has changed."""

from __future__ import annotations

from dgraph.errors import InputError
from dgraph.passes.base import Pass
from dgraph.passes.bound_rows import BoundRows
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.passes.gate_ffn import GateFFN
from dgraph.passes.only_masked import OnlyMasked
from dgraph.passes.partial_attention import PartialAttention
from dgraph.plans.regions import Block, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes.base import Cost, Recipe, caching, costing
from dgraph.recipes.dense import ENDING, phases_of
from dgraph.spec import ModelSpec


@costing(
    Cost("tiny_sdar", "its tasks", 100, 0.0, None, 1, "dyllm"),
    Cost("five conversions to smol_sdar", "GSM8K, SVAMP and MAWPS", 2692, -0.5, (-1.0, 0.0), 1.05, "smol"),
)
@caching
def dyllm(
    spec: ModelSpec,
    tau: float | tuple[float, ...] = 0.99,
    full_steps: int | None = None,
    every: int = 0,
    response_only_period: int | None = None,
    gate: bool = True,
    partial: bool = True,
    update: bool = True,
    block_cache: str = "off",
    recommit: bool = True,
    max_num_logits: int = 2048,
) -> Recipe:
    """DyLLM: feed-forward, keys and values of rows whose attention context changed; the others' are kept.

    The first steps of a response compute everything. After them, a step forwards the response alone, and the prompt
    with it every `response_only_period` steps. A row is salient in a layer if its context has changed: the cosine with
    that of the step before is below tau. Salient rows go through the feed-forward network, give the next layer new keys
    and values, and attend exactly there. The context of the others is updated.

    Paper: *DyLLM: Efficient Diffusion LLM Inference via Saliency-based Token Selection and Partial Attention*, arXiv
    2603.08026, algorithms 1 to 4.

    On a block-causal model the same is done within each block, whose first steps compute everything. So do the rows
    that commit the block before: keys of finished blocks are those of the dense model for these tokens. A row that a
    block cache skips keeps its keys as they were last written. Skipped rows at the tail of a block are out of sight.
    Their contributions stay in the contexts that are updated.

    Args:
        spec: the model.
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
        max_num_logits: rows whose logits exist at a time.
    """
    for name, given in (("gate", gate), ("partial", partial), ("update", update)):
        if not isinstance(given, bool):
            raise InputError(f"{name} must be True or False, got {given!r}.")
    if not gate and not partial:
        raise InputError("gate and partial are both False, which leaves the dense model; use 'dense' instead.")
    if not partial and not update:
        raise InputError(
            "update=False says how partial attention is made, and partial is False; leave one of them out."
        )
    causal = spec.attention == "block_causal"
    full = full_steps if full_steps is not None else 1 if causal else 4
    period = 4 if response_only_period is None else response_only_period
    for name, value, least in (("full_steps", full, 1), ("every", every, 0), ("response_only_period", period, 0)):
        if type(value) is not int or value < least:
            raise InputError(f"{name} must be an integer of at least {least}, got {value!r}.")
    if causal:
        if response_only_period is not None:
            raise InputError(
                f"response_only_period={response_only_period} says how often a bidirectional model forwards its prompt "
                f"again; {spec.family} is block-causal, and the keys of its prompt are final. Leave it out."
            )
        plan = RowPlan(Block(), Counted(full, every))
    else:
        if block_cache != "off":
            raise InputError(
                f"block_cache={block_cache!r} skips rows of the current block; on {spec.family}, which is "
                f"bidirectional, dyllm forwards the whole response, and skips what has not changed of it. Leave it "
                f"'off'."
            )
        plan = RowPlan(Response(), Counted(0, every, warm_up=full, widen=period))
    passes: tuple[Pass, ...] = (ChunkLMHead(max_num_logits),)
    passes += () if update or causal else (OnlyMasked(),)
    passes += (GateFFN(tau),) if gate else ()
    passes += (PartialAttention(tau, update),) if partial else ()
    phases = phases_of(spec, *passes, FuseGLU(), BoundRows(), optional=ENDING)
    return Recipe("dyllm", 2, phases, block_cache, recommit, plan)
