"""Row plans as values: what they accept, and JSON."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from dgraph.errors import InputError, UnknownName
from dgraph.plans.rows import REGIONS, RowPlan

APART = RowPlan("response", full_steps=0, prompt_every=5, response_every=3)


def test_a_plan_is_a_value() -> None:
    assert RowPlan() == RowPlan("all", full_steps=1, every=0, warm_up=0, behind=0, ahead=0)
    assert hash(RowPlan("block", behind=2)) == hash(RowPlan("block", behind=2))
    assert RowPlan("block") != RowPlan("block", ahead=1)
    with pytest.raises(FrozenInstanceError):
        RowPlan().every = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "plan",
    [
        *map(RowPlan, REGIONS),
        RowPlan("next", window=4),
        RowPlan("block", 2, 3, 4, behind=5, ahead=6),
        RowPlan(full_steps=0, warm_up=1),
        RowPlan("block", first="position"),
        APART,
    ],
)
def test_json_says_all_of_a_plan(plan: RowPlan) -> None:
    assert RowPlan(**json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("name", ["full_steps", "every", "warm_up", "behind", "ahead", "window"])
@pytest.mark.parametrize("value", [-1, 1.0, "2", None, True])
def test_counts_are_integers(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{name} must be an integer of at least 0, got {value!r}"):
        RowPlan("block", **{name: value})


@pytest.mark.parametrize("region", ["blok", "", None, 3])
def test_an_unknown_region(region: Any) -> None:
    with pytest.raises(UnknownName, match="unknown region") as caught:
        RowPlan(region)
    assert ("Did you mean 'block'" in str(caught.value)) == (region == "blok")


@pytest.mark.parametrize("region", [r for r in REGIONS if r != "block"])
@pytest.mark.parametrize("side", ["behind", "ahead"])
def test_only_a_block_has_a_vicinity(region: str, side: str) -> None:
    with pytest.raises(InputError, match=rf"behind and ahead widen the region 'block', not '{region}'"):
        RowPlan(region, **{side: 1})


def test_only_what_comes_next_has_a_window() -> None:
    for region in REGIONS:
        if region == "next":
            assert RowPlan(region, window=3).window == 3
            continue
        with pytest.raises(InputError, match=rf"window widens the region 'next', not '{region}'; leave it at 0"):
            RowPlan(region, window=1)


def test_what_a_block_begins_with() -> None:
    with pytest.raises(UnknownName, match=r"unknown first commit of a block 'postion'\. Did you mean 'position'"):
        RowPlan("block", first="postion")
    with pytest.raises(InputError, match="first='position' commits another one"):
        RowPlan("next", first="position")


def test_the_first_step_is_a_full_one() -> None:
    with pytest.raises(InputError, match="the first step of a response must be a full one"):
        RowPlan(full_steps=0)


def test_steps_of_the_prompt_and_of_the_response_are_counted_apart() -> None:
    assert [APART.rows_of(step, 20, 8, 0) for step in range(7)] == [28, 8, 8, 8, 8, 28, 8]
    # With shifted logits, the row in front of the response goes with it.
    assert [APART.rows_of(step, 20, 8, 1) for step in range(7)] == [28, 9, 9, 9, 9, 28, 9]


@pytest.mark.parametrize("alone", ["prompt_every", "response_every"])
def test_they_are_counted_both_or_neither(alone: str) -> None:
    with pytest.raises(InputError, match="prompt_every and response_every go together"):
        RowPlan("response", full_steps=0, **{alone: 2})


@pytest.mark.parametrize(
    "beside", [{"region": "all"}, {"full_steps": 1}, {"every": 2}, {"warm_up": 1}, {"widen": 4}], ids=str
)
def test_they_say_all_of_when_rows_are_recomputed(beside: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"region": "response", "full_steps": 0, "prompt_every": 5, "response_every": 3}
    with pytest.raises(InputError, match="say all of when rows are recomputed"):
        RowPlan(**(fields | beside))
