"""EntropyCache: full steps where nothing is sure enough, and a plain implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dgraph_methods.entropycache import EntropyCache, Latest, WhenUnsure
from torch import Tensor

import dgraph
from dgraph.errors import InputError
from dgraph.plans.rows import RowPlan
from dgraph.runtime.stats import StepRecord
from dgraph.testing import TinyModel, check_batch_equals_alone, check_effects, check_lossless, models, prompts

MODELS = models("bidirectional")
OPTIONS = {"tau": 0.5, "count": 3}


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_at_no_entropy_every_step_is_full(tiny: TinyModel) -> None:
    check_lossless(tiny, "entropycache", {"tau": 0.0})


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_a_prompt_of_a_batch_gets_what_it_gets_alone(tiny: TinyModel) -> None:
    check_batch_equals_alone(tiny, "entropycache", OPTIONS)
    check_effects(tiny, "entropycache", OPTIONS)


@pytest.mark.parametrize("name", ["llada", "dream"])
@torch.no_grad()
def test_the_rows_of_every_step_are_those_of_plain_code(name: str) -> None:
    """From the tokens and entropies that an observer sees, for one prompt."""
    (tiny,) = models(None, name)
    spec, prompt, new = tiny.model.spec, prompts(tiny)[0], 20
    records: list[StepRecord] = []
    made = tiny.optimized("entropycache", **OPTIONS)
    entropies: list[Tensor] = []

    class Noted(dgraph.runtime.policies.ConfidenceThreshold):
        def choose(self, candidates: Any) -> Tensor:
            entropies.append(candidates.measured["entropy"][0].clone())
            return super().choose(candidates)

    made.generate(input_ids=[prompt], max_new_tokens=new, policy=Noted(1.0), observer=records.append)
    total, order, entropy, full = len(prompt) + new, [], math.inf, 0
    for record, measured in zip(records, entropies, strict=True):
        start = int(record.start[0])
        rows = {*range(start - spec.logit_shift, min(start + spec.block_length, total)), *order[: OPTIONS["count"]]}
        if entropy > OPTIONS["tau"]:
            rows, full = {*range(total)}, full + 1
        assert record.positions.tolist() == sorted(rows)
        decoded = record.committed_positions + spec.logit_shift
        entropy = float(measured[decoded - start].max())
        order = [*sorted(decoded.tolist()), *order]
    assert 1 < full < len(records), "some steps are full, and some are not"


def test_it_comes_back_from_json_and_refuses_what_cannot_be() -> None:
    (tiny,) = models("bidirectional", "llada")
    recipe = tiny.recipe("entropycache", tau=2.0, count=5)
    assert recipe.plan == RowPlan(Latest(5), WhenUnsure(2.0))
    assert dgraph.Recipe.from_json(recipe.to_json()) == recipe
    with pytest.raises(InputError, match=r"entropycache: tau and count are at least 0, got -1\.0 and 16"):
        EntropyCache(tau=-1.0).build(tiny.model.spec)
