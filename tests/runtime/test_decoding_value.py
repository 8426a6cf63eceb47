"""`Decoding`: checked when it is made, plain values and back, and what a policy brings along."""

from __future__ import annotations

import json
from typing import Any

import pytest

import dgraph
from dgraph.errors import InputError, UnknownName
from dgraph.evaluate.arms import Choice, expand
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import ConfidenceThreshold, FixedSteps, policy_of
from dgraph.runtime.sampling.sampler import Credit, Sampler
from tests.compiled import compiled
from tests.tiny import tiny_spec


@pytest.mark.parametrize(
    "value",
    [
        Decoding(),
        Decoding(max_new_tokens=9, threshold=0.5, stop=["a", "b"], seed=3, temperature=0.0),
        Decoding(policy="dream_entropy", steps=16, block_length=8, top_p=0.9),
        Decoding(policy=FixedSteps(4, sampler=Sampler(top_k=50, suppress=(1, 2)))),
        Decoding(sampler=Sampler(temperature=0.5, credit=Credit(beta=0.5), confidence_of="logits")),
    ],
)
def test_plain_values_and_back(value: Decoding) -> None:
    assert Decoding.from_json(json.loads(json.dumps(value.to_json()))) == value
    assert hash(value) == hash(Decoding.from_json(value.to_json()))


def test_what_is_the_default_is_not_written() -> None:
    assert Decoding().to_json() == {}
    assert Decoding(steps=4, stop=("x",)).to_json() == {"steps": 4, "stop": ["x"]}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_new_tokens": 0}, InputError, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 1.5}, InputError, "max_new_tokens must be at least 1, got 1.5"),
        ({"block_length": 0}, InputError, "block_length must be at least 1, got 0"),
        ({"seed": "x"}, InputError, "seed must be a whole number, got 'x'"),
        (
            {"max_new_tokens": 4, "min_tokens": 5},
            InputError,
            r"min_tokens must be from 0 to max_new_tokens \(4\), got 5",
        ),
        ({"min_tokens": True}, InputError, r"min_tokens must be from 0 to max_new_tokens \(128\), got True"),
        ({"stop": "end"}, InputError, "stop strings are a list"),
        ({"stop": 5}, InputError, "stop strings are a list, got 5"),
        ({"stop": [""]}, InputError, "at least one character"),
        ({"threshold": 0.5, "steps": 3}, InputError, "either threshold"),
        ({"policy": "lada"}, UnknownName, "Did you mean 'llada'"),
        ({"policy": "llada", "threshold": 0.5}, UnknownName, "unknown option of decode policy 'llada' 'threshold'"),
        ({"policy": FixedSteps(3), "steps": 4}, InputError, "cannot be set beside a policy object"),
        ({"temperature": -1}, InputError, "temperature is a finite number, at least 0, got -1"),
        ({"sampler": Sampler(), "top_k": 3}, InputError, "either a sampler or temperature, top_p and top_k"),
        ({"treshold": 0.5}, UnknownName, r"unknown setting of Decoding 'treshold'\. Did you mean 'threshold'"),
    ],
)
def test_refused_when_it_is_made(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Decoding.of(None, settings)


def test_a_value_or_its_fields_but_not_both() -> None:
    value = Decoding(steps=3)
    assert Decoding.of(value, {}) is value
    with pytest.raises(InputError, match="seed cannot be set beside a Decoding; set it there"):
        Decoding.of(value, {"seed": 1})
    with pytest.raises(InputError, match=r"expected a Decoding, got 0\.9"):
        Decoding.of(0.9, {})  # type: ignore[arg-type]


def test_what_has_no_plain_form_says_so() -> None:
    class Mine:
        def choose(self, candidates: Any) -> Any: ...

    with pytest.raises(InputError, match="has no form in JSON; give a rule by name"):
        Decoding(policy=Mine()).to_json()
    with pytest.raises(InputError, match="processors have no form in JSON"):
        Decoding(sampler=Sampler(processors=(lambda z, c: z,))).to_json()


def test_a_policy_brings_its_sampler_unless_the_caller_says_otherwise() -> None:
    warm = ConfidenceThreshold(0.8, sampler=Sampler(temperature=0.7, top_k=50))
    assert Decoding(policy=warm).sampling == Sampler(temperature=0.7, top_k=50)
    assert Decoding(policy=warm, temperature=0.0).sampling == Sampler(top_k=50)
    assert Decoding(policy=warm, sampler=Sampler(top_p=0.5)).sampling == Sampler(top_p=0.5)
    assert Decoding(threshold=0.8).sampling == Sampler()
    assert policy_of("llada", top_k=50, steps=4) == FixedSteps(4, schedule="masks", sampler=Sampler(top_k=50))
    assert policy_of(**warm.to_json()) == warm


def test_it_does_so_in_generate(model: dgraph.Model) -> None:
    made = compiled(model, "dense")
    warm = ConfidenceThreshold(0.9, sampler=Sampler(temperature=1.5, top_k=40))

    def tokens(**settings: Any) -> list[list[int]]:
        return made.generate(input_ids=[[1, 2, 3], [4, 5]], max_new_tokens=12, **settings).token_ids

    drawn, greedy = tokens(policy=warm, seed=1), tokens(threshold=0.9)
    assert drawn == tokens(threshold=0.9, temperature=1.5, top_k=40, seed=1) != greedy
    assert tokens(policy=warm, temperature=0.0, top_k=0) == greedy
    value = Decoding(policy=warm, seed=1, max_new_tokens=12)
    assert made.generate(decoding=value, input_ids=[[1, 2, 3], [4, 5]]).token_ids == drawn


def test_it_does_so_in_an_evaluation() -> None:
    arms, _ = expand(tiny_spec(), [Choice("dense")], [Choice("llada", {"steps": 4})], {"top_k": [0, 50]})
    assert [arm.policy.sampler for arm in arms] == [Sampler(), Sampler(top_k=50)]
    assert arms[1].rule_json()["sampler"] == {"top_k": 50}
    assert [arm.swept for arm in arms] == [{"top_k": 0}, {"top_k": 50}]
