"""Ranks that agree: what they are asked for, what an engine takes in, and what a step comes to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dgraph
from dgraph.errors import InputError, RanksDiffer
from dgraph.parallel import divide as division
from dgraph.ranks.groups import Alone, group_of
from dgraph.ranks.sharding import Sharding
from dgraph.runtime.loop.rank_check import agree
from dgraph.testing import ranks

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
SIZE = {"max_sequences": 2, "max_tokens": 64}


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh is that of the threads."""
    monkeypatch.setattr(division, "of", lambda mesh: Sharding(2))


def optimized(model: dgraph.Model, mesh: Any = None) -> dgraph.CompiledModel:
    return dgraph.optimize(model, "focus", backend="eager", artifacts=False, mesh=mesh)


def test_an_engine_over_ranks_says_what_one_process_says(model: dgraph.Model) -> None:
    with optimized(model).engine(**SIZE) as engine:
        alone = [response.token_ids for response in engine.generate(PROMPTS, max_new_tokens=12)]

    def function(rank: int) -> tuple[list[list[int]], int]:
        engine = optimized(model, "threads").engine(**SIZE)
        if not engine.leads:
            with pytest.raises(InputError, match="requests are given to rank 0, and this is rank 1"):
                engine.generate(PROMPTS)
            engine.join()
            return [], engine.stats.steps
        with engine:
            said = [response.token_ids for response in engine.generate(PROMPTS, max_new_tokens=12)]
        return said, engine.stats.steps

    (said, steps), (nothing, followed) = ranks(2, function)
    assert said == alone
    assert (nothing, steps) == ([], followed)


def test_ranks_that_are_asked_for_different_things_refuse_alike(model: dgraph.Model) -> None:
    def function(rank: int) -> str:
        made = optimized(model, "threads")
        with pytest.raises(RanksDiffer) as caught:
            made.generate(input_ids=[PROMPTS[rank]], max_new_tokens=8)
        assert made.generate(input_ids=PROMPTS, max_new_tokens=8).token_ids
        return str(caught.value)

    first, second = ranks(2, function)
    assert first == second
    assert first.startswith("ranks differ in generate: prompts is [[1, 2, 3, 4, 5]] on rank 0 and [[6, 7, 8]] on rank")


def test_the_first_fact_that_differs_is_named() -> None:
    def function(rank: int) -> None:
        agree(group_of("tp"), "step 7", {"rows": np.array([3, 4]), "wanted": np.array([1, rank])})

    with pytest.raises(
        RanksDiffer, match=r"ranks differ in step 7: wanted is \[1, 0\] on rank 0 and \[1, 1\] on rank 1"
    ):
        ranks(2, function)
    agree(Alone(), "step 7", {"rows": 1})
