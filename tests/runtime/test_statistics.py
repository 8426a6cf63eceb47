"""Statistics that a policy asks for, and what a policy carries, through whole generations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.ops.statistics import KL, RowLogits, Statistic
from dgraph.passes import MeasureRows, run_passes
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.loop.variants import measuring
from dgraph.runtime.policies import Candidates, Carried, ConfidenceThreshold, Policy, statistics_of
from dgraph.runtime.policies.base import DecodeRule, best
from dgraph.testing import TinyModel, models
from tests.runtime.recorder import Recorder

PROMPTS = [list(range(6, 30)), list(range(40, 45))]


@dataclass(frozen=True)
class Spread(Statistic):
    """A user's own reduction: the standard deviation of the finite log-probabilities."""

    name: ClassVar[str] = "spread"
    filler: ClassVar[float] = 0.0

    def measure(self, rows: RowLogits) -> Tensor:
        finite = rows.logits > -torch.inf
        mean = torch.where(finite, rows.logits, 0.0).sum(-1) / finite.sum(-1)
        return torch.where(finite, (rows.logits - mean[:, None]).square(), 0.0).sum(-1).div(finite.sum(-1)).sqrt()


@dataclass(frozen=True)
class Stable(DecodeRule):
    """Commits what is confident, and whose distribution moved by at most `most` in each of the last `steps` steps; else
    the most confident (KLASS, algorithm 1, with one token where none is stable).
    """

    threshold: float = 0.4
    most: float = 0.05
    steps: int = 2
    top: int = 64

    name: ClassVar[str] = "stable"

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset({KL(self.top), Spread(), "margin"})

    @property
    def carries(self) -> tuple[Carried, ...]:
        return Carried("calm", torch.int64), Carried("steps", torch.int64, per="sequence", lasts="sequence")

    def _calm(self, candidates: Candidates) -> Tensor:
        return torch.where(candidates.need("kl", self) <= self.most, candidates.carried["calm"] + 1, 0)

    def choose(self, candidates: Candidates) -> Tensor:
        sure = candidates.committable & (candidates.confidence > self.threshold) & (candidates.need("spread", self) > 0)
        chosen = sure & (self._calm(candidates) >= self.steps)
        none = candidates.committable.any(dim=1) & ~chosen.any(dim=1)
        return chosen | (best(candidates.offered) & candidates.committable & none[:, None])

    def carry(self, candidates: Candidates, chosen: Tensor) -> Mapping[str, Tensor]:
        return {"calm": self._calm(candidates), "steps": candidates.carried["steps"] + 1}


@dataclass(eq=False)
class Watched:
    """A policy that notes what it was given."""

    rule: Stable
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]

    def __post_init__(self) -> None:
        self.needs, self.carries, self.carry = self.rule.needs, self.rule.carries, self.rule.carry

    def choose(self, candidates: Candidates) -> Tensor:
        values = candidates.measured["kl"], candidates.measured["spread"], candidates.carried["calm"]
        self.seen.append(tuple(x.clone() for x in (candidates.committable, *values, candidates.forwards)))  # type: ignore
        return self.rule.choose(candidates)


SDAR, LLADA = models(None, "sdar", "llada")[::-1]


def run(tiny: TinyModel, recipe: Any, policy: Policy, **options: Any) -> Any:
    made = tiny.optimized(recipe, buckets="hybrid")
    return made.generate(input_ids=PROMPTS, max_new_tokens=12, policy=policy, **options)


@pytest.mark.parametrize(("tiny", "recipe"), [(SDAR, "dense"), (SDAR, "focus"), (LLADA, "fast_dllm")], ids=str)
def test_statistics_of_the_lm_head_are_those_of_its_logits(tiny: TinyModel, recipe: str) -> None:
    """Computed in chunks without keeping logits, and from whole logits by the runtime."""
    chunked, whole = Watched(Stable(), []), Watched(Stable(), [])
    value = tiny.recipe(recipe)
    got = run(tiny, value, chunked)
    want = run(tiny, value.keeping_logits(), whole)
    assert got.token_ids == want.token_ids
    assert len(chunked.seen) == len(whole.seen) > 3
    first = chunked.seen[0]
    assert first[1][first[0]].isinf().all(), "no row was seen before the first step"
    some = 0
    for mine, theirs in zip(chunked.seen, whole.seen, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        some += int((mine[1].isfinite() & mine[0]).sum())
        assert (mine[3][mine[4] == 0] == 0).all(), "what lasts a block begins anew with it"
    assert some > 10


def test_a_captured_step_measures_what_a_plain_one_does_and_begins_anew_in_each_call() -> None:
    made = SDAR.optimized("focus", buckets="hybrid")
    policy = Stable()
    pool, compiler = GraphPool(recorder=Recorder), RegionCompiler("eager")
    session = BlockSession(made.spec, made.programs, block_cache="dc+", pool=pool)
    graph = made.graph("step").copy()
    run_passes(graph, [MeasureRows(statistics_of(policy))])
    session.variants[measuring(policy)] = {"step": LoweredProgram(graph, compiler, Buckets.of("hybrid"), pool.runner)}
    want = made.generate(input_ids=PROMPTS, max_new_tokens=12, policy=policy).token_ids
    options: dict[str, Any] = {"max_new_tokens": 12, "policy": policy}
    assert [session.generate(PROMPTS, **options).token_ids for _ in range(2)] == [want, want]
    assert {name for name, _ in pool.recorded} >= {"prefix", "suffix", "transition"}
    assert [session.generate([prompt], **options).token_ids[0] for prompt in PROMPTS] == want, "alone as in a batch"
    assert measuring(replace(policy, threshold=0.9)) == measuring(policy) != measuring(replace(policy, top=8))
    plain = {"max_new_tokens": 12, "policy": ConfidenceThreshold(0.9)}
    assert (
        session.generate(PROMPTS, **plain).token_ids
        == made.generate(input_ids=PROMPTS, threshold=0.9, max_new_tokens=12).token_ids
    )


def test_a_program_without_the_statistics_is_refused() -> None:
    made = SDAR.optimized("dense")
    session = BlockSession(made.spec, made.programs)
    with pytest.raises(InputError, match="Stable: needs kl, got none; it takes a step program that outputs kl, or log"):
        session.generate(PROMPTS, max_new_tokens=4, policy=Stable())


def test_what_cannot_be_carried() -> None:
    with pytest.raises(
        InputError, match=r"'calm' is per 'position' and lasts a 'block'.*got per='position' and lasts="
    ):
        Carried("calm", lasts="sequence")
