"""What the host says of rows ahead, from the formulas that the device computes with, is what the device does."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgraph.plans.regions import All, Block, Next, Response, Suffix
from dgraph.plans.rows import RowCounts, RowPlan
from dgraph.plans.schedules import Apart, Counted, Either, FirstShare
from dgraph.plans.view import View
from dgraph.runtime.policies import Sequential
from dgraph.runtime.state.bidirectional import BidirectionalState
from dgraph.runtime.state.packed_rows import RowResults
from dgraph.runtime.state.state_init import StateInit
from tests.plans.outside import Stride, Thirds
from tests.runtime.fake import summary

MASK, BLOCK = 99, 4
COUNTED = st.builds(
    Counted,
    full_steps=st.integers(0, 2),
    every=st.integers(0, 3),
    warm_up=st.integers(1, 3),
    widen=st.integers(0, 4),
)
SCHEDULES = st.one_of(
    COUNTED,
    st.builds(Apart, st.integers(1, 5), st.integers(1, 5)),
    st.builds(FirstShare, st.sampled_from([0.1, 0.25, 0.5, 1.0])),
    st.just(Thirds()),
    st.builds(Either, COUNTED, st.builds(Apart, st.integers(2, 5), st.integers(1, 5))),
)
PLACES = st.one_of(
    st.sampled_from([All(), Response(), Suffix(), Suffix(lead=False), Stride(2), Stride(3)]),
    st.builds(Block, st.integers(0, 3), st.integers(0, 3), st.booleans()),
    st.builds(Next, st.integers(0, 2)),
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    plan=st.builds(RowPlan, PLACES, SCHEDULES),
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    new=st.integers(3, 11),
    shift=st.integers(0, 1),
)
def test_the_host_counts_as_the_device_does(plan: RowPlan, prompts: list[int], new: int, shift: int) -> None:
    """Steps that decode one token of every sequence, from the left."""
    canvas = torch.full((len(prompts), max(prompts) + new + BLOCK), MASK)
    for row, length in zip(canvas, prompts, strict=True):
        row[:length] = torch.arange(length)
    state = BidirectionalState.begin(
        StateInit(
            canvas,
            torch.arange(len(prompts)),
            torch.tensor(prompts),
            max_new_tokens=new,
            block=BLOCK,
            mask_id=MASK,
            stop_ids=torch.tensor([50]),
            plan=plan,
            shift=shift,
        )
    )
    slots = list(range(len(prompts)))
    counts = RowCounts(plan, len(prompts), shift)
    counts.set(slots, prompts, [new] * len(prompts))
    for _ in range(new):
        rows = state.rows(int(summary(state)[0]))
        live = rows.cu_rows.diff().tolist()
        known, whole = counts.of(slots), counts.whole(slots)
        assert known is None or known.tolist() == live
        if whole is not None and not plan.region.hides:
            assert whole.tolist() == state.whole.tolist()
        if isinstance(plan.region, All):
            assert known is not None, "whatever the schedule"
        elif isinstance(plan.region, Response) and isinstance(plan.schedule, Apart | Thirds):
            assert known is not None, "steps are all that it counts"
        token, confidence = torch.where(rows.candidate, 7, -1), torch.where(rows.candidate, 0.5, -torch.inf)
        results = RowResults(token, confidence, rows.live)
        state.apply(rows, results, Sequential(BLOCK), "off", True)
        counts.advance(slots)
    assert not bool(state.active.any())


@given(warm_up=st.integers(1, 9), new=st.integers(4, 40))
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_a_share_of_the_tokens_is_one_of_the_steps(warm_up: int, new: int) -> None:
    """Where a step decodes one token."""
    steps = torch.arange(new)
    view = View(step=steps, decoded=steps, prompt_end=torch.ones_like(steps), end=torch.full_like(steps, new + 1))
    share, counted = FirstShare(min(1.0, warm_up / new)), Counted(full_steps=0, warm_up=warm_up)
    assert torch.equal(share.full(view), counted.full(view))
