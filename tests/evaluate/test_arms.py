"""What sweeps make of recipes and rules."""

from __future__ import annotations

from typing import Any

import pytest

from dgraph.errors import InputError, UnknownName
from dgraph.evaluate.arms import Arm, Choice, expand
from dgraph.evaluate.results import Keys
from dgraph.families import families
from dgraph.runtime.policies import ConfidenceThreshold, FixedSteps, policy_of
from tests.runtime.fake import fake_spec

SPEC = fake_spec(8)
DENSE = Choice("dense")
FOCUS = Choice("focus")


def arms_of(*args: Any, **options: Any) -> list[Arm]:
    return expand(SPEC, *args, **options)[0]


def labels(arms: list[Arm]) -> list[str]:
    return [arm.label for arm in arms]


def test_every_recipe_runs_under_every_rule() -> None:
    rules = [Choice("", {"threshold": 0.8}), Choice("llada2.0")]
    assert labels(arms_of([DENSE, FOCUS], rules, {})) == [
        "dense; threshold=0.8",
        "dense; llada2.0",
        "focus; threshold=0.8",
        "focus; llada2.0",
    ]


def test_a_sweep_concerns_those_that_have_the_option() -> None:
    sweeps = {"alpha": [1.2, 1.8], "steps": [2, 4]}
    arms = arms_of([DENSE, FOCUS], [Choice("")], sweeps)
    assert labels(arms) == [
        "dense; steps=2",
        "dense; steps=4",
        "focus, alpha=1.2; steps=2",
        "focus, alpha=1.2; steps=4",
        "focus, alpha=1.8; steps=2",
        "focus, alpha=1.8; steps=4",
    ]
    assert arms[0].swept == {"steps": 2}
    assert arms[-1].swept == {"alpha": 1.8, "steps": 4}
    assert arms[-1].policy == FixedSteps(4)
    assert arms[-1].line("alpha") == "focus; steps=4"
    assert arms[-1].line("steps") == "focus, alpha=1.8"


def test_a_model_without_a_mask_token_has_a_rule_of_its_own() -> None:
    spec = families()["diffusion_gemma"].random(0).spec
    (arm,), _ = expand(spec, [DENSE], [Choice("")], {})
    assert (arm.label, arm.policy) == ("dense; diffusion_gemma", policy_of("diffusion_gemma"))


def test_a_swept_threshold_replaces_given_steps() -> None:
    arms = arms_of([DENSE], [Choice("", {"steps": 4})], {"threshold": [0.7]})
    assert arms[0].policy == ConfidenceThreshold(0.7)


def test_named_rules_keep_their_other_options() -> None:
    (arm,) = arms_of([DENSE], [Choice("fixed_steps", {"steps": 4, "schedule": "masks"})], {"steps": [8]})
    assert arm.rule_json() == {"rule": "fixed_steps", "steps": 8, "schedule": "masks", "remasking": "low_confidence"}


def test_equal_arms_are_run_once() -> None:
    assert labels(arms_of([DENSE, Choice("dense", {"recommit": True})], [Choice("")], {})) == [
        "dense, recommit=true; threshold=0.9"
    ]
    rules = [Choice(""), Choice("confidence_threshold", {"threshold": 0.9})]
    assert labels(arms_of([FOCUS], rules, {})) == ["focus; confidence_threshold, threshold=0.9"]


def test_each_arm_is_compared_under_its_own_rule() -> None:
    arms, references = expand(SPEC, [FOCUS], [Choice("")], {"alpha": [1.2, 1.8], "threshold": [0.7, 0.9]}, DENSE)
    assert labels(arms) == [
        "dense; threshold=0.7",
        "focus, alpha=1.2; threshold=0.7",
        "dense; threshold=0.9",
        "focus, alpha=1.2; threshold=0.9",
        "focus, alpha=1.8; threshold=0.7",
        "focus, alpha=1.8; threshold=0.9",
    ]
    assert all(references[arm].policy == arm.policy for arm in arms if arm.recipe.name == "focus")
    assert all(reference.recipe == DENSE for reference in references.values())


def test_an_arm_that_came_as_a_reference_keeps_its_own_words() -> None:
    arms, references = expand(SPEC, [DENSE], [Choice("")], {"block_cache": ["off", "dc"]}, DENSE)
    assert [arm.swept for arm in arms] == [{"block_cache": "off"}, {"block_cache": "dc"}]
    assert references[arms[0]] == arms[0]


REFUSED = [
    (([Choice("dens")], [Choice("")], {}), UnknownName, "unknown recipe 'dens'"),
    (([DENSE], [Choice("dinfr")], {}), UnknownName, "unknown decode policy 'dinfr'"),
    (([DENSE], [Choice("")], {"alpha": [1.2]}), UnknownName, "unknown option to sweep 'alpha'"),
    (([FOCUS], [Choice("")], {"alpha": [0.5]}), InputError, "alpha must be at least 1"),
    (([DENSE], [Choice("", {"threshold": 0.9, "steps": 2})], {}), InputError, "give either threshold"),
    (([DENSE], [Choice("", {"factor": 1})], {}), UnknownName, "option of a rule without a name"),
    (([DENSE], [Choice("llada2.0", {"factor": 2})], {}), UnknownName, "option of decode policy 'llada2.0'"),
]


@pytest.mark.parametrize(("args", "kind", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_what_does_not_exist_is_refused(args: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        expand(SPEC, *args)


def test_formats_of_weights_make_arms_and_the_reference_keeps_its_own() -> None:
    arms, references = expand(SPEC, [Choice("dense")], [Choice("")], {}, Choice("dense"), ["int8", "fp8"])
    assert [arm.label for arm in arms] == [
        "dense; threshold=0.9",
        "dense, weights int8; threshold=0.9",
        "dense, weights fp8; threshold=0.9",
    ]
    assert {references[arm].weights for arm in arms[1:]} == {None}
    keys = Keys("w", {})
    assert len({keys.of(arm, "p") for arm in arms}) == 3
