"""Decode policies on hand-made confidences, and against sorting in Python."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError, UnknownName
from dgraph.ops.statistics import ENTROPY, MARGIN
from dgraph.runtime.policies import (
    POLICIES,
    PRESETS,
    Candidates,
    ConfidenceThreshold,
    DecodeRule,
    Dream,
    EntropyBounded,
    FixedSteps,
    HierarchicalRemask,
    JointThreshold,
    check_needs,
    needs_of,
    options_of,
    policy_of,
    traits_of,
)
from dgraph.runtime.state.packed_rows import StepRows, row_results

NONE = -torch.inf
REQUIRED = {"confidence_threshold": {"threshold": 0.7}, "fixed_steps": {"steps": 3}}


def offer(confidence: Tensor, step: Tensor | None = None) -> Candidates:
    """Candidates of that confidence; tokens are their columns."""
    b, block = confidence.shape
    zeros = torch.zeros(b, dtype=torch.int64)
    token = torch.arange(block).expand(b, block)
    return Candidates(
        token=token,
        confidence=confidence,
        masked=confidence > NONE,
        current=torch.zeros_like(token),
        step=zeros if step is None else step,
        decoded=zeros,
        start=zeros,
        prompt=torch.arange(b),
    )


def test_threshold_is_strict_and_takes_at_least_one() -> None:
    confidence = torch.tensor([[0.5, 0.75, 0.25, NONE], [0.5, 0.5, 0.25, NONE], [NONE, NONE, NONE, NONE]])
    chosen = ConfidenceThreshold(0.5).choose(offer(confidence))
    assert chosen.tolist() == [[False, True, False, False], [True, False, False, False], [False] * 4]
    sure = torch.tensor([[1.0, 1.0]])
    assert ConfidenceThreshold(1.0).choose(offer(sure)).tolist() == [[True, False]]
    assert ConfidenceThreshold(1).choose(offer(sure)).tolist() == [[True, False]]


def test_fixed_steps_spread_the_remainder_over_the_first_steps() -> None:
    confidence = torch.tensor([[0.1, 0.4, 0.3, 0.2, 0.4, 0.1, NONE, 0.0]]).expand(4, 8)
    chosen = FixedSteps(3).choose(offer(confidence, torch.tensor([0, 1, 2, 9])))
    assert chosen.sum(1).tolist() == [3, 3, 2, 2]
    assert chosen[0].nonzero()[:, 0].tolist() == [1, 2, 4]
    assert chosen[2].nonzero()[:, 0].tolist() == [1, 4]
    many = FixedSteps(20).choose(offer(confidence, torch.tensor([0, 7, 8, 30])))
    assert many.sum(1).tolist() == [1, 1, 1, 1]
    assert many[0].nonzero()[:, 0].tolist() == [1]  # ties: lower position
    few = torch.tensor([[NONE, 0.2, NONE, NONE]])
    assert FixedSteps(1).choose(offer(few)).tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("block", [4, 8, 32])
def test_policies_choose_what_sorting_chooses(block: int) -> None:
    rng = random.Random(block)
    for _ in range(50):
        values = [[rng.choice([NONE, rng.randint(1, 8) / 8]) for _ in range(block)] for _ in range(rng.randint(1, 4))]
        steps = [rng.randrange(block) for _ in values]
        threshold, count = rng.randint(1, 8) / 8, rng.randint(1, block + 3)
        confidence, step = torch.tensor(values), torch.tensor(steps)
        by_threshold = ConfidenceThreshold(threshold).choose(offer(confidence, step))
        by_count = FixedSteps(count).choose(offer(confidence, step))
        for row, at, first, second in zip(values, steps, by_threshold, by_count, strict=True):
            order = sorted((i for i, v in enumerate(row) if v > NONE), key=lambda i: (-row[i], i))
            above = [i for i in order if row[i] > threshold] or order[:1]
            assert first.nonzero()[:, 0].tolist() == sorted(above)
            n = max(1, block // count + (at < block % count))
            assert second.nonzero()[:, 0].tolist() == sorted(order[:n])


@pytest.mark.parametrize("value", [0, -0.1, 1.01, float("nan"), True, "0.9", None])
def test_threshold_bounds(value: object) -> None:
    with pytest.raises(InputError, match=r"threshold is a probability in \(0, 1\], got"):
        ConfidenceThreshold(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -3, 2.5, True, None])
def test_step_bounds(value: object) -> None:
    with pytest.raises(InputError, match="denoising steps per block, at least 1, got"):
        FixedSteps(value)  # type: ignore[arg-type]


def test_policies_are_values() -> None:
    assert ConfidenceThreshold(0.9) == ConfidenceThreshold(0.9)
    assert repr(FixedSteps(4)) == "FixedSteps(steps=4, schedule='block', remasking='low_confidence')"
    assert len({FixedSteps(4), FixedSteps(4), ConfidenceThreshold(0.9)}) == 2


EVERY = [*PRESETS.values(), *(policy_of(name, **REQUIRED.get(name, {})) for name in POLICIES)]


@pytest.mark.parametrize("policy", EVERY, ids=repr)
def test_a_policy_comes_back_from_json(policy: DecodeRule) -> None:
    value = json.loads(json.dumps(policy.to_json()))
    assert policy_of(**value) == policy
    assert POLICIES[value["rule"]] is type(policy)
    assert set(value) - {"sampler"} == {"rule", *options_of(value["rule"])}


def test_a_rule_without_a_name_has_no_form_in_json() -> None:
    class Mine(DecodeRule):
        pass

    with pytest.raises(InputError, match="Mine has no name, so no form in JSON"):
        Mine().to_json()


def test_what_a_rule_works_out_for_itself_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Twice(ConfidenceThreshold):
        name = "twice"
        squared: float = field(init=False, default=0.0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "squared", self.threshold**2)

    monkeypatch.setitem(POLICIES.own, "twice", Twice)
    made = policy_of("twice", threshold=0.5)
    assert (options_of("twice").keys(), made.squared) == ({"threshold", "inclusive"}, 0.25)
    assert made.to_json() == {"rule": "twice", "threshold": 0.5, "inclusive": made.inclusive}
    assert policy_of(**made.to_json()) == made


@pytest.mark.parametrize("policy", EVERY, ids=repr)
def test_every_docstring_says_what_is_done_and_after_whom(policy: DecodeRule) -> None:
    text = type(policy).__doc__ or ""
    assert re.search("SDAR|LLaDA|Dream|dInfer|Fast-dLLM|Nemotron|DiffusionGemma", text)


def test_policies_by_name() -> None:
    assert policy_of("fixed_steps", steps=4) == policy_of("fixed_steps", 4) == FixedSteps(4)
    assert policy_of("llada", steps=8) == FixedSteps(8, schedule="masks")
    assert policy_of("fast_dllm", threshold=0.8) == ConfidenceThreshold(0.8, inclusive=True)
    assert options_of("fixed_steps") == {"steps": None, "schedule": "block", "remasking": "low_confidence"}
    assert options_of("llada2.0")["threshold"] == 0.95
    assert set(POLICIES).isdisjoint(PRESETS)


def test_the_short_form() -> None:
    assert policy_of() == policy_of(None, None) == ConfidenceThreshold(0.9)
    assert policy_of(0.8) == ConfidenceThreshold(0.8)
    assert policy_of(None, 3) == policy_of(steps=3) == FixedSteps(3)
    with pytest.raises(InputError, match=r"either threshold \(0.8\) or steps \(3\), not both"):
        policy_of(0.8, 3)
    with pytest.raises(InputError, match="option 'gamma' belongs to a named rule"):
        policy_of(0.8, gamma=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fast_dlm", {}, "unknown decode policy 'fast_dlm'. Did you mean 'fast_dllm'"),
        ("dream", {"algo": "origin"}, "unknown option of decode policy 'dream' 'algo'. Did you mean 'alg'"),
        ("llada2.0", {"treshold": 0.5}, "unknown option of decode policy 'llada2.0' 'treshold'. Did you mean 'thre"),
        ("confidence_threshold", {}, "ConfidenceThreshold: threshold must be given, got none"),
        ("fixed_steps", {}, "FixedSteps: steps must be given, got none"),
        ("fixed_steps", {"steps": 0}, "FixedSteps: steps is a number of denoising steps per block, at least 1, got 0"),
        ("fixed_steps", {"steps": 2, "schedule": "x"}, "FixedSteps: schedule is one of block, masks, got 'x'"),
        (
            "fixed_steps",
            {"steps": 2, "remasking": 1},
            "remasking is one of low_confidence, random, random_order, got 1",
        ),
        ("confidence_threshold", {"threshold": 0.5, "inclusive": 1}, "inclusive is true or false, got 1"),
        ("dynamic_threshold", {"threshold": 0}, r"DynamicThreshold: threshold is a probability in (0, 1], got 0"),
        ("dynamic_threshold", {"steps": 2.0}, "per block, at least 1, or None for the block length, got 2.0"),
        ("dynamic_threshold", {"fallback": "best"}, "fallback is one of top, leftmost, got 'best'"),
        ("dynamic_threshold", {"inclusive": None}, "inclusive is true or false, got None"),
        ("relative_threshold", {"threshold": 2}, "RelativeThreshold: threshold is a probability in (0, 1], got 2"),
        ("relative_threshold", {"tolerance": -1e-9}, "tolerance is a difference of probabilities in [0, 1], got -1e"),
        ("sequential", {"steps": True}, "Sequential: steps is a number of denoising steps per block, at least 1"),
        ("factor", {"factor": 0}, "Factor: factor is a finite number above 0, got 0. Fast-dLLM's setting is 1."),
        ("factor", {"factor": math.inf}, "Factor: factor is a finite number above 0, got inf"),
        ("factor", {"variant": "x"}, "Factor: variant is one of paper, dinfer, got 'x'"),
        (
            "entropy_bounded",
            {"gamma": math.nan},
            "EntropyBounded: gamma is a finite number of nats, at least 0, got nan",
        ),
        ("hierarchical", {"threshold": "1"}, "Hierarchical: threshold is a probability in (0, 1], got '1'"),
        ("hierarchical", {"low_threshold": -1}, "Hierarchical: low_threshold is a probability in [0, 1], got -1"),
        ("hierarchical", {"fast_v2": 0}, "Hierarchical: fast_v2 is true or false, got 0"),
        (
            "hierarchical_remask",
            {"threshold": 0},
            "HierarchicalRemask: threshold is a probability in (0, 1], got 0",
        ),
        ("hierarchical_remask", {"low_threshold": 2}, "low_threshold is a probability in [0, 1], got 2"),
        ("hierarchical_remask", {"remask_threshold": -1}, "got -1. 0 masks nothing again."),
        ("dream", {"alg": "margin"}, "Dream: alg is one of origin, maskgit_plus, topk_margin, entropy, got 'margin'"),
        ("dream", {"alg_temp": -1}, "Dream: alg_temp is a finite temperature, at least 0, or None, got -1"),
        ("dream", {"eps": 0}, "Dream: eps is the last timestep, in (0, 1), got 0"),
        ("dream", {"eps": 1}, "Dream: eps is the last timestep, in (0, 1), got 1"),
        ("dream", {"steps": 0}, "Dream: steps is a number of denoising steps per block"),
        ("dream_threshold", {"threshold": None}, "DreamThreshold: threshold is a probability in (0, 1], got None"),
        ("dream_threshold", {"steps": -1}, "DreamThreshold: steps is a number of denoising steps per block"),
        ("joint_threshold", {"threshold": 0}, "JointThreshold: threshold is a probability in (0, 1], got 0"),
        ("joint_threshold", {"edit_threshold": 1.5}, "JointThreshold: edit_threshold is a probability in [0, 1], got"),
        ("joint_threshold", {"max_post_edit_steps": -1}, "max_post_edit_steps is a number of passes, at least 0, got"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises((InputError, UnknownName)) as raised:
        policy_of(name, **options)  # type: ignore[arg-type]
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("policy", "missing"),
    [
        (EntropyBounded(), {"entropy"}),
        (FixedSteps(4, remasking="random"), {"noise"}),
        (FixedSteps(4, remasking="random_order"), {"order"}),
        (Dream(alg="topk_margin"), {"forwards", "margin"}),
        (Dream(alg="entropy", alg_temp=0.5), {"forwards", "entropy", "noise"}),
        (Dream(alg="maskgit_plus"), {"forwards"}),
        (Dream(alg="origin"), {"forwards", "noise"}),
        (JointThreshold(), {"editable", "passes"}),
        (HierarchicalRemask(), {"editable"}),
    ],
    ids=lambda value: repr(value) if isinstance(value, DecodeRule) else ",".join(sorted(value)),
)
def test_a_rule_says_what_it_misses(policy: DecodeRule, missing: set[str]) -> None:
    assert needs_of(policy) == missing
    with pytest.raises(InputError, match=f"{type(policy).__name__}: needs ({'|'.join(missing)}), got none"):
        policy.choose(offer(torch.rand(2, 4)))
    with pytest.raises(InputError, match=f"{type(policy).__name__}: needs {min(missing)}, got none; it takes"):
        check_needs(policy, ())
    check_needs(policy, missing)


def test_a_policy_of_ones_own_needs_only_choose() -> None:
    class All:
        def choose(self, candidates: Candidates) -> Tensor:
            return candidates.committable

    assert not traits_of(All()).edits
    assert not traits_of(All()).may_wait
    check_needs(All(), ())
    assert traits_of(Dream()).may_wait
    assert traits_of(JointThreshold()).edits
    assert not traits_of(All()).remasks
    assert [p.name for p in EVERY if traits_of(p).remasks] == ["hierarchical_remask"]
    assert {p.name for p in EVERY if traits_of(p).edits} == {
        "joint_threshold",
        "joint_threshold_indel",
        "hierarchical_remask",
    }
    assert {p.name for p in EVERY if traits_of(p).moves} == {"joint_threshold_indel"}
    assert {p.name for p in EVERY if traits_of(p).may_wait} == {"dream", "renoise", "self_speculation"}


def test_program_outputs_come_back_with_margin_and_entropy() -> None:
    flags = torch.tensor([True, False, True, True])
    zeros = torch.zeros(4, dtype=torch.int64)
    rows = StepRows(zeros, zeros, zeros, zeros, zeros.int(), ~flags, flags, torch.tensor([0, 4]).int())
    token, kept = torch.tensor([7, 8, 9, -1]), torch.tensor([1, 2, 3, -1])
    value = torch.tensor([0.5, 0.25, 0.75, 0.0])
    got = row_results(rows, token, value, kept, {MARGIN: value, ENTROPY: value})
    assert got.confidence.tolist() == [NONE, NONE, 0.25, 0.75]
    assert got.measured["margin"].tolist() == [NONE, NONE, 0.25, 0.75]
    assert got.measured["entropy"].tolist() == [math.inf, math.inf, 0.25, 0.75]
    every = row_results(replace(rows, candidate=torch.ones(4).bool()), token, value, kept)
    assert every.confidence.tolist() == [NONE, 0.5, 0.25, 0.75]  # row 0 was evicted
    assert not every.measured
