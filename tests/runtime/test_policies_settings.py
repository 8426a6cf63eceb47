"""Rules whose settings are tensors, one value per sequence."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgraph.errors import InputError
from dgraph.lowering.traced import trace
from dgraph.runtime.loop.scripted_policy import BlockStep, Script
from dgraph.runtime.policies import (
    POLICIES,
    PRESETS,
    Candidates,
    ConfidenceThreshold,
    DecodeRule,
    Dream,
    DynamicThreshold,
    Factor,
    FixedSteps,
    Policy,
    Sequential,
    carries_of,
    kind_of,
    per_request,
    policy_key,
    policy_of,
    settings_of,
    traits_of,
    with_settings,
)
from dgraph.runtime.sampling.sampler import Sampler
from tests.runtime.formulas import draw, plain, together

NEEDED: dict[str, dict[str, Any]] = {
    "confidence_threshold": {"threshold": 0.6},
    "fixed_steps": {"steps": 3},
    "joint_threshold_indel": {"delete_id": 1, "split_id": 2},
}
RULES: dict[str, DecodeRule] = {
    **{name: POLICIES[name](**NEEDED.get(name, {})) for name in POLICIES},
    **{name: PRESETS[name] for name in ("fast_dllm", "dinfer_factor", "hierarchical_fast_v2", "llada", "llada_random")},
    **{name: PRESETS[name] for name in ("jetengine_dynamic", "dream_origin", "dream_topk_margin")},
    "dream_warm": Dream(steps=5, alg="maskgit_plus", alg_temp=0.5),
    "dream_steps": Dream(steps=5),
    "dynamic_steps": DynamicThreshold(steps=5),
    "dream_threshold_steps": policy_of("dream_threshold", steps=5),  # type: ignore[dict-item]
}
VALUES = {
    "steps": lambda rng: rng.randint(1, 40),
    "stability": lambda rng: rng.randint(0, 3),
    "max_post_edit_steps": lambda rng: rng.randint(0, 5),
    "eps": lambda rng: rng.choice([1e-3, 0.25, rng.uniform(0.01, 0.9)]),
    "alg_temp": lambda rng: rng.uniform(0.1, 3),
    "factor": lambda rng: rng.choice([0.5, 1.0, rng.uniform(0.1, 3)]),
    "gamma": lambda rng: rng.choice([0.0, rng.uniform(0, 5)]),
    "tolerance": lambda rng: rng.choice([0.0, 1e-5, 0.125]),
}


def other(rule: DecodeRule, rng: random.Random) -> DecodeRule:
    """The rule with other values of what is a request's own; those that are compared with confidences often tie."""
    values = {name: VALUES.get(name, lambda rng: rng.choice([rng.randint(1, 8) / 8, 1 - rng.random()]))(rng)
              for name in per_request(rule)}  # fmt: skip
    return replace(rule, **values)


def part(candidates: Candidates, at: slice) -> Candidates:
    """Some of the sequences."""

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: one[at] for name, one in value.items()}
        return value[at] if isinstance(value, Tensor) else value

    return Candidates(**{f.name: cut(getattr(candidates, f.name)) for f in fields(candidates)})


def stacked(rules: list[DecodeRule]) -> dict[str, Tensor]:
    """Their settings as a state holds them."""
    rows = [settings_of(rule) for rule in rules]
    dtypes = {float: torch.float64, int: torch.int64}
    return {name: torch.tensor([row[name] for row in rows], dtype=dtypes[type(rows[0][name])]) for name in rows[0]}


def carrying(policy: Any, candidates: Candidates, rng: random.Random) -> Candidates:
    """The candidates with what a policy carries, at random."""
    b, block = candidates.masked.shape
    carried = {}
    for each in carries_of(policy):
        start = each.begin(b, block, torch.device("cpu"))
        more = torch.tensor([rng.randint(0, 4) for _ in range(b)]).view(-1, *[1] * (start.dim() - 1))
        carried[each.name] = (start + more).to(start.dtype)
    return replace(candidates, carried=carried)


def decided(policy: Any, candidates: Candidates) -> dict[str, Tensor]:
    """All that a policy says of a step, its own carried tensors given in `Candidates.carried`."""
    chosen = policy.choose(candidates)
    found = {"chosen": chosen}
    if traits_of(policy).edits:
        found["settled"] = policy.settled(candidates, chosen)
    if traits_of(policy).remasks:
        found["back"] = policy.remask(candidates, chosen)
    if traits_of(policy).moves:
        found["said"], found["source"] = policy.move(candidates, chosen)
    if traits_of(policy).foresees:
        seen = candidates.masked, candidates.step, candidates.decoded, candidates.order
        found["coming"] = policy.foresee(*seen)
    if traits_of(policy).renoises:
        found["kept"] = policy.keep(candidates)
    return found | (dict(policy.carry(candidates, chosen)) if carries_of(policy) else {})


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), block=st.sampled_from([1, 4, 13, 32]), b=st.integers(1, 5))
def test_settings_of_each_sequence_are_the_numbers_of_one(name: str, seed: int, block: int, b: int) -> None:
    rng = random.Random(seed)
    rules = [other(RULES[name], rng) for _ in range(b)]
    candidates = carrying(
        RULES[name], together([draw(rng, block, traits_of(RULES[name]).edits) for _ in range(b)]), rng
    )
    got = decided(with_settings(kind_of(rules[0]), stacked(rules)), candidates)
    for at, rule in enumerate(rules):
        alone = decided(rule, part(candidates, slice(at, at + 1)))
        for what, value in alone.items():
            assert got[what][at : at + 1].equal(value), (what, rule)


def test_what_each_rule_lets_a_request_set() -> None:
    found = {name: per_request(rule) for name, rule in RULES.items()}
    assert found == {
        **dict.fromkeys(("confidence_threshold", "fast_dllm"), ("threshold",)),
        **dict.fromkeys(("dynamic_threshold", "jetengine_dynamic", "dream_threshold"), ("threshold",)),
        **dict.fromkeys(("dynamic_steps", "dream_threshold_steps"), ("threshold", "steps")),
        "relative_threshold": ("threshold", "tolerance"),
        **dict.fromkeys(("fixed_steps", "llada", "llada_random"), ("steps",)),
        **dict.fromkeys(("sequential", "autoregressive", "self_speculation"), ()),
        "sub_blocks": ("threshold",),
        **dict.fromkeys(("factor", "dinfer_factor"), ("factor",)),
        "entropy_bounded": ("gamma",),
        "renoise": ("bound", "t_min", "t_max", "stability", "confidence", "steps"),
        **dict.fromkeys(("hierarchical", "hierarchical_fast_v2"), ("threshold", "low_threshold")),
        "hierarchical_remask": ("threshold", "low_threshold", "remask_threshold"),
        **dict.fromkeys(("dream", "dream_origin", "dream_topk_margin"), ("eps",)),
        "dream_steps": ("steps", "eps"),
        "dream_warm": ("steps", "eps", "alg_temp"),
        **dict.fromkeys(
            ("joint_threshold", "joint_threshold_indel"), ("threshold", "edit_threshold", "max_post_edit_steps")
        ),
    }
    assert per_request(PRESETS["dkv_greedy"]) == (), "how many columns it foresees is a shape"


@pytest.mark.parametrize("name", RULES)
def test_policies_of_one_kind_are_equal(name: str) -> None:
    rng, rule = random.Random(0), RULES[name]
    kind = kind_of(rule)
    for _ in range(3):
        one = replace(other(rule, rng), sampler=Sampler(top_k=rng.randint(1, 9)))
        assert kind_of(one) == kind == kind_of(kind)
        assert policy_key(kind_of(one)) == policy_key(kind)
        assert isinstance(kind, type(rule))
        assert replace(kind, **settings_of(one), sampler=one.sampler) == one
    assert replace(kind) == kind, "its values are valid"


def test_kinds_differ_in_what_is_fixed() -> None:
    kinds = [ConfidenceThreshold(0.5), ConfidenceThreshold(0.5, inclusive=True), DynamicThreshold(), Dream()]
    kinds += [DynamicThreshold(steps=3), Dream(alg_temp=0.5), Dream(alg="origin"), Sequential(3), Sequential(4)]
    assert len({policy_key(kind_of(kind)) for kind in kinds}) == len(kinds)


def test_settings_are_plain_numbers_of_the_fields_type() -> None:
    found = settings_of(ConfidenceThreshold(1))
    assert (found, type(found["threshold"])) == ({"threshold": 1.0}, float)
    assert settings_of(FixedSteps(2**70)) == {"steps": 2**63 - 1}
    assert settings_of(Sequential(3)) == {}


def test_a_sequence_that_is_not_there_divides_by_no_zero() -> None:
    candidates = together([draw(random.Random(1), 8)])
    for name, rule in RULES.items():
        zero = {key: torch.zeros(1, dtype=value.dtype) for key, value in stacked([rule]).items()}
        carried = carrying(rule, candidates, random.Random(1))
        assert with_settings(rule, zero).choose(carried).shape == (1, 8), name


def test_a_policy_of_ones_own_is_its_own_kind() -> None:
    class Plain:
        def choose(self, candidates: Candidates) -> Tensor:
            return candidates.committable

    @dataclass(frozen=True)
    class Derived(ConfidenceThreshold):
        """Its `choose` may read the threshold in another way."""

        name: ClassVar[str] = "derived"

    @dataclass(frozen=True)
    class Holds(ConfidenceThreshold):
        seen: list[int] = field(default_factory=list, compare=False)
        name: ClassVar[str] = "holds"
        per_request: ClassVar[tuple[str, ...]] = ("threshold",)

    script = Script(4, ((BlockStep((0, 1, 2, 3)),),))
    own: list[Policy] = [Plain(), Derived(0.5), Holds(0.5), script]
    for policy in own:
        kind = kind_of(policy)
        assert policy_key(kind) == policy_key(policy)
        assert settings_of(policy) == {}
        assert with_settings(policy, {}) is policy
    assert kind_of(Derived(0.5)) != kind_of(Derived(0.6))
    with pytest.raises(InputError, match=r"Derived: 'threshold' is no setting of each request's own; it has none\."):
        with_settings(Derived(0.5), {"threshold": torch.ones(1)})
    with pytest.raises(InputError, match=r"DynamicThreshold: 'steps' is no setting .*; those are threshold\."):
        with_settings(DynamicThreshold(), {"steps": torch.ones(1)})


@pytest.mark.parametrize(("wrong", "got"), [("treshold", "'treshold'"), ("inclusive", "'inclusive', annotated as")])
def test_a_setting_must_be_a_number(wrong: str, got: str) -> None:
    @dataclass(frozen=True)
    class Mistaken(ConfidenceThreshold):
        name: ClassVar[str] = "mistaken"
        per_request: ClassVar[tuple[str, ...]] = (wrong,)

    with pytest.raises(InputError, match=f"Mistaken: per_request names fields .* float or int, got {got}"):
        kind_of(Mistaken(0.5))


@pytest.mark.parametrize("name", RULES)
def test_what_was_compiled_serves_other_settings(name: str) -> None:
    rng, rule = random.Random(2), RULES[name]
    seen = carrying(rule, together([draw(rng, 8, traits_of(rule).edits) for _ in range(3)]), rng)
    first = stacked([other(rule, rng) for _ in range(3)])

    def function(confidence: Tensor, *values: Tensor) -> list[tuple[int, Tensor]]:
        own = with_settings(kind_of(rule), dict(zip(first, values, strict=True)))
        decisions = decided(own, replace(seen, confidence=confidence))
        return [(0, torch.cat([value.double().flatten() for value in decisions.values()]))]

    confidence = seen.confidence.clone()
    region = trace(function, [confidence, *first.values()])
    run = region.source.module()
    for _ in range(4):
        values = list(stacked([other(rule, rng) for _ in range(3)]).values())
        want = function(confidence, *values)[0][1]
        assert run(confidence, *values, *region.constants)[0].equal(want)


def test_the_factor_rule_counts_in_float64() -> None:
    """Its bounds, here 1/2, 2/3, ..., follow no default dtype; torch divides a number by whole numbers in that."""
    seen = together([plain([0.99, 0.665, 0.1, 0.1], 0)])
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert Factor(1.0, variant="dinfer").choose(seen).tolist() == [[True, False, False, False]]
    finally:
        torch.set_default_dtype(default)
