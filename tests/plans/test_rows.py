"""Row plans as values: what they accept, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError, UnknownName
from dgraph.plans.regions import REGIONS, All, Block, Next, Region, Response, Suffix, rows_of, seen_of
from dgraph.plans.rows import PARTS, RowCounts, RowPlan
from dgraph.plans.schedules import Apart, Counted, Either, FirstShare, Schedule
from dgraph.plans.view import View
from tests.plans.outside import Stride, Thirds

APART = RowPlan(Response(), Apart(5, 3))


KNOWN = {**PARTS, "Stride": Stride, "Thirds": Thirds}


def counted(plan: RowPlan, prompts: Sequence[int], new: int, step: int, shift: int = 0) -> list[int]:
    slots = list(range(len(prompts)))
    counts = RowCounts(plan, len(prompts), shift)
    counts.set(slots, prompts, [new] * len(prompts))
    for _ in range(step):
        counts.advance(slots)
    found = counts.of(slots)
    assert found is not None
    return found.tolist()


def test_a_plan_is_a_value() -> None:
    assert RowPlan() == RowPlan(All(), Counted(full_steps=1, every=0, warm_up=0, widen=0))
    assert hash(RowPlan(Block(before=2))) == hash(RowPlan(Block(before=2)))
    assert RowPlan(Block()) != RowPlan(Block(after=1))
    assert RowPlan(All()) != RowPlan(Response()), "no field differs, but the class does"
    with pytest.raises(FrozenInstanceError):
        RowPlan().region = Block()  # type: ignore[misc]


@pytest.mark.parametrize(
    "plan",
    [
        *(RowPlan(region()) for region in REGIONS.values()),
        RowPlan(Next(around=4)),
        RowPlan(Block(before=5, after=6), Counted(2, 3, 4, 5)),
        RowPlan(schedule=Counted(full_steps=0, warm_up=1)),
        APART,
        RowPlan(Block(lead=False), first="position"),
        RowPlan(schedule=FirstShare(0.2) | Counted(every=3)),
        RowPlan(Stride(3), Thirds() | Counted()),
    ],
    ids=str,
)
def test_json_says_all_of_a_plan(plan: RowPlan) -> None:
    assert RowPlan.from_json(json.loads(json.dumps(plan.to_json())), KNOWN) == plan


def test_json_that_nobody_can_read() -> None:
    value = RowPlan(Stride(3), Thirds()).to_json()
    assert value["region"] == {"name": "Stride", "version": 3, "stride": 3}
    with pytest.raises(UnknownName, match="unknown region 'Stride'"):
        RowPlan.from_json(value)
    with pytest.raises(UnknownName, match="unknown schedule 'Thirds'"):
        RowPlan.from_json({**value, "region": All().to_json()})
    with pytest.raises(InputError, match="region 'Stride' is of version 2, expected 3"):
        RowPlan.from_json({**value, "region": {**value["region"], "version": 2}}, KNOWN)
    with pytest.raises(UnknownName, match="unknown field of region 'Stride' 'strid'"):
        RowPlan.from_json({**value, "region": {"name": "Stride", "version": 3, "strid": 2}}, KNOWN)
    with pytest.raises(InputError, match="a region is an object with a name and fields"):
        RowPlan.from_json({**value, "region": "block"}, KNOWN)
    with pytest.raises(InputError, match=r"region must be a dgraph.plans.regions.Region, .* got Thirds"):
        RowPlan.from_json({**value, "region": Thirds().to_json()}, KNOWN)
    with pytest.raises(UnknownName, match="unknown field of a row plan 'every'"):
        RowPlan.from_json({**value, "every": 2}, KNOWN)


@pytest.mark.parametrize("name", ["full_steps", "every", "warm_up", "widen"])
@pytest.mark.parametrize("value", [-1, 1.0, "2", None, True])
def test_counts_are_integers(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"Counted: {name} must be an integer of at least 0, got {value!r}"):
        Counted(**{name: value})
    for region, field in ((Block, "before"), (Block, "after"), (Next, "around")):
        with pytest.raises(InputError, match=rf"{region.__name__}: {field} must be an integer of at least 0"):
            region(**{field: value})


def test_what_opens_a_block() -> None:
    with pytest.raises(UnknownName, match=r"unknown first commit of a block 'postion'\. Did you mean 'position'"):
        RowPlan(Block(), first="postion")
    with pytest.raises(InputError, match="first='position' commits another one"):
        RowPlan(Next(), first="position")
    with pytest.raises(InputError, match="Suffix: lead must be True or False, got 1"):
        Suffix(lead=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0, 1.5, -0.1, "half", True])
def test_a_share_is_one(share: Any) -> None:
    with pytest.raises(InputError, match=r"share must be a number in \(0, 1\]"):
        FirstShare(share)


@pytest.mark.parametrize(("region", "schedule"), [("block", Counted()), (Block, Counted()), (Counted(), Block())])
def test_what_is_no_region_or_schedule(region: Any, schedule: Any) -> None:
    with pytest.raises(InputError, match=r"region must be a dgraph.plans.regions.Region, such as Block\(\), got"):
        RowPlan(region, schedule)


def test_the_first_step_is_a_full_one() -> None:
    with pytest.raises(InputError, match="the first step of a response must be a full one"):
        Counted(full_steps=0)

    @dataclass(frozen=True)
    class Late(Schedule):
        def full(self, view: View) -> Tensor:
            return view.step == 1

    with pytest.raises(InputError, match=r"the first step of a response must be a full one; under .*Late.* it is not"):
        RowPlan(Block(), Late())
    assert RowPlan(Block(), Late() | Counted()).schedule == Either(Late(), Counted())


def test_steps_of_the_prompt_and_of_the_response_are_counted_apart() -> None:
    assert [int(counted(APART, [20], 8, step)[0]) for step in range(7)] == [28, 8, 8, 8, 8, 28, 8]
    # With shifted logits, the row before the response goes with it.
    assert [int(counted(APART, [20], 8, step, 1)[0]) for step in range(7)] == [28, 9, 9, 9, 9, 28, 9]


@pytest.mark.parametrize("intervals", [(5, 0), (0, 3), (0, 0)])
def test_they_are_counted_both(intervals: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="prompt_every and response_every must both be at least 1"):
        Apart(*intervals)


def test_a_view_says_what_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match="a view has no 'stpe'; it may know: step, "):
        _ = View(step=torch.zeros(1)).stpe  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Says(Region):
    """Whatever it is given."""

    what: Any = None

    def rows(self, view: View) -> Any:
        return self.what

    def seen(self, view: View) -> Any:
        return self.what


@pytest.mark.parametrize(
    ("what", "got"),
    [
        (torch.ones(6, dtype=torch.bool), r"torch\.bool \[6\]"),
        (torch.tensor(True), r"torch\.bool \[\]"),
        (torch.ones(2, 6), r"torch\.float32 \[2, 6\]"),
        (torch.ones(2, 5, dtype=torch.bool), r"torch\.bool \[2, 5\]"),
        (None, "None"),
    ],
)
def test_a_region_says_one_thing_of_each_position_of_each_sequence(what: Any, got: str) -> None:
    view = View(positions=torch.arange(6), prompt_end=torch.tensor([1, 2]), end=torch.tensor([5, 6]))
    assert rows_of(All(), view) is not None
    for method, asked in (("rows", rows_of), ("seen", seen_of)):
        with pytest.raises(InputError, match=rf"Says\.{method} returns a tensor torch\.bool \[2, 6\].*; got {got}"):
            asked(Says(what), view)
