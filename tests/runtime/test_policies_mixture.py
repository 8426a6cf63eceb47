"""Sequences of one batch that decode by rules of several kinds."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgraph.errors import InputError
from dgraph.lowering.traced import trace
from dgraph.ops.statistics import KL
from dgraph.runtime.loop.batch_config import BatchConfig
from dgraph.runtime.loop.scripted_policy import BlockStep, Script
from dgraph.runtime.policies import (
    Candidates,
    Carried,
    ConfidenceThreshold,
    DecodeRule,
    Dream,
    FixedSteps,
    HierarchicalRemask,
    JointThreshold,
    Policy,
    PolicyMix,
    Sequential,
    Traits,
    carries_of,
    kind_of,
    needs_of,
    per_sequence,
    policy_key,
    row_of,
    settings_spec,
    statistics_of,
    steps_of,
    traits_of,
)
from dgraph.runtime.policies.mixture import Refusals, noting_none, refusing
from tests.runtime.formulas import draw, together
from tests.runtime.test_policies_settings import RULES, carrying, decided, other, part
from tests.runtime.test_statistics import Stable

BLOCK = 6
SCRIPT = Script(BLOCK, (tuple(BlockStep((c,)) for c in range(BLOCK)),))


class Plain:
    """Nothing but `choose`."""

    def choose(self, candidates: Candidates) -> Tensor:
        return candidates.committable


@dataclass(frozen=True)
class Paced(DecodeRule):
    """Waits for some steps of the sequence, which it counts; `foresee` reads a setting too."""

    pause: int = 1

    name: ClassVar[str] = "paced"
    traits: ClassVar[Traits] = Traits(may_wait=True, foresees=True)
    per_request: ClassVar[tuple[str, ...]] = ("pause",)

    @property
    def carries(self) -> tuple[Carried, ...]:
        return (Carried("calm", torch.int64, per="sequence", lasts="sequence"),)

    def choose(self, candidates: Candidates) -> Tensor:
        return candidates.committable & (candidates.carried["calm"] >= self.pause)[:, None]

    def carry(self, candidates: Candidates, chosen: Tensor) -> dict[str, Tensor]:
        return {"calm": candidates.carried["calm"] + 1}

    def foresee(self, masked: Tensor, step: Tensor, decoded: Tensor, order: Tensor) -> Tensor:
        return torch.where(masked, (step % steps_of(self.pause, 1))[:, None], -1)


OTHERS: dict[str, Any] = {"stable": Stable(), "plain": Plain(), "script": SCRIPT, "paced": Paced(2)}
OTHERS |= {"dkv_greedy": FixedSteps(3, remasking="random_order"), "sequential_steps": Sequential(2)}
EVERY = RULES | OTHERS


def request(name: str, rng: random.Random) -> Any:
    """A policy of that kind with settings of its own."""
    rule = EVERY[name]
    if name == "paced":
        return Paced(rng.randint(1, 4))
    return other(rule, rng) if isinstance(rule, DecodeRule) else rule


def mixed(mixture: PolicyMix, policies: list[Policy], rng: random.Random) -> Candidates:
    """Random candidates of sequences with these policies, as a runtime gives them; what is of other kinds is 0."""
    sequences = [draw(rng, BLOCK, traits_of(policy).edits) for policy in policies]
    rows = [row_of(mixture, policy) for policy in policies]
    settings = {
        name: torch.tensor([row.get(name, 0) for _, row in rows], dtype=dtype)
        for name, dtype in settings_spec(mixture.kinds).items()
    }
    candidates = together(sequences)
    more = {"kl": torch.rand(len(rows), BLOCK), "spread": torch.ones(len(rows), BLOCK)}
    return replace(
        carrying(mixture, candidates, rng),
        prompt=torch.arange(len(rows)),
        measured={**candidates.measured, **more},
        kind=torch.tensor([index for index, _ in rows]),
        settings=settings,
    )


def decided_by(mixture: PolicyMix, candidates: Candidates) -> dict[str, Tensor]:
    """All that a mixture says of a step, whether one of its kinds needs it or not."""
    chosen = mixture.choose(candidates)
    assert candidates.order is not None
    seen = candidates.masked, candidates.step, candidates.decoded, candidates.order
    return {
        "chosen": chosen,
        "settled": mixture.settled(candidates, chosen),
        "back": mixture.remask(candidates, chosen),
        **dict(zip(("said", "source"), mixture.move(candidates, chosen), strict=True)),
        "coming": mixture.foresee(*seen, kind=candidates.kind, settings=candidates.settings),
        **mixture.carry(candidates, chosen),
    }


def check(mixture: PolicyMix, policies: list[Policy], candidates: Candidates) -> None:
    """What the mixture says of each sequence is what its own policy says of it alone."""
    got = decided_by(mixture, candidates)
    for at, policy in enumerate(policies):
        index, _ = row_of(mixture, policy)
        mine = part(candidates, slice(at, at + 1))
        carried = {each.name: mine.carried[f"{index}.{each.name}"] for each in carries_of(policy)}
        alone = decided(policy, replace(mine, carried=carried, kind=None, settings={}))
        row = {name: value[at : at + 1] for name, value in got.items()}
        left = (mine.masked & ~alone["chosen"]).any(dim=1)
        assert row["chosen"].equal(alone["chosen"]), policy
        assert row["settled"].equal(alone.get("settled", ~left)), policy
        assert row["back"].equal(alone.get("back", torch.zeros_like(mine.masked))), policy
        column = torch.arange(BLOCK).expand_as(mine.token)
        assert row["said"].equal(alone.get("said", mine.token)), policy
        assert row["source"].equal(alone.get("source", column)), policy
        coming = alone.get("coming", torch.empty(1, 0, dtype=torch.int64))
        assert row["coming"][:, : coming.shape[1]].equal(coming), policy
        assert (row["coming"][:, coming.shape[1] :] == -1).all()
        for each in mixture.carries:
            own, _, name = each.name.partition(".")
            want = alone[name] if int(own) == index else mine.carried[each.name]
            assert row[each.name].equal(want), (policy, each)


@settings(max_examples=50, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(EVERY)), min_size=1, max_size=4, unique=True),
    b=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_each_sequence_gets_what_its_own_policy_gives_it_alone(names: list[str], b: int, seed: int) -> None:
    rng = random.Random(seed)
    mixture = PolicyMix.of([EVERY[name] for name in names])
    policies = [request(rng.choice(names), rng) for _ in range(b)]
    check(mixture, policies, mixed(mixture, policies, rng))


ASKED = [
    ("paced", "choose"),
    ("paced", "carry"),
    ("paced", "foresee"),
    ("joint_threshold", "settled"),
    ("hierarchical_remask", "remask"),
    ("joint_threshold_indel", "move"),
]


@pytest.mark.parametrize(("name", "method"), ASKED)
def test_a_kind_that_raised_is_asked_no_more(name: str, method: str) -> None:
    """Where that is noted; its sequences get nothing then, and the others what they get beside the sound kind."""
    rng, asked = random.Random(2), []
    rule, other = kind_of(EVERY[name]), EVERY["confidence_threshold"]

    def raises(*args: Any, **options: Any) -> None:
        asked.append(method)
        raise ArithmeticError(method)

    settings = {f.name: getattr(rule, f.name) for f in fields(rule)}
    sound, broken = (type("Own", (type(rule),), more)(**settings) for more in ({}, {method: raises}))
    mixture = PolicyMix.of([other, broken])
    candidates = mixed(mixture, [other, broken, other], rng)
    with pytest.raises(ArithmeticError):
        decided_by(mixture, candidates)
    with refusing(refusals := Refusals()):
        with noting_none() as noted, pytest.raises(ArithmeticError):
            decided_by(mixture, candidates)
        first, second = decided_by(mixture, candidates), decided_by(mixture, candidates)
        with noting_none() as noted_now:
            third = decided_by(mixture, candidates)
    assert (noted, noted_now) == (False, True)
    assert [(index, type(error)) for index, error in refusals.errors.items()] == [(1, ArithmeticError)]
    assert len(asked) == 3, "once in each way, until it was noted"
    want = decided_by(PolicyMix.of([other, sound]), candidates)
    for said in (first, second, third):
        assert all(value[[0, 2]].equal(want[key][[0, 2]]) for key, value in said.items() if key != "coming")
    nothing = {"chosen": False, "back": False, "said": candidates.token[1], "source": torch.arange(BLOCK)}
    wanted = {key: torch.as_tensor(value).expand(BLOCK) for key, value in nothing.items()}
    assert all(second[key][1].equal(value) for key, value in wanted.items())
    assert (second["coming"] == -1).all()
    assert all(second[key].equal(candidates.carried[key]) for key in candidates.carried if key.startswith("1."))


@pytest.mark.parametrize("name", EVERY)
def test_one_kind_alone_is_that_kind(name: str) -> None:
    rng, kind = random.Random(1), kind_of(EVERY[name])
    mixture = PolicyMix((kind,))
    for attribute in (traits_of, needs_of, statistics_of):
        assert attribute(mixture) == attribute(kind)
    assert [replace(each, name=each.name.removeprefix("0.")) for each in mixture.carries] == [*carries_of(kind)]
    policies = [request(name, rng) for _ in range(4)]
    candidates = mixed(mixture, policies, rng)
    check(mixture, policies, candidates)
    kind = candidates.kind
    without = decided_by(mixture, replace(candidates, kind=None))
    assert all(value.equal(without[name]) for name, value in decided_by(mixture, candidates).items())


def test_one_kind_alone_asks_for_no_kind() -> None:
    """Its trace has the operations of the rule with its settings, and no other."""
    candidates = together([draw(random.Random(3), BLOCK) for _ in range(2)])
    threshold, kind = torch.tensor([0.5, 0.75], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)

    def operations(policies: list[Policy]) -> list[str]:
        mixture = PolicyMix.of(policies)
        names = {name: threshold.to(dtype) for name, dtype in settings_spec(mixture.kinds).items()}
        given = replace(candidates, settings=names, kind=kind)
        function = lambda confidence: [(0, mixture.choose(replace(given, confidence=confidence)).float())]  # noqa: E731
        module: Any = trace(function, [candidates.confidence.clone()]).source.module()
        return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]

    one, two = operations([ConfidenceThreshold(0.5)]), operations([ConfidenceThreshold(0.5), Sequential()])
    # One `where` is `Candidates.offered`.
    assert one.count("aten.where.self") == 1
    assert two.count("aten.where.self") > 1


def test_what_differs_from_kind_to_kind() -> None:
    mixture = PolicyMix.of([ConfidenceThreshold(0.5), JointThreshold(), HierarchicalRemask(), Dream(), SCRIPT])
    sure, edits = Traits(holds_back=True), Traits(edits=True)
    want = (sure, edits, Traits(edits=True, remasks=True), Traits(may_wait=True), SCRIPT.traits)
    assert mixture.kind_traits == want
    assert SCRIPT.traits == Traits(overrules=True)
    assert mixture.traits == Traits(edits=True, remasks=True, may_wait=True, overrules=True, holds_back=True)
    kind = torch.tensor([4, 0, 3, 1, 2, 1])
    edited = per_sequence(lambda traits: traits.edits, mixture, kind)
    assert isinstance(edited, Tensor)
    assert (edited.dtype, edited.tolist()) == (torch.bool, [False, False, False, True, True, True])
    assert per_sequence(lambda traits: traits.drafts, mixture, kind) is False, "one bool for all"
    assert needs_of(mixture) == {"editable", "passes", "forwards", "entropy"}


def test_mixtures_of_equal_kinds_are_one_to_what_was_compiled() -> None:
    rng = random.Random(0)
    first, second = (PolicyMix.of([request(name, rng) for name in EVERY if name != "plain"]) for _ in range(2))
    assert policy_key(first) == policy_key(second)
    assert hash(policy_key(first)) == hash(policy_key(second))
    other = PolicyMix.of([*first.kinds, Plain()])
    assert policy_key(other) != policy_key(first)
    assert policy_key(PolicyMix((SCRIPT,))) != policy_key(PolicyMix((replace(SCRIPT),))), "it may hold state"
    assert policy_key(PolicyMix((Sequential(),))) != policy_key(Sequential())
    rules = [BatchConfig(mixture, "off", True, False, 0.0, 0) for mixture in (first, second)]
    assert rules[0].key == rules[1].key


def test_a_mixture_is_compiled_once_for_all_settings_and_kinds() -> None:
    rng = random.Random(4)
    names = ["confidence_threshold", "dream_warm", "joint_threshold", "hierarchical_remask", "paced", "stable", "llada"]
    mixture = PolicyMix.of([EVERY[name] for name in names])

    def drawn() -> Candidates:
        return mixed(mixture, [request(rng.choice(names), rng) for _ in range(4)], rng)

    first = drawn()
    assert first.kind is not None

    def function(kind: Tensor, *values: Tensor) -> list[tuple[int, Tensor]]:
        now = replace(first, kind=kind, settings=dict(zip(first.settings, values, strict=True)))
        return [(0, torch.cat([value.double().flatten() for value in decided_by(mixture, now).values()]))]

    region = trace(function, [first.kind, *first.settings.values()])
    run = region.source.module()
    for _ in range(8):
        now = drawn()
        assert now.kind is not None
        values = now.kind, *now.settings.values()
        assert run(*values, *region.constants)[0].equal(function(*values)[0][1])


def test_what_a_request_writes() -> None:
    mixture = PolicyMix.of([ConfidenceThreshold(0.5), FixedSteps(3), ConfidenceThreshold(0.9), Dream(), Sequential(2)])
    assert settings_spec(mixture.kinds) == {
        "0.threshold": torch.float64,
        "1.steps": torch.int64,
        "2.eps": torch.float64,
    }
    assert row_of(mixture, ConfidenceThreshold(0.7)) == (0, {"0.threshold": 0.7})
    assert row_of(mixture, FixedSteps(9)) == (1, {"1.steps": 9})
    assert row_of(mixture, Sequential(2)) == (3, {})
    with pytest.raises(InputError, match=r"got Sequential\(steps=3\), which is of another kind; make the batch with"):
        row_of(mixture, Sequential(3))


def test_what_a_mixture_refuses() -> None:
    with pytest.raises(InputError, match="PolicyMix: kinds holds at least one policy, got none"):
        PolicyMix(())
    with pytest.raises(InputError, match=r"FixedSteps\(.*\) is there twice; .* Use PolicyMix\.of"):
        PolicyMix((FixedSteps(3), FixedSteps(4)))
    with pytest.raises(InputError, match="two statistics are named 'kl'"):
        PolicyMix((Stable(top=0), Stable(top=64)))
    candidates = together([draw(random.Random(0), BLOCK)])
    with pytest.raises(InputError, match=r"candidates have the setting '0.threshold' of each sequence, got \[\]"):
        PolicyMix((ConfidenceThreshold(0.5),)).choose(candidates)
    with pytest.raises(InputError, match="candidates of 2 kinds of rule say each sequence's kind, got none"):
        PolicyMix((Sequential(), SCRIPT)).choose(candidates)


def test_a_statistic_is_asked_for_once() -> None:
    @dataclass(frozen=True)
    class ByName(ConfidenceThreshold):
        name: ClassVar[str] = "by_name"

        @property
        def needs(self) -> frozenset[Any]:
            return frozenset({"kl", "margin"})

    mixture = PolicyMix((ByName(0.5), Stable(top=KL().top)))
    assert needs_of(mixture) == {"kl", "spread", "margin"}
    assert [statistic.name for statistic in statistics_of(mixture)] == ["kl", "spread"]
