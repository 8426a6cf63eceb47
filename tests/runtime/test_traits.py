"""Traits of decoding rules, and rules that declare them as separate attributes, as they did before `Traits`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor

import dgraph.runtime.policies as policies
from dgraph.errors import DgraphWarning
from dgraph.runtime.policies import (
    PRESETS,
    Candidates,
    ConfidenceThreshold,
    DecodeRule,
    FixedSteps,
    JointThreshold,
    PolicyMix,
    Traits,
    traits_of,
)


class Plain:
    """A policy that is no rule."""

    def choose(self, candidates: Candidates) -> Tensor:
        return candidates.committable


def test_a_policy_has_no_traits_unless_it_declares_some() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert traits_of(Plain()) == traits_of(DecodeRule()) == traits_of(FixedSteps(2)) == Traits()
        assert traits_of(ConfidenceThreshold(0.5)) == Traits(holds_back=True)
        assert traits_of(JointThreshold()) == Traits(edits=True)
        assert traits_of(FixedSteps(2, remasking="random_order")) == Traits(foresees=True)
        assert all(traits_of(rule) == rule.traits for rule in PRESETS.values())


def test_a_union_has_what_any_has() -> None:
    assert Traits.union([]) == Traits()
    assert Traits.union([Traits(edits=True), Traits(), Traits(edits=True, moves=True)]) == Traits(
        edits=True, moves=True
    )


def test_separate_attributes_count_with_one_warning_a_class() -> None:
    @dataclass(frozen=True)
    class Waits(JointThreshold):
        wait: bool = True

        may_wait: ClassVar[bool] = True

        @property
        def foresees(self) -> bool:
            return self.wait

    told = r"Waits: may_wait and foresees as class attributes .* traits: ClassVar\[Traits\] = Traits\(may_wait=..., "
    with pytest.warns(DgraphWarning, match=told):
        assert traits_of(Waits()) == Traits(edits=True, may_wait=True, foresees=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert traits_of(Waits(wait=False)) == Traits(edits=True, may_wait=True)
        assert PolicyMix((Waits(), Plain())).kind_traits == (traits_of(Waits()), Traits())


def test_a_policy_that_is_no_rule_may_have_them_too() -> None:
    class Overrules(Plain):
        overrules = True

    with pytest.warns(DgraphWarning, match="Overrules: overrules as class attributes"):
        assert traits_of(Overrules()) == Traits(overrules=True)


def test_functions_of_single_traits_go_with_a_warning() -> None:
    old: Any = policies
    with pytest.warns(DgraphWarning, match=r"policies\.edits is traits_of\(policy\)\.edits since"):
        edits = old.edits
    assert edits(JointThreshold())
    with pytest.warns(DgraphWarning, match="Mixture is PolicyMix since"):
        assert old.Mixture is PolicyMix
    assert not edits(Plain())
    with pytest.raises(AttributeError, match="has no attribute 'edit'"):
        _ = old.edit
