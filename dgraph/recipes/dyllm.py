"""DyLLM: recompute what has hardly changed for the rows only where it has."""

from __future__ import annotations

from dgraph.errors import InputError
from dgraph.passes.base import Pass
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.gate_ffn import GateFFN
from dgraph.passes.partial_attention import PartialAttention
from dgraph.recipes.base import Recipe
from dgraph.recipes.dense import phases_of
from dgraph.rowplan import RowPlan
from dgraph.spec import ModelSpec


def dyllm(
    spec: ModelSpec,
    tau: float | tuple[float, ...] = 0.99,
    full_steps: int = 4,
    response_only_period: int = 4,
    gate: bool = True,
    partial: bool = True,
    max_num_logits: int = 2048,
) -> Recipe:
    """DyLLM: feed-forward, keys and values of rows whose attention context turned; the others' are kept.

    The first steps of a response compute everything. Behind them, a step forwards the response alone, and the prompt
    with it every `response_only_period` steps. In each layer, the rows whose context has turned (its cosine with that
    of the step before is below tau) go through the feed-forward network, give the next layer new keys and values, and
    attend exactly there; the context of the others is updated (paper, algorithms 1 to 4).

    Args:
        spec: the model; bidirectional.
        tau: the cosine below which a row is salient, or one for each layer; lower is faster. The paper uses 0.99 or
            0.995 for LLaDA, 0.995 or 0.9975 for Dream. Above 1, and with a `response_only_period` of 1, it is the dense
            model.
        full_steps: steps at the beginning of a response that compute everything, at least 1.
        response_only_period: every so many steps behind these, all rows are forwarded; the first one is such a step. 0:
            never the prompt's again.
        gate: whether feed-forward networks run on salient rows only.
        partial: whether keys, values and attention are updated for salient rows only.
        max_num_logits: rows whose logits exist at a time.
    """
    if spec.attention != "bidirectional":
        raise InputError(
            f"recipe 'dyllm' spares rows of a canvas that change little from step to step; {spec.family} is "
            f"{spec.attention}: a step forwards {spec.block_length} rows, the keys of all others are exact, and what a "
            f"step caches of its rows ends with their block. Use 'dense' or 'focus'."
        )
    for name, given in (("gate", gate), ("partial", partial)):
        if not isinstance(given, bool):
            raise InputError(f"{name} must be True or False, got {given!r}.")
    if not gate and not partial:
        raise InputError("gate and partial are both False, which leaves the dense model; use 'dense' instead.")
    for name, value, least in (("full_steps", full_steps, 1), ("response_only_period", response_only_period, 0)):
        if type(value) is not int or value < least:
            raise InputError(f"{name} must be an integer of at least {least}, got {value!r}.")
    passes: tuple[Pass, ...] = (GateFFN(tau),) if gate else ()
    passes += (PartialAttention(tau),) if partial else ()
    phases = phases_of(spec, *passes, ChunkLMHead(max_num_logits))
    plan = RowPlan("response", full_steps=0, warm_up=full_steps, widen=response_only_period)
    return Recipe("dyllm", 1, phases, plan=plan)
