"""A tiny model under a recipe on one rank and on several, and what must be equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dgraph.compiler.compiled_model import CompiledModel, Result
from dgraph.runtime.stats import StepRecord
from dgraph.testing import TinyModel, prompts, ranks

NEW_TOKENS, THRESHOLD = 12, 0.3
"""A block and a half; some steps commit several tokens."""
TOLERANCE = 1e-4
"""How far keys and values may differ: a sum over inputs is a sum of ranks' sums; fp32, values of about 1."""


@dataclass(frozen=True)
class Run:
    """What a call of `generate` gave, and its steps."""

    made: CompiledModel
    result: Result
    steps: list[StepRecord]


def run_of(made: CompiledModel, tiny: TinyModel, **decoding: Any) -> Run:
    """Decode the model's prompts; keys and values are kept where no row is hidden."""
    steps: list[StepRecord] = []
    plan = made.recipe.plan
    keep = plan is None or not plan.region.hides
    ids = prompts(tiny)
    return Run(made, made.generate(input_ids=ids, keep_kv=keep, observer=steps.append, **decoding), steps)


def check_equal(
    tiny: TinyModel,
    world: int,
    recipe: str,
    options: Mapping[str, Any],
    experts: str = "split",
    near: float = TOLERANCE,
    **decoding: Any,
) -> tuple[Run, list[Run]]:
    """Ranks give one process's tokens, in the same steps, of the same rows; each has its slice of keys and values, to
    within `near`.
    """
    rule = {} if decoding.keys() & {"threshold", "steps", "policy"} else {"threshold": THRESHOLD}
    chosen = {"max_new_tokens": NEW_TOKENS, **rule, **decoding}
    whole = run_of(tiny.optimized(recipe, **options), tiny, **chosen)
    each = ranks(
        world, lambda rank: run_of(tiny.on_rank(rank, world, recipe, experts=experts, **options), tiny, **chosen)
    )
    for rank, run in enumerate(each):
        where = f"{tiny} under {recipe}, rank {rank} of {world}"
        assert run.result.token_ids == whole.result.token_ids, where
        assert run.result.stats.rows == whole.result.stats.rows, where
        assert run.result.stats.salient == whole.result.stats.salient, where
        check_steps(whole.steps, run.steps, where, near)
        for mine, other in zip(run.result.kv or (), whole.result.kv or (), strict=True):
            assert (mine.first, mine.committed) == (other.first, other.committed), where
            for pair, wanted in zip(mine.layers, other.layers, strict=True):
                heads = wanted[0].shape[1]  # layers may differ in them
                first, own = rank * heads // world, max(heads // world, 1)
                for got, want in zip(pair, wanted, strict=True):
                    _close(got, want[:, first : first + own], where, near)
    return whole, each


def check_steps(wanted: list[StepRecord], got: list[StepRecord], where: str, near: float = TOLERANCE) -> None:
    """The same rows in every step: forwarded, kept, committed; the same tokens, and confidences to within `near`."""
    assert len(got) == len(wanted), where
    for mine, other in zip(got, wanted, strict=True):
        at = f"{where}, step {other.step}"
        for name in ("sequence", "input_ids", "positions", "kept", "committed"):
            assert getattr(mine, name).equal(getattr(other, name)), f"{at}: {name}"
        assert mine.token[mine.committed].equal(other.token[other.committed]), at
        _close(mine.confidence, other.confidence, at, near)


def _close(got: torch.Tensor, want: torch.Tensor, where: str, near: float) -> None:
    said: Callable[[str], str] = lambda message: f"{where}: {message}"  # noqa: E731
    torch.testing.assert_close(got, want, rtol=near, atol=near, msg=said)
