"""KV plans as values: what they accept, how many entries they ask for, and JSON."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from dgraph.errors import InputError, UnknownName
from dgraph.plans.kv import WINDOWS, KVPlan, check_budget


def test_a_plan_is_a_value() -> None:
    plan = KVPlan("block", delay=1, every=4, ratio=0.5)
    assert hash(plan) == hash(KVPlan("block", 1, 4, 0.5))
    assert plan != KVPlan("block", delay=1, every=4, ratio=0.4)
    assert KVPlan(ratio=1).window == "response"
    with pytest.raises(FrozenInstanceError):
        plan.delay = 2  # type: ignore[misc]


def test_keys_that_later_blocks_choose_from_stay_in_their_pages() -> None:
    for window, kept in (("block", "pages"), ("response", "packed")):
        plan = KVPlan(window, ratio=0.5)
        assert (plan.kept, plan.of_later_blocks.kept) == ("packed", kept)
        assert replace(plan.of_later_blocks, kept="packed") == plan
    with pytest.raises(UnknownName, match=r"unknown place of kept keys 'page'\. Did you mean 'pages'"):
        KVPlan("block", ratio=0.5, kept="page")


def test_only_a_response_gets_new_values() -> None:
    assert {window: KVPlan(window, ratio=0.5).repacks for window in WINDOWS} == {"block": False, "response": True}


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        (KVPlan(ratio=0.5), [(0, 10, 3, 15), (1, 11, 2, 10), (0, 1, 4, 0), (2, 0, 4, 0)]),
        (KVPlan(ratio=1.0), [(0, 7, 2, 14)]),
        (KVPlan(pairs=(4,)), [(0, 10, 3, 12), (9, 10, 3, 12), (0, 3, 2, 6), (0, 0, 2, 0)]),
        (KVPlan(pairs=(4, 0, 9)), [(0, 10, 1, 4), (1, 10, 1, 0), (2, 10, 1, 9), (2, 5, 2, 10)]),
    ],
    ids=str,
)
def test_entries(plan: KVPlan, wanted: list[tuple[int, int, int, int]]) -> None:
    """By layer, candidates and KV heads: rounded down per head, and never more than there are."""
    for layer, candidates, heads, entries in wanted:
        assert plan.entries(layer, candidates, heads) == entries


def test_where_the_window_of_a_response_begins() -> None:
    """Where blocks begin at multiples, with the one that the prompt ends in; else where it ends."""
    assert [KVPlan(ratio=0.5).kept_from(n, 4) for n in (3, 4, 7)] == [0, 4, 4]
    assert KVPlan(ratio=0.5).kept_from(7, 1) == 7
    assert KVPlan("block", ratio=0.5).kept_from(7, 4) == 0


def test_heads_of_a_rank_may_use_the_budgets_of_others() -> None:
    """Of those of all heads as much as their own candidates."""
    plan = KVPlan(pairs=(4,))
    assert [plan.entries(0, n, 2, budgets=8) for n in (3, 10, 16, 40)] == [6, 20, 32, 32]
    assert plan.entries(0, 10, 2, budgets=2) == plan.entries(0, 10, 2)


@pytest.mark.parametrize(
    "plan",
    [KVPlan(ratio=0.25), KVPlan("block", 2, 3, 1.0), KVPlan(pairs=(3,)), KVPlan(pairs=(3, 0, 5), kept="pages")],
    ids=str,
)
def test_json_says_all_of_a_plan(plan: KVPlan) -> None:
    assert KVPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_json_with_an_unknown_field() -> None:
    with pytest.raises(UnknownName, match=r"unknown field of a KV plan 'rati'. Did you mean 'ratio'"):
        KVPlan.from_json({"rati": 0.5})
    with pytest.raises(InputError, match="give either ratio"):
        KVPlan.from_json({"window": "block"})


@pytest.mark.parametrize("window", ["blok", "", None, 3])
def test_an_unknown_window(window: Any) -> None:
    with pytest.raises(UnknownName, match="unknown window") as caught:
        KVPlan(window, ratio=0.5)
    assert ("Did you mean 'block'" in str(caught.value)) == (window == "blok")


@pytest.mark.parametrize("name", ["delay", "every"])
def test_steps_are_of_a_block(name: str) -> None:
    for value in (-1, 1.0, "2", None, True):
        with pytest.raises(InputError, match=rf"{name} must be an integer of at least 0, got {value!r}"):
            KVPlan("block", ratio=0.5, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"{name} counts steps of a block; with the window 'response' leave it at 0"):
        KVPlan("response", ratio=0.5, **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "pairs", "message"),
    [
        (-0.1, (), r"ratio must be a number in \(0, 1\], or 0 if pairs says how many, got -0\.1"),
        (1.01, (), r"ratio must be a number"),
        (float("nan"), (), r"ratio must be a number"),
        (True, (), r"ratio must be a number"),
        ("half", (), r"ratio must be a number"),
        (0.0, [3], r"pairs must be a tuple of integers of at least 0, one or one for each layer, got \[3\]"),
        (0.0, (3, -1), r"pairs must be a tuple"),
        (0.0, (True,), r"pairs must be a tuple"),
        (0.0, (), r"give either ratio \(a share of the candidates\) or pairs \(a number of them\), got 0\.0 and \(\)"),
        (0.5, (3,), r"give either ratio .* got 0\.5 and \(3,\)"),
    ],
)
def test_budgets(ratio: Any, pairs: Any, message: str) -> None:
    for call in (check_budget, lambda ratio, pairs: KVPlan(ratio=ratio, pairs=pairs)):
        with pytest.raises(InputError, match=message):
            call(ratio, pairs)
    check_budget(1, ())
    check_budget(0, (0,))
