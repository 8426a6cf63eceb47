"""Transitions of the step state on cases small enough to write down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgraph.plans.block_cache import ready_columns
from dgraph.plans.regions import Block
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.runtime import ConfidenceThreshold
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import PolicyMix
from dgraph.runtime.requests import Request
from dgraph.runtime.sampling.random_numbers import row_seeds, sequence_keys, uniform
from dgraph.runtime.state.base import OUT
from dgraph.runtime.state.block_causal import BlockCausalState
from dgraph.runtime.state.initial import write_request_settings
from dgraph.runtime.state.packed_rows import RowResults, prefill_rows, row_results
from dgraph.runtime.state.state_init import StateInit
from tests.runtime.fake import summary

KNOWN = 4069107984540586624
MASK, STOP, NONE = 99, 50, -torch.inf
ONE = ConfidenceThreshold(1.0)


def begin(
    prompts: list[list[int]], new: int, block: int = 4, plan: RowPlan | None = None, mixed: int = 0
) -> BlockCausalState:
    width = -(-(max(map(len, prompts)) + new) // block) * block
    canvas = torch.full((len(prompts), width), MASK)
    for row, prompt in zip(canvas, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(p) for p in prompts])
    stops = torch.tensor([STOP])
    index = torch.arange(len(prompts))
    facts = {"max_new_tokens": new, "block": block, "mask_id": MASK, "stop_ids": stops}
    return BlockCausalState.begin(StateInit(canvas, index, lengths, **facts, plan=plan, most_mixed=mixed))


def step(state: BlockCausalState, decode: dict[tuple[int, int], int], **options) -> Tensor:
    """One step in which (sequence, position) -> token are confident and nothing else is a candidate."""
    rows = state.rows(summary(state)[0])
    token, confidence = torch.full_like(rows.positions, -1), torch.full(rows.positions.shape, NONE)
    for (sequence, position), value in decode.items():
        at = (rows.sequence == sequence) & (rows.positions == position)
        assert at.sum() == 1
        assert rows.candidate[at].all()
        token[at], confidence[at] = value, 0.9
    results = RowResults(token, confidence, torch.ones_like(rows.candidate))
    policy = ConfidenceThreshold(0.5)
    return state.apply(rows, results, policy, options.get("cache", "off"), options.get("recommit", True))[:, :-1]


def pending(state: BlockCausalState, sequence: int = 0) -> list[int]:
    """Positions that the next step forwards."""
    rows = state.rows(summary(state)[0])
    return rows.positions[rows.sequence == sequence].tolist()


def test_ready_columns() -> None:
    decoded = torch.tensor([[True, True, False, True], [False, True, True, False]])
    assert not ready_columns(decoded, "off").any()
    assert ready_columns(decoded, "dc").equal(decoded)
    expected = torch.tensor([[True, False, False, True], [False, True, False, False]])
    assert ready_columns(decoded, "dc+").equal(expected)


def test_the_remainder_of_a_prompt_begins_the_first_block() -> None:
    state = begin([[1, 2, 3, 4, 5, 6], [7]], 3)
    rows = state.rows(8)
    assert rows.cu_rows.tolist() == [0, 4, 8]
    assert rows.positions.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert rows.input_ids.tolist() == [5, 6, MASK, MASK, 7, MASK, MASK, MASK]
    assert rows.candidate.tolist() == [False, False, True, True, False, True, True, True]
    assert rows.limit.tolist() == [8] * 4 + [4] * 4
    assert state.average.tolist() == [1.0, 1.0]
    full = prefill_rows(state.canvas, torch.zeros_like(state.start), state.start, 4, 4)
    assert (full.positions.tolist(), full.input_ids.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])
    assert (full.limit.tolist(), full.cu_rows.tolist()) == ([4] * 4, [0, 4, 4])


def test_a_prompt_is_encoded_with_the_first_step() -> None:
    """Rows of it are those before the block, each sees its own block, and none counts as one of the response."""
    state = begin([[*range(1, 11)], [7]], 6, mixed=9)
    assert state.capacity == 9 + 2 * 2 * 4
    state.mixed[0] = 8
    rows = state.rows(20)
    assert rows.cu_rows.tolist() == [0, 12, 16]
    assert rows.positions[:16].tolist() == [*range(12), 0, 1, 2, 3]
    assert rows.input_ids[:16].tolist() == [*range(1, 11), MASK, MASK, 7, MASK, MASK, MASK]
    assert rows.limit[:16].tolist() == [4] * 4 + [8] * 4 + [12] * 4 + [4] * 4
    assert rows.candidate[:16].tolist() == [False] * 10 + [True, True, False, True, True, True]
    assert (rows.column[:8] < 0).all()
    assert (rows.column[8:12] - 4).tolist() == [0, 1, 2, 3]
    for padding in (rows.positions[16:], rows.input_ids[16:], rows.limit[16:], rows.column[16:]):
        assert not padding.any()
    state.place[0] = OUT
    state.grant()
    step(state, {(1, 1): 10})
    state.place[0] = 0
    state.grant()
    assert pending(state) == [*range(12)], "it sat that step out"
    step(state, {(0, 10): 20, (0, 11): 21, (1, 2): 11})
    assert pending(state) == [*range(8, 16)], "the block is encoded with the next one, and nothing else"
    assert (state.commit_rows.tolist(), state.kept_rows.tolist()) == ([0, 0], [4, 8])
    step(state, {(0, 12): 22, (1, 3): 12})
    assert (state.commit_rows.tolist(), state.kept_rows.tolist()) == ([4, 0], [12, 12])


def test_a_token_is_forwarded_once_more_before_it_is_cached() -> None:
    state = begin([[1]], 7)
    step(state, {(0, 2): 20}, cache="dc+")
    assert pending(state) == [0, 1, 2, 3]  # 0 is decoded, but 1 is not
    step(state, {(0, 1): 10}, cache="dc+")
    assert pending(state) == [0, 1, 2, 3]  # 1 was forwarded as a mask: 0 is not ready; 2's neighbour is one
    step(state, {}, cache="dc+")
    assert pending(state) == [2, 3]
    assert state.steps.tolist() == [2]  # a step that decodes nothing is not counted
    assert state.average.tolist() == [1.0]
    assert state.sequence_average.tolist() == [pytest.approx(2 / 3)], "there it is"
    assert state.broken.tolist() == [True]


def test_the_average_of_a_sequence_goes_on_in_the_next_block() -> None:
    state = begin([[1], [2]], 11)
    assert state.sequence_average.tolist() == [1.0, 1.0]
    step(state, {(0, 1): 20, (0, 2): 21, (1, 1): 9})
    step(state, {(0, 3): 22, (1, 3): 9})
    assert state.start.tolist() == [4, 0]
    assert state.average.tolist() == [1.0, 1.0]
    assert state.sequence_average.tolist() == [1.5, 1.0]
    step(state, {(0, 4): 20, (0, 5): 21, (0, 6): 22, (0, 7): 23, (1, 2): 9})
    assert state.average.tolist() == [1.0, 1.0]
    assert state.sequence_average.tolist() == [pytest.approx(7 / 3), 1.0]


def test_a_request_that_was_preempted_goes_on_with_its_average() -> None:
    request = Request([1], Decoding(max_new_tokens=11), canvas=(None, 7)).after([5, 7, 6], 4)
    again = request.after([9, 9, 9, 9], 6)
    assert (request.steps, request.decoded, again.steps, again.decoded) == (4, 2, 6, 6)
    assert (again.ids, again.decoding.max_new_tokens, again.canvas) == ([1, 5, 7, 6, 9, 9, 9, 9], 4, ())
    state = begin([again.ids], 4)
    write_request_settings(state, PolicyMix.of([again.decoding.rule]), [again])
    assert state.sequence_average.tolist() == [1.0]
    step(state, {(0, 8): 1, (0, 9): 1})
    assert state.sequence_average.tolist() == [pytest.approx(8 / 7)]


def test_a_cached_tail_is_out_of_sight() -> None:
    state = begin([[1, 2, 3, 4, 5]], 7)
    step(state, {(0, 7): 20, (0, 6): 21}, cache="dc")
    step(state, {}, cache="dc")
    rows = state.rows(1)
    assert (rows.positions.tolist(), rows.limit.tolist()) == ([5], [6])


def test_a_complete_block_is_committed_in_the_next_step() -> None:
    # 0 was cached by the first step and 3, the last, by the second.
    for recommit, committed in ((True, [0, 1, 2, 3]), (False, [1, 2])):
        state = begin([[1, 2]], 10)
        step(state, {(0, 3): 30}, cache="dc+", recommit=recommit)
        assert pending(state) == [1, 2, 3]
        step(state, {(0, 2): 20}, cache="dc+", recommit=recommit)
        assert pending(state) == [*committed, 4, 5, 6, 7]
        rows = state.rows(summary(state)[0])
        assert rows.limit.tolist() == [4] * len(committed) + [8] * 4
        assert rows.candidate.tolist() == [False] * len(committed) + [True] * 4
        assert (state.steps.tolist(), state.decoded.tolist()) == ([0], [0])
        step(state, {(0, 5): 49}, cache="dc+", recommit=recommit)
        assert pending(state) == [4, 5, 6, 7]
        assert state.commit_rows.item() == len(committed)
        assert state.counter.tolist() == [3]
        assert state.total.tolist() == [3]
        assert state.canvas[0, :8].tolist() == [1, 2, 20, 30, MASK, 49, MASK, MASK]


def flags(state: BlockCausalState) -> tuple[list[int], list[int]]:
    """Positions of the rows of the next step that are full, and of those that have changed."""
    rows = state.rows(state.capacity)
    assert rows.full is not None
    assert rows.changed is not None
    assert not (rows.full | rows.changed)[summary(state)[0] :].any(), "padding"
    return rows.positions[rows.full].tolist(), rows.positions[rows.changed].tolist()


def test_full_steps_and_changed_rows_of_a_block() -> None:
    state = begin([[1]], 11, plan=RowPlan(Block(), Counted(full_steps=2)))
    assert flags(state) == ([0, 1, 2, 3], [0, 1, 2, 3])
    step(state, {(0, 2): 20})
    assert flags(state) == ([0, 1, 2, 3], [0, 1, 2, 3])
    step(state, {(0, 1): 10})
    assert flags(state) == ([], [1])
    step(state, {(0, 3): 10})  # the commit rides with the first step of the next block
    assert flags(state) == ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7])
    step(state, {(0, 4): 10, (0, 5): 10})
    assert flags(state) == ([4, 5, 6, 7], [4, 5, 6, 7])
    step(state, {(0, 6): 10})
    assert flags(state) == ([], [6])


def test_a_full_step_every_so_many() -> None:
    state, found = begin([[1, 2]], 14, block=8, plan=RowPlan(Block(), Counted(every=2))), []
    for position in range(2, 8):
        found.append(len(flags(state)[0]))
        step(state, {(0, position): 10}, cache="dc")
    assert found == [8, 0, 5, 0, 3, 0], "rows that the block cache skips are not forwarded in a full step"


def test_sequences_have_full_steps_of_their_own() -> None:
    state = begin([[1, 2, 3], [4]], 6, plan=RowPlan(Block()))
    step(state, {(0, 3): 10, (1, 2): 11})
    rows = state.rows(summary(state)[0])
    assert rows.full is not None
    assert rows.changed is not None
    assert rows.full.tolist() == [True] * 8 + [False] * 4
    assert rows.changed.tolist() == [True] * 8 + [False, False, True, False]
    copy = state.clone()
    step(state, {(0, 5): 12, (1, 3): 11})
    assert copy.changed is not None
    assert copy.changed[1].tolist() == [False, False, True, False]
    assert copy.plan == state.plan


def test_without_a_plan_nothing_says_what_changed() -> None:
    state = begin([[1]], 3)
    step(state, {(0, 2): 20})
    assert state.rows(4).full is state.rows(4).changed is state.changed is None


def test_a_sequence_ends_with_its_last_block_or_a_stop_token() -> None:
    state = begin([[1], [STOP, 2], [3, 4, 5, 6]], 2)
    step(state, {(0, 2): STOP, (1, 3): STOP, (2, 4): STOP})
    assert state.active.tolist() == [True, True, False]  # masks stand before the other two
    assert pending(state, 2) == []
    step(state, {(0, 1): 8, (1, 2): 9})
    assert state.active.tolist() == [False, False, False]
    assert summary(state) == [0, 0, 5, 0, 0]
    assert state.broken.tolist() == [False] * 3  # a finished sequence needs nothing to commit


def test_program_outputs_come_back_to_their_rows() -> None:
    state = begin([[1, 2], [3]], 2)
    rows = state.rows(8)
    token, confidence = torch.tensor([7, 8, 9, -1]), torch.tensor([0.5, 0.25, 0.75, NONE])
    kept = torch.tensor([0, 3, 6, -1])
    got = row_results(rows, token, confidence, kept)
    assert got.kept.tolist() == [True, False, False, True, False, False, True, False]
    assert got.token.tolist() == [7, -1, -1, 8, -1, -1, 9, -1]
    assert got.confidence.tolist() == [NONE, NONE, NONE, 0.25, NONE, NONE, 0.75, NONE]  # row 0 is not masked
    committed = state.apply(rows, got, ONE, "off", True, torch.tensor([3, 2], dtype=torch.int32))
    assert committed[:, :-1].tolist() == [[False, False, False, True], [False, False, True, False]]


def test_a_mask_token_as_an_answer_counts_as_decoded() -> None:
    state = begin([[1]], 3)
    assert step(state, {(0, 1): MASK, (0, 2): 5}).tolist() == [[False, True, True, False]]
    assert state.masked.tolist() == [[False, False, False, True]]


def test_nan_is_found_and_nothing_of_it_is_committed() -> None:
    """A kernel gives 2 ** 31 - 1 for the token of a row without numbers, and an embedding on a GPU ends the process at
    such an id: in the step after this one, which may be launched before the host has read that this one went wrong.
    """
    state = begin([[1], [2]], 3)
    rows, before = state.rows(8), state.canvas[1].clone()
    confidence = torch.tensor([NONE, 0.5, 0.5, 0.5, NONE, 0.5, torch.nan, 0.5])
    token = torch.tensor([1, 1, 1, 1, 1, 1, 2**31 - 1, 1])
    committed = state.apply(rows, RowResults(token, confidence, rows.candidate), ConfidenceThreshold(0.4), "off", True)
    assert state.broken.tolist() == [False, True]
    assert committed.any(dim=1).tolist() == [True, False]
    assert state.canvas[1].equal(before)
    assert state.masked[1].any()
    again = state.rows(8)
    assert (again.sequence[again.live] == 1).sum() == (rows.sequence[rows.live] == 1).sum()


def test_seeds_are_a_function_of_what_is_drawn() -> None:
    prompt = torch.arange(40)[:, None, None]
    position, counter = torch.arange(40)[None, :, None], torch.arange(10)[None, None, :]
    shape = torch.broadcast_shapes(prompt.shape, position.shape, counter.shape)
    flat = [x.expand(shape).flatten() for x in (prompt, position, counter)]
    seeds = row_seeds(sequence_keys(1, flat[0]), flat[1], flat[2])
    assert seeds.unique().numel() == seeds.numel()
    assert (seeds >= 0).all()
    assert row_seeds(sequence_keys(1, flat[0][7:9]), flat[1][7:9], flat[2][7:9]).equal(seeds[7:9])
    assert not row_seeds(sequence_keys(2, flat[0]), flat[1], flat[2]).eq(seeds).any()
    draws = uniform(seeds)
    assert ((draws >= 0) & (draws < 1)).all()
    share = torch.histc(draws, bins=10, min=0, max=1) / len(draws)
    assert ((share - 0.1).abs() < 0.01).all()
    # A known value: a draw must not change with the release, or a seed would mean nothing.
    one = row_seeds(sequence_keys(3, torch.tensor([2])), torch.tensor([5]), torch.tensor([1]))
    assert one.item() == KNOWN
