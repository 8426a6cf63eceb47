"""dLLM-Cache: the prompt recomputed seldom, the response often, and between only the rows that have changed most."""

from __future__ import annotations

from dataclasses import dataclass

from dgraph.errors import InputError
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.passes.reuse_rows import ReuseRows
from dgraph.plans.papers import DLLM_CACHE
from dgraph.plans.regions import Extent, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart
from dgraph.recipes.base import Recipe
from dgraph.recipes.dense import GATED, phases_of
from dgraph.recipes.former import builders
from dgraph.recipes.options import RecipeOptions
from dgraph.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class DLLMCache(RecipeOptions):
    """dLLM-Cache: the prompt's rows seldom, the response's often, else the share whose values have changed most.

    Steps of a response are counted from 0. One that `prompt_interval` divides forwards the prompt; else its keys,
    values and outputs are kept. One that `response_interval` divides recomputes the response. Any other recomputes, in
    each layer but the first, the share rho of the response's rows whose values are least similar to the cached ones;
    the other rows get new values, and the outputs that attention and feed-forward network gave them last. The first
    layer recomputes all rows.

    It is as published, with one difference. If logits are shifted (Dream), the prompt's last row, which predicts the
    first token, goes with the response.

    Bidirectional models only.

    Attributes:
        prompt_interval: steps from one with the prompt to the next, at least 1. The authors use 25 to 100.
        response_interval: steps from one that recomputes the response to the next, at least 1. The authors use 1 to 8.
        rho: the share of the response's rows that the steps between recompute, rounded down to whole rows; from 0 to 1.
            With 1, and a `prompt_interval` of 1, it is the dense model.
    """

    prompt_interval: int = 50
    response_interval: int = 7
    rho: float = 0.25

    name = "dllm_cache"
    papers = (DLLM_CACHE,)
    extent = Extent.RESPONSE
    reuses = ReuseRows.reuses

    def __post_init__(self) -> None:
        super().__post_init__()
        check_intervals(self.prompt_interval, self.response_interval)
        if type(self.rho) not in (int, float) or not 0 <= self.rho <= 1:
            raise InputError(f"rho must be a number from 0 (reuse all rows) to 1 (recompute all), got {self.rho!r}.")

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        if spec.attention != "bidirectional":
            raise InputError(
                f"recipe 'dllm_cache' keeps what hardly changes of a canvas from step to step; {spec.family} is "
                f"{spec.attention}: the keys of all rows but the current {spec.block_length} are exact. Use 'dense' or "
                f"'focus'."
            )
        plan = RowPlan(Response(), Apart(self.prompt_interval, self.response_interval))
        passes = ReuseRows(self.rho), ChunkLMHead(), FuseGLU()
        return Recipe(self.name, 1, phases_of(spec, *passes, optional=GATED), plan=plan)


def check_intervals(prompt_interval: int, response_interval: int) -> None:
    """Refuse intervals of steps that are no positive integers.

    Raises:
        InputError: naming the interval.
    """
    for name, value in (("prompt_interval", prompt_interval), ("response_interval", response_interval)):
        if type(value) is not int or value < 1:
            raise InputError(f"{name} must be an integer of at least 1, got {value!r}.")


__getattr__ = builders(dllm_cache=DLLMCache)
