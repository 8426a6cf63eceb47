"""What a state says of the keys that stay: windows, actions, and the key rows of a step that selects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT
from dgraph.plans.kv import KVPlan
from dgraph.plans.regions import Block, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart, Counted
from dgraph.runtime.loop.batch_config import BatchConfig
from dgraph.runtime.loop.step_inputs import StepContext, computed
from dgraph.runtime.policies import ConfidenceThreshold
from dgraph.runtime.state.base import OUT
from dgraph.runtime.state.bidirectional import BidirectionalState
from dgraph.runtime.state.block_causal import BlockCausalState
from dgraph.runtime.state.encode_denoise import EncodeDenoiseState
from dgraph.runtime.state.state_init import StateInit
from tests.runtime.fake import summary
from tests.runtime.test_block_causal import step as step_of_blocks
from tests.runtime.test_canvas import MASK, step

State = BidirectionalState | BlockCausalState | EncodeDenoiseState
RESPONSE = KVPlan("response", pairs=(3,))


def begin(kind: type[State], prompts: list[list[int]], new: int, kv: KVPlan | None, **more: Any) -> Any:
    width = max(map(len, prompts)) + new + 8
    canvas = torch.full((len(prompts), width // 4 * 4), MASK)
    for row, prompt in zip(canvas, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(p) for p in prompts])
    facts = {"max_new_tokens": new, "block": 4, "mask_id": MASK, "stop_ids": torch.tensor([50]), "kv": kv, **more}
    return kind.begin(StateInit(canvas, torch.arange(len(prompts)), lengths, **facts))


def said(state: Any) -> tuple[list[list[int]], list[int], int]:
    """Windows, actions, and how many sequences do not reuse what is packed."""
    assert state.window.dtype == state.action.dtype == torch.int32
    return state.window.tolist(), state.action.tolist(), summary(state)[4]


def walk(state: Any, take: Any, start: int, positions: int) -> list[tuple[list[int], int]]:
    """Window and action of each step that decodes one position after the other, of a single sequence."""
    found = []
    for position in range(start, start + positions):
        ((window,), (action,), choosing) = said(state)
        assert choosing == (action != REUSE)
        found.append((window, action))
        take(state, {(0, position): 10})
    return found


@pytest.mark.parametrize("window", ["response", "block"])
def test_who_sits_a_step_out_chooses_nothing(window: str) -> None:
    """It has no rows to choose by, and what it packs would be read in its next step."""
    kv = KVPlan(window, pairs=(3,))
    for kind, more in ((BidirectionalState, {"plan": RowPlan(Block())}), (BlockCausalState, {})):
        state = begin(kind, [[1, 2, 3], [4, 5, 6, 7, 8]], 6, kv, **more)
        assert said(state)[1:] == ([SELECT, SELECT], 2)
        state.place[1] = OUT
        state.grant()
        assert said(state)[1:] == ([SELECT, REUSE], 1)


def test_without_a_plan_there_is_neither() -> None:
    kinds: tuple[tuple[type[State], dict[str, Any]], ...] = (
        (BidirectionalState, {"plan": RowPlan(Block())}),
        (BlockCausalState, {}),
        (EncodeDenoiseState, {"shift": 1, "causal": False}),
    )
    for kind, more in kinds:
        state = begin(kind, [[1, 2, 3]], 6, None, **more)
        assert state.window is state.action is None
        assert summary(state)[4] == 0


def test_a_block_of_a_canvas() -> None:
    """Full steps see everything, the last of them chooses; the last block is cut short."""
    kv = KVPlan("block", delay=1, ratio=0.5)
    state = begin(BidirectionalState, [[1, 2, 3]], 6, kv, plan=RowPlan(Block(), Counted(full_steps=2)))
    assert walk(state, step, 3, 6) == [
        ([3, 7], DENSE), ([3, 7], SELECT), ([3, 7], REUSE), ([3, 7], REUSE), ([7, 9], DENSE), ([7, 9], SELECT),
    ]  # fmt: skip
    assert said(state)[1:] == ([REUSE], 0), "a finished sequence chooses nothing"
    shifted = begin(BidirectionalState, [[1, 2, 3]], 6, kv, plan=RowPlan(Block(), Counted(full_steps=2)), shift=1)
    assert [window for window, _ in walk(shifted, step, 3, 6)] == [[2, 7]] * 4 + [[6, 9]] * 2
    at_once = begin(
        BidirectionalState, [[1, 2]], 8, KVPlan("block", ratio=0.5), plan=RowPlan(Block(), Counted(every=2))
    )
    assert [action for _, action in walk(at_once, step, 2, 8)] == [SELECT, REUSE] * 4


def test_a_response_of_a_canvas() -> None:
    """Whole steps after the first renew what is kept."""
    plan = RowPlan(Response(), Apart(3, 2))
    state = begin(BidirectionalState, [[1, 2, 3]], 8, RESPONSE, plan=plan, shift=1)
    found = walk(state, step, 3, 8)
    assert {tuple(window) for window, _ in found} == {(2, 11)}
    assert [action for _, action in found] == [SELECT, REUSE, REUSE, REPACK, REUSE, REUSE, REPACK, REUSE]
    blocks = begin(BidirectionalState, [[1, 2, 3]], 8, RESPONSE, plan=RowPlan(Block()))
    assert [action for _, action in walk(blocks, step, 3, 8)] == [SELECT, *[REUSE] * 3, REPACK, *[REUSE] * 3]


def test_sequences_of_a_canvas_by_themselves() -> None:
    kv = KVPlan("block", ratio=0.5)
    state = begin(BidirectionalState, [[1, 2, 3], [7]], 8, kv, plan=RowPlan(Block()), sequences=2)
    assert said(state) == ([[3, 7], [1, 5]], [SELECT, SELECT], 2)
    step(state, {**{(0, p): 10 for p in range(3, 7)}, (1, 2): 10})
    assert said(state) == ([[7, 11], [1, 5]], [SELECT, REUSE], 1)
    padded = begin(BidirectionalState, [[1, 2, 3], [7]], 8, kv, plan=RowPlan(Block()), sequences=1)
    assert said(padded)[1:] == ([SELECT, REUSE], 1)


def test_a_block_of_blocks() -> None:
    """A commit rides in a block's first step, which chooses no keys by it: its rows are before the window."""
    state = begin(BlockCausalState, [[1, 2, 3, 4, 5, 6]], 6, KVPlan("block", delay=1, ratio=0.5))
    found = walk(state, step_of_blocks, 6, 5)
    assert [action for _, action in found] == [DENSE, SELECT, DENSE, SELECT, REUSE]
    starts, ends = zip(*(window for window, _ in found), strict=True)
    assert starts == (4, 4, 8, 8, 8)
    assert all(end >= start + 4 for start, end in zip(starts, ends, strict=True))
    often = begin(BlockCausalState, [[1]], 15, KVPlan("block", delay=1, every=2, ratio=0.5))
    actions = [action for _, action in walk(often, step_of_blocks, 1, 11)]
    assert actions == [DENSE, SELECT, SELECT, DENSE, SELECT, SELECT, REUSE, DENSE, SELECT, SELECT, REUSE]


def test_a_response_of_blocks() -> None:
    """It begins with the block that holds the prompt's remainder; what is chosen stays as it is."""
    state = begin(BlockCausalState, [[1, 2, 3, 4, 5, 6], [7]], 6, RESPONSE)
    window, action, choosing = said(state)
    assert ([low for low, _ in window], action, choosing) == ([4, 0], [SELECT, SELECT], 2)
    assert window[0][1] >= 12
    assert window[1][1] >= 8
    for position in range(2):
        step_of_blocks(state, {(0, 6 + position): 10, (1, 1 + position): 10})
        after = said(state)
        assert (after[0], after[1:]) == (window, ([REUSE, REUSE], 0))


def test_a_block_of_two_modes() -> None:
    """What is encoded sees every key; the steps that denoise a block are counted, and its window begins with it."""
    kv = KVPlan("block", delay=1, ratio=0.5)
    shifted = begin(EncodeDenoiseState, [[1, 2, 3, 4]], 8, kv, shift=1, causal=False)
    # Row 3, with which the prompt's block is encoded, predicts position 4, and rows of a block the next position.
    found = walk(shifted, step_of_blocks, 3, 8)
    assert [action for _, action in found] == [DENSE, DENSE, SELECT, REUSE, DENSE, DENSE, SELECT, REUSE]
    assert [low for (low, _), _ in found] == [0, 4, 4, 4, 4, 8, 8, 8]
    causal = begin(EncodeDenoiseState, [[1, 2, 3, 4, 5]], 5, kv, shift=1, causal=True)
    found = walk(causal, step_of_blocks, 4, 5)
    assert [action for _, action in found] == [DENSE, DENSE, SELECT, REUSE, DENSE]
    assert [low for (low, _), _ in found] == [4, 5, 5, 5, 5]


@pytest.mark.parametrize(("causal", "low"), [(False, 4), (True, 6)])
def test_a_response_of_two_modes(causal: bool, low: int) -> None:
    """The first step that denoises chooses, and what is encoded after it sees what is kept."""
    state = begin(EncodeDenoiseState, [[1, 2, 3, 4, 5, 6]], 6, RESPONSE, shift=1, causal=causal)
    found = walk(state, step_of_blocks, 5, 5)
    assert {first for (first, _), _ in found} == {low}
    # A prompt that ends within a block of four begins it; where rows are encoded causally, its last one comes first.
    assert [action for _, action in found] == [*[DENSE] * causal, SELECT, *[REUSE] * (4 - causal)]
    assert state.total.item() == 5


def test_a_sequence_that_waits_before_it_chooses_chooses_later() -> None:
    state = begin(EncodeDenoiseState, [[1, 2, 3, 4], [5, 6, 7, 8]], 8, RESPONSE, shift=1, causal=False)
    assert said(state)[1:] == ([DENSE, DENSE], 2)
    state.place[1] = OUT
    state.grant()
    assert said(state)[1:] == ([DENSE, REUSE], 1)
    step_of_blocks(state, {(0, 3): 10})
    assert said(state)[1:] == ([SELECT, REUSE], 1)
    state.place[1] = 1
    state.grant()
    step_of_blocks(state, {(0, 4): 10, (1, 3): 10})
    assert said(state)[1:] == ([REUSE, SELECT], 1)


def keys_of(state: BlockCausalState) -> dict[str, torch.Tensor]:
    rule = BatchConfig(ConfidenceThreshold(0.9), "off", True, False, 0.0, 0)
    return computed(["key_positions", "cu_keys"], StepContext(state.rows(state.capacity), state, rule), late=True)


def test_key_rows() -> None:
    """All that a row may see, of the sequences that do not reuse; after them is padding."""
    kv = KVPlan("block", ratio=0.5)
    state = begin(BlockCausalState, [[1, 2, 3, 4, 5, 6], [7, 8]], 6, kv)
    keys = keys_of(state)
    assert keys["cu_keys"].dtype == torch.int32
    assert keys["cu_keys"].tolist() == [0, 8, 12]
    assert keys["key_positions"][:12].tolist() == [*range(8), *range(4)]
    assert keys["key_positions"].shape == (state.canvas.numel(),)
    step_of_blocks(state, {(0, 6): 10, (0, 7): 10, (1, 2): 10})
    keys = keys_of(state)
    assert said(state)[1:] == ([SELECT, REUSE], 1)
    assert keys["cu_keys"].tolist() == [0, 12, 12]
    assert keys["key_positions"][:12].tolist() == list(range(12))
