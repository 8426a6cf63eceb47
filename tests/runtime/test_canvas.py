"""Transitions of the canvas on cases small enough to write down."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.plans.regions import All, Block, Next, Suffix
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.runtime import BlockSession, ConfidenceThreshold, FixedSteps
from dgraph.runtime.policies import DecodeRule, Dream, JointThreshold, Sequential, Traits, policy_of
from dgraph.runtime.state.bidirectional import BidirectionalState
from dgraph.runtime.state.packed_rows import RowResults
from dgraph.runtime.state.state_init import StateInit
from tests.runtime.fake import FakeProgram, fake_spec, summary

MASK, STOP, NONE = 99, 50, -torch.inf
DUAL = RowPlan(Block())


def begin(
    prompts: list[list[int]], new: int, plan: RowPlan = DUAL, block: int = 4, shift: int = 0
) -> BidirectionalState:
    width = max(map(len, prompts)) + new + block
    canvas = torch.full((len(prompts), width), MASK)
    for row, prompt in zip(canvas, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return BidirectionalState.begin(
        StateInit(
            canvas,
            torch.arange(len(prompts)),
            torch.tensor([len(p) for p in prompts]),
            max_new_tokens=new,
            block=block,
            mask_id=MASK,
            stop_ids=torch.tensor([STOP]),
            plan=plan,
            shift=shift,
        )
    )


class Coming(ConfidenceThreshold):
    """Says that a column comes next."""

    traits: ClassVar[Traits] = Traits(foresees=True)

    def __init__(self, column: int):
        super().__init__(0.5)
        object.__setattr__(self, "column", column)

    def foresee(self, masked: Tensor, step: Tensor, decoded: Tensor, order: Tensor) -> Tensor:
        return torch.tensor([[self.column, -1]])


def step(
    state: BidirectionalState,
    decode: dict[tuple[int, int], int],
    cache: Any = "off",
    policy: ConfidenceThreshold = ConfidenceThreshold(0.5),  # noqa: B008
) -> Tensor:
    """One step that decodes (sequence, position) -> token and offers nothing else."""
    rows = state.rows(summary(state)[0])
    token, confidence = torch.full_like(rows.positions, -1), torch.full(rows.positions.shape, NONE)
    for (sequence, position), value in decode.items():
        at = (rows.sequence == sequence) & (rows.positions == position - state.shift)
        assert at.sum() == 1
        assert rows.candidate[at].all()
        token[at], confidence[at] = value, 0.9
    results = RowResults(token, confidence, torch.ones_like(rows.candidate))
    return state.apply(rows, results, policy, cache, True)


def pending(state: BidirectionalState, sequence: int = 0) -> list[int]:
    """Positions that the next step forwards."""
    rows = state.rows(summary(state)[0])
    return rows.positions[rows.sequence == sequence].tolist()


def walk(plan: RowPlan, cache: str = "off", shift: int = 0, new: int = 10) -> list[list[int]]:
    """What each step forwards of a prompt of 3 in blocks of 4 that decode their positions from right to left, but one
    after the other, until the second block has two left.
    """
    state, found = begin([[1, 2, 3]], new, plan, shift=shift), []
    for position in (6, 5, 4, 3, 10, 9):
        found.append(pending(state))
        step(state, {(0, position): 10 + position}, cache)
    return [*found, pending(state)]


def span(begin: int, end: int) -> list[int]:
    return list(range(begin, end))


ALL = span(0, 13)


def test_the_first_step_forwards_everything() -> None:
    state = begin([[1, 2, 3], [7]], 6)
    assert summary(state) == [16, 2, 0, 0, 0]
    rows = state.rows(18)
    assert rows.cu_rows.tolist() == [0, 9, 16]
    assert rows.live.tolist() == [True] * 16 + [False] * 2
    assert rows.positions.tolist() == [*span(0, 9), *span(0, 7), 0, 0]
    assert rows.input_ids.tolist() == [1, 2, 3, *[MASK] * 6, 7, *[MASK] * 6, 0, 0]
    assert rows.limit.tolist() == [9] * 9 + [7] * 7 + [0, 0]
    # Candidates are the rows of the first block; its columns are 4..7 of the window.
    assert rows.candidate.nonzero().flatten().tolist() == [3, 4, 5, 6, 10, 11, 12, 13]
    assert rows.column.tolist() == [0, 0, 0, 4, 5, 6, 7, 0, 0, 0, 4, 5, 6, 7, 0, 0, 0, 0]
    assert (state.start.tolist(), state.end.tolist()) == ([3, 1], [9, 7])
    assert state.average.tolist() == [math.inf, math.inf]
    assert state.capacity == state.canvas.numel() == 2 * 13


def test_a_shifted_row_predicts_the_next_position() -> None:
    state = begin([[1, 2, 3], [7]], 6, shift=1)
    rows = state.rows(16)
    assert rows.candidate.nonzero().flatten().tolist() == [2, 3, 4, 5, 9, 10, 11, 12]
    assert rows.masked.nonzero().flatten().tolist() == [3, 4, 5, 6, 10, 11, 12, 13]
    assert rows.column.tolist() == [0, 0, 4, 5, 6, 7, 0, 0, 0, 4, 5, 6, 7, 0, 0, 0]
    committed = step(state, {(0, 3): 13, (1, 4): 24})[:, :-1]
    assert committed.tolist() == [[True, False, False, False], [False, False, False, True]]
    assert state.canvas[0].tolist() == [1, 2, 3, 13, *[MASK] * 9]
    assert state.canvas[1].tolist() == [7, MASK, MASK, MASK, 24, *[MASK] * 8]
    # The row before the block rides along, its own position's among them; the last one predicts no masked one.
    assert (pending(state, 0), pending(state, 1)) == ([2, 3, 4, 5, 6], [0, 1, 2, 3, 4])
    rows = state.rows(10)
    assert rows.candidate.tolist() == [False, True, True, True, False, True, True, True, False, False]
    assert rows.masked.tolist() == [False, False, True, True, True, False, True, True, True, False]


def test_plans() -> None:
    """The rows of each step; the fourth step ends the first block."""
    assert walk(RowPlan()) == [ALL] * 7
    assert walk(RowPlan(Block())) == [ALL, *[span(3, 7)] * 3, ALL, *[span(7, 11)] * 2]
    assert walk(RowPlan(Suffix())) == [ALL, *[span(3, 13)] * 3, ALL, *[span(7, 13)] * 2]
    assert walk(RowPlan(Block(before=1, after=2))) == [ALL, *[span(2, 9)] * 3, ALL, *[span(6, 13)] * 2]
    assert walk(RowPlan(Block(before=9, after=1))) == [ALL, *[span(0, 8)] * 3, ALL, *[span(0, 12)] * 2]
    assert walk(RowPlan(Block(), Counted(full_steps=2))) == [ALL, ALL, *[span(3, 7)] * 2, ALL, ALL, span(7, 11)]
    assert walk(RowPlan(Block(), Counted(every=2))) == [ALL, span(3, 7), ALL, span(3, 7), ALL, span(7, 11), ALL]
    assert walk(RowPlan(Block(), Counted(every=1))) == [ALL] * 7
    assert walk(RowPlan(Block(), Counted(warm_up=3))) == [ALL] * 3 + [span(3, 7), ALL, *[span(7, 11)] * 2]
    assert walk(RowPlan(Block(), Counted(warm_up=6))) == [ALL] * 6 + [span(7, 11)]


def test_plans_of_a_shifted_model_have_one_row_more() -> None:
    assert walk(RowPlan(Block()), shift=1) == [ALL, *[span(2, 7)] * 3, ALL, *[span(6, 11)] * 2]
    assert walk(RowPlan(Suffix()), shift=1) == [ALL, *[span(2, 13)] * 3, ALL, *[span(6, 13)] * 2]
    assert walk(RowPlan(Block(before=1, after=1)), shift=1)[1:] == [*[span(1, 8)] * 3, ALL, *[span(5, 12)] * 2]


def test_block_caches() -> None:
    """A row is skipped from the second step after its token was decoded."""
    assert walk(RowPlan(Block()), "dc") == [ALL, span(3, 7), [3, 4, 5], [3, 4], ALL, span(7, 11), [7, 8, 9]]
    # Decoded from the right, every neighbour is decoded before; the block's last column needs none.
    assert walk(RowPlan(Block()), "dc+") == walk(RowPlan(Block()), "dc")
    assert walk(RowPlan(), "dc") == [
        ALL,
        span(3, 13),
        [3, 4, 5, *span(7, 13)],
        [3, 4, *span(7, 13)],
        ALL,
        span(7, 13),
        [*span(7, 10), 11, 12],
    ]
    # dKV-Cache: a second full step.
    delayed = walk(RowPlan(All(), Counted(full_steps=2)), "dc")
    assert delayed[:4] == [ALL, ALL, [3, 4, 5, *span(7, 13)], [3, 4, *span(7, 13)]]
    # A full step forgets nothing that it has itself written with decoded tokens.
    assert walk(RowPlan(Block(), Counted(every=2)), "dc")[2:4] == [ALL, [3, 4]]


def test_the_delayed_cache_waits_for_the_right_neighbour() -> None:
    state = begin([[1, 2, 3]], 4)
    seen = []
    for position in (4, 6, 5, 3):
        seen.append(pending(state))
        step(state, {(0, position): 10}, "dc+")
    # 4 was decoded first, but is skipped only once 5 has been forwarded as decoded; 6 is the last of its block.
    assert seen == [[0, 1, 2, 3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5]]
    state = begin([[1, 2, 3]], 5)
    for position in (4, 5, 6):
        step(state, {(0, position): 10}, "dc+")
    assert pending(state) == [3, 5, 6]
    assert not state.frozen[0, 7], "what is after the block is not decoded"


def test_a_skipped_row_is_forwarded_for_what_it_predicts() -> None:
    """Row 4 has position 5 to predict, whether its own keys are cached or not."""
    state = begin([[1, 2, 3]], 4, shift=1)
    seen = []
    for position in (4, 3, 6, 5):
        seen.append(pending(state))
        step(state, {(0, position): 10}, "dc")
    # Row 2 is skipped from when 3 is decoded, 3 from a step later, and 6 predicts a position after the response.
    assert seen == [[0, 1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [3, 4, 5, 6], [4, 5, 6]]


def test_a_block_that_its_first_step_finishes() -> None:
    state = begin([[1, 2, 3]], 8)
    step(state, {(0, p): 10 + p for p in range(3, 7)})
    assert (state.start.tolist(), state.forwards.tolist(), state.counter.tolist()) == ([7], [0], [1])
    assert (state.decoded.tolist(), state.steps.tolist()) == ([0], [0])
    assert pending(state) == span(0, 11)
    assert state.average.tolist() == [math.inf]
    step(state, {(0, p): 10 + p for p in range(7, 11)})
    assert summary(state) == [0, 0, 8, 0, 0]
    assert state.canvas[0, :11].tolist() == [1, 2, 3, *span(13, 21)]


def test_a_last_block_that_is_cut_short() -> None:
    state = begin([[1, 2, 3]], 6)
    step(state, {(0, p): 10 for p in range(3, 7)})
    rows = state.rows(9)
    assert rows.candidate.nonzero().flatten().tolist() == [7, 8]
    assert set(rows.limit.tolist()) == {9}
    step(state, {(0, 8): 10})
    assert pending(state) == [7, 8]
    assert state.block_masked.tolist() == [[True, False, False, False]]
    step(state, {(0, 7): 10})
    assert summary(state) == [0, 0, 6, 0, 0]
    assert state.canvas[0, 9:].tolist() == [MASK] * 4


def test_sequences_move_on_by_themselves() -> None:
    """One is in a full step while the other has its block, and one that stopped has no rows."""
    state = begin([[1, 2, 3], [7]], 8)
    step(state, {**{(0, p): 10 for p in range(3, 7)}, (1, 1): 11, (1, 2): STOP})
    assert (pending(state, 0), pending(state, 1)) == (span(0, 11), [])
    assert state.active.tolist() == [True, False]
    assert state.average.tolist()[0] == math.inf
    state = begin([[1, 2, 3], [7]], 8)
    step(state, {**{(0, p): 10 for p in range(3, 7)}, (1, 2): STOP})
    assert (pending(state, 0), pending(state, 1)) == (span(0, 11), span(1, 5))  # a mask stands before the stop token
    assert state.full.tolist() == [True, False]
    assert state.average.tolist() == [math.inf, 1.0]
    rows = state.rows(15)
    assert rows.cu_rows.tolist() == [0, 11, 15]
    assert rows.limit.tolist() == [11] * 11 + [9] * 4
    assert rows.column[11:].tolist() == [4, 5, 6, 7]
    step(state, {(0, 7): 20, (1, 1): 11})
    assert (pending(state, 0), pending(state, 1)) == (span(7, 11), [])
    assert state.canvas[1, :5].tolist() == [7, 11, STOP, MASK, MASK]
    assert state.counter.tolist() == [2, 2]


def test_a_stop_token_of_the_prompt_is_none() -> None:
    state = begin([[STOP, STOP]], 4)
    step(state, {(0, 2): 10})
    assert state.active.tolist() == [True]
    step(state, {(0, 3): STOP})
    assert state.active.tolist() == [False]


def test_rows_forwarded_for_their_keys_alone() -> None:
    """All that are neither of the block nor, in a shifted model, the row before it."""
    state = begin([[1, 2, 3]], 10)
    counts = []
    for position in (3, 4):
        step(state, {(0, position): 10})
        counts.append(int(state.commit_rows))
    assert counts == [9, 9]
    state = begin([[1, 2, 3]], 10, RowPlan(Block(before=2, after=3)), shift=1)
    for position in (3, 4):
        step(state, {(0, position): 10})
        counts.append(int(state.commit_rows))
    assert counts[2:] == [8, 8 + 5]
    assert state.kept_rows.tolist() == [13 + 10]


def test_average() -> None:
    state = begin([[1, 2, 3]], 8)
    rows = state.rows(11)
    results = RowResults(torch.full((11,), -1), torch.full((11,), NONE), torch.ones(11, dtype=torch.bool))
    results.token[3:6], results.confidence[3:6] = 10, 0.9
    state.apply(rows, results, ConfidenceThreshold(0.5), "off", True)
    assert state.average.tolist() == [3.0]


def test_a_copy_shares_nothing() -> None:
    state = begin([[1, 2, 3]], 8)
    copy = state.clone()
    step(state, {(0, 3): 10}, "dc")
    assert pending(copy) == span(0, 11)
    assert copy.canvas[0, 3] == MASK
    assert (copy.plan, copy.size, copy.shift) == (state.plan, state.size, state.shift)


def foreseen(plan: RowPlan, prompt: list[int], new: int, shift: int = 0, steps: int = 4) -> list[tuple[list[int], ...]]:
    """Per step of 4-token blocks that are decoded from the left: rows that it forwards, and positions it commits."""
    state, found = begin([prompt], new, plan, shift=shift), []
    while state.active.any():
        rows = state.rows(summary(state)[0])
        token = torch.where(rows.candidate, rows.positions, -1)
        results = RowResults(token, torch.where(rows.candidate, 0.5, NONE), torch.ones_like(rows.candidate))
        columns = state.columns
        committed = state.apply(rows, results, Sequential(steps), "off", True)
        found.append((rows.positions.tolist(), columns[committed[:, :-1]].tolist()))
    return found


def test_what_comes_next_and_what_is_around_it() -> None:
    assert foreseen(RowPlan(Next(around=2)), [1, 2, 3], 8) == [
        (span(0, 11), [3]),
        ([3, 4, 5, 6], [4]),  # nothing masked is on the left: both on the right
        ([4, 5, 6, 7], [5]),
        ([5, 6, 7, 8], [6]),  # they may lie after the block
        (span(0, 11), [7]),
        ([7, 8, 9, 10], [8]),
        ([8, 9, 10], [9]),  # but not after the response
        ([9, 10], [10]),
    ]
    assert [rows for rows, _ in foreseen(RowPlan(Next()), [1, 2, 3], 4)] == [span(0, 7), [3, 4], [4, 5], [5, 6]]
    often = foreseen(RowPlan(Next(), Counted(every=2)), [1, 2, 3], 4)
    assert [rows for rows, _ in often] == [span(0, 7), [3, 4], span(0, 7), [5, 6]]
    # Two at a time bring a row each, and what one has the other passes by.
    two = foreseen(RowPlan(Next(around=1)), [1, 2, 3], 8, steps=2)
    assert two[1] == ([3, 4, 5, 6, 7, 8], [5, 6])


def test_of_two_that_are_equally_near_the_left_one_comes_first() -> None:
    state = begin([[1, 2, 3]], 8, RowPlan(Next(around=1)))
    step(state, {(0, 3): 13}, policy=Coming(2))
    assert pending(state) == [3, 4, 5]
    step(state, {(0, 5): 15}, policy=Coming(1))
    assert pending(state) == [4, 5, 6]


def test_the_row_before_what_comes_next() -> None:
    """With shifted logits, row 3 predicts position 4; the row that was decoded is that of its own position."""
    assert [rows for rows, _ in foreseen(RowPlan(Next()), [1, 2, 3], 4, shift=1)] == [span(0, 7), [3], [4], [5]]
    wide = foreseen(RowPlan(Next(around=1)), [1, 2, 3], 4, shift=1)
    assert [rows for rows, _ in wide] == [span(0, 7), [3, 4], [4, 5], [5, 6]]


# -- sessions -----------------------------------------------------------------------------------------------------


def test_what_a_session_refuses() -> None:
    both = {"prefill": FakeProgram("prefill"), "step": FakeProgram("step")}
    with pytest.raises(InputError, match=r"fake: RowPlan\(region=All\(\), .*are final once a block is committed"):
        BlockSession(fake_spec(4), both, plan=RowPlan())
    with pytest.raises(InputError, match=r"fake: logit_shift=1, expected 0"):
        BlockSession(fake_spec(4, logit_shift=1), both)
    with pytest.raises(InputError, match="needs 'step' of a model whose attention is bidirectional; 'step' is missing"):
        BlockSession(fake_spec(4, attention="bidirectional"), {"prefill": both["prefill"]})


@pytest.mark.parametrize(
    "policy",
    [ConfidenceThreshold(0.5), FixedSteps(4), FixedSteps(4, remasking="random"), JointThreshold(), Dream()],
    ids=repr,
)
def test_a_policy_that_waits_for_predictions_is_refused_where_rows_depend_on_it(policy: DecodeRule) -> None:
    session = BlockSession(
        fake_spec(4, attention="bidirectional"), {"step": FakeProgram("logits")}, plan=RowPlan(Next(around=2))
    )
    message = (
        rf"RowPlan\(region=Next\(around=2\).* known before its forward, which {re.escape(repr(policy))} .*'dkv_greedy'"
    )
    with pytest.raises(InputError, match=message):
        session.generate([[1, 2]], max_new_tokens=5, policy=policy)
    assert session.kv.pages == 0
    found = session.generate([[1, 2]], max_new_tokens=5, policy=policy_of("dkv_greedy", 4))
    assert len(found.token_ids) == 1


def test_a_session_without_a_plan_forwards_everything() -> None:
    session = BlockSession(fake_spec(4, attention="bidirectional"), {"step": FakeProgram("step")})
    assert session.plan == RowPlan()
    rows: list[int] = []
    session.generate(
        [[1, 2], [4, 5, 6]],
        max_new_tokens=5,
        policy=ConfidenceThreshold(0.5),
        observer=lambda r: rows.append(len(r.kept)),
    )
    assert rows[0] == 7 + 8
    assert set(rows) <= {15, 8, 7}


@pytest.mark.parametrize(("block", "page"), [(4, 4), (4, 2), (16, 4)])
def test_room_for_a_sequence_as_long_as_the_model_allows(block: int, page: int) -> None:
    """Its last position is no multiple of the block or of the page."""
    spec = fake_spec(block, attention="bidirectional", max_positions=19, eos_ids=())
    session = BlockSession(spec, {"step": FakeProgram("step")}, page_size=page)
    found = session.generate([[1, 2, 4]], max_new_tokens=16, policy=ConfidenceThreshold(0.9), keep_kv=True)
    assert len(found.token_ids[0]) == 16
    assert found.kv is not None
    assert [len(k) for k, _ in found.kv[0].layers] == [19, 19]
    with pytest.raises(InputError, match=r"take 20 positions, more than the 19 of fake; ask for at most 16 new"):
        session.generate([[1, 2, 4]], max_new_tokens=17, policy=ConfidenceThreshold(0.9))
