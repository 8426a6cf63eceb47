"""A script as a decode policy: its steps are followed, counts are equal whatever was evicted, kept is what it says."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.bench.traces import Trace, read_trace, synthesise
from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.runtime.loop.scripted_policy import SPREAD, BlockStep, Script, check_script, closure, selections
from dgraph.runtime.policies import Candidates, FixedSteps
from dgraph.runtime.state.block_causal import BlockCausalState
from dgraph.runtime.state.packed_rows import RowResults
from dgraph.runtime.state.state_init import StateInit
from tests.bench.test_traces import FOLDER, HISTORY
from tests.runtime.fake import summary

BLOCK = 8
TRACE = synthesise(BLOCK, 5.0, 3.0, histories=6)
SCRIPT = TRACE.script()
MASK = 9


def begin(lengths: list[int], tokens: int = 16) -> BlockCausalState:
    width = -(-(max(lengths) + tokens) // BLOCK) * BLOCK
    return BlockCausalState.begin(
        StateInit(
            torch.where(torch.arange(width) < torch.tensor(lengths)[:, None], 0, MASK),
            torch.arange(len(lengths)),
            torch.tensor(lengths),
            max_new_tokens=tokens,
            block=BLOCK,
            mask_id=MASK,
            stop_ids=torch.tensor([], dtype=torch.int64),
        )
    )


def history_of(prompt: int, start: int) -> int:
    return (prompt * SPREAD + start // BLOCK) % len(TRACE.histories)


class Decode:
    """Steps of a state under the script; `evict` keeps what `select_tokens` selects."""

    def __init__(self, lengths: list[int], evict: bool, seed: int = 0):
        self.state, self.evict = begin(lengths), evict
        self.draw = torch.Generator().manual_seed(seed)
        self.kept: list[set[int]] = []
        self.reached = torch.full((len(lengths),), -1, dtype=torch.int32)

    def step(self) -> Tensor:
        state = self.state
        rows = state.rows(int(summary(state)[0]))
        n = len(rows.candidate)
        kept, reached, start = torch.ones(n, dtype=torch.bool), self.reached, state.start
        if self.evict:
            score, budget = SCRIPT.scores(rows, state), SCRIPT.budget(state)
            args = (score, rows.candidate, rows.positions, rows.cu_rows, rows.limit, budget, reached, 1.0, 0)
            kept, _, reached = OPS["select_tokens"].reference(*args)
        chosen = kept & rows.candidate
        self.kept = [
            set((rows.column[chosen & (rows.sequence == s)] - BLOCK).tolist()) for s in range(len(state.start))
        ]
        confidence = torch.where(chosen, torch.rand(n, generator=self.draw), -math.inf)
        results = RowResults(torch.where(chosen, 5, -1), confidence, kept)
        committed = state.apply(rows, results, SCRIPT, "dc+", True)
        self.reached = torch.where(state.start == start, reached, -1)
        return committed


def test_whole_blocks_follow_their_histories() -> None:
    run = Decode([8, 16, 24], evict=True)
    where = [(history_of(s, start), 0) for s, start in enumerate((8, 16, 24))]
    for _ in range(100):
        if not run.state.active.any():
            break
        starts, active = run.state.start.tolist(), run.state.active.tolist()
        committed = run.step()
        for s, (h, at) in enumerate(where):
            if not active[s]:
                continue
            step = TRACE.histories[h][at]
            assert tuple(committed[s].nonzero().flatten().tolist()) == step.committed
            assert run.kept[s] == set(step.kept or ())
            moved = run.state.start[s] != starts[s]
            where[s] = (history_of(s, starts[s] + BLOCK), 0) if moved else (h, at + 1)
    assert not run.state.active.any()
    assert run.state.total.tolist() == [16, 16, 16]


@pytest.mark.parametrize("lengths", [[8, 16, 24], [1, 3, 6, 7, 13, 20, 23]])
def test_counts_are_equal_in_every_step_whatever_is_evicted(lengths: list[int]) -> None:
    """With a remainder of the prompt in the first block, too."""
    arms = [Decode(lengths, evict=False, seed=1), Decode(lengths, evict=True, seed=2)]
    assert arms[0].state.active.all()
    while arms[0].state.active.any():
        counts = [arm.step().sum(dim=1).tolist() for arm in arms]
        assert counts[0] == counts[1]
    assert not arms[1].state.active.any()


def candidates(masked: Tensor, confidence: Tensor, decoded: int) -> Candidates:
    """One sequence, prompt 0, its first block."""
    fields: dict[str, Any] = dict.fromkeys(Candidates.__dataclass_fields__)
    given: dict[str, Any] = {
        "token": torch.zeros_like(masked, dtype=torch.int64),
        "confidence": confidence,
        "masked": masked,
        "current": torch.zeros_like(masked, dtype=torch.int64),
        "step": torch.tensor([99]),
        "decoded": torch.tensor([decoded]),
        "start": torch.tensor([0]),
        "prompt": torch.tensor([0]),
    }
    return Candidates(**{**fields, **given})


def test_columns_that_cannot_be_committed_are_replaced() -> None:
    script = Script(4, (HISTORY,))  # commits 0 2, then 1, then 3
    masked = torch.ones(1, 4, dtype=torch.bool)

    def chosen(confidence: list[float], masked: Tensor = masked, decoded: int = 0) -> list[int]:
        return script.choose(candidates(masked, torch.tensor([confidence]), decoded))[0].nonzero().flatten().tolist()

    assert chosen([0.1, 0.9, 0.1, 0.9]) == [0, 2]
    assert chosen([-math.inf, 0.2, 0.1, 0.3]) == [2, 3], "two tokens, the most confident in the place of column 0"
    assert chosen([-math.inf, -math.inf, -math.inf, 0.3]) == [3], "all there is"
    left = torch.tensor([[True, True, False, False]])  # 2 and, instead of 0, 3 were committed
    assert chosen([0.9, 0.1, -math.inf, -math.inf], left, decoded=2) == [0], "what was missed is due as well"
    prompt = torch.tensor([[False, False, True, True]])  # two columns of prompt: 2 is left of the first step, 1 is gone
    assert chosen([-math.inf, -math.inf, 0.1, 0.9], prompt) == [2]


def test_selection_needs_kept_columns() -> None:
    bare = Script(4, (tuple(BlockStep(s.committed) for s in HISTORY),))
    assert not bare.keeps
    with pytest.raises(InputError, match="does not say which columns are kept"):
        bare.budget(begin([8]))
    with pytest.raises(InputError, match="does not say which columns are kept"):
        check_script(bare, 4, scripted=True)
    check_script(bare, 4, scripted=False)
    check_script(FixedSteps(3), 4, scripted=False)
    with pytest.raises(InputError, match=r"blocks of 8 columns, but block_length=4"):
        check_script(SCRIPT, 4, scripted=True)
    with pytest.raises(InputError, match=r"with a `Script` as policy, got FixedSteps"):
        check_script(FixedSteps(3), 4, scripted=True)
    with pytest.raises(InputError, match="at least one block history"):
        Script(4, ())
    with pytest.raises(InputError, match="history 0 never commits column 4"):
        Script(5, (HISTORY,))


@pytest.mark.parametrize("trace", ["text", "paper-sharegpt"])
def test_what_was_kept_is_closed_under_the_rules_of_the_selection(trace: str) -> None:
    found: Trace = read_trace(FOLDER / f"{trace}.json")
    for history in found.histories:
        for step, (scored, kept) in zip(history, selections(history, found.block), strict=True):
            assert kept == set(step.kept or ())
            assert scored <= kept


def test_the_closure_is_what_the_op_does() -> None:
    draw = random.Random(0)
    for _ in range(50):
        masked = {c for c in range(16) if draw.random() < 0.7} or {3}
        base = set(draw.sample(sorted(masked), draw.randint(1, len(masked))))
        reached = draw.randint(-1, 15)
        rows = torch.tensor(sorted(masked))
        score = torch.tensor([1.0 if c in base else 0.0 for c in sorted(masked)])
        keep, _, _ = OPS["select_tokens"].reference(
            score,
            torch.ones(len(rows), dtype=torch.bool),
            rows,
            torch.tensor([0, len(rows)]).int(),
            torch.full((len(rows),), 16).int(),
            torch.tensor([float(len(base))]),
            torch.tensor([reached]).int(),
            1.0,
            0,
        )
        assert set(rows[keep].tolist()) == closure(base, masked, reached)


@pytest.mark.parametrize("masks", [BLOCK, 3])
def test_a_trace_tells_what_its_script_commits(masks: int) -> None:
    """The simulator counts by it."""
    run = Decode([16], evict=False)
    state, counts = run.state, TRACE.counts(0, 16, BLOCK)
    found = [int(run.step()[0].sum()) for _ in counts]
    assert found == counts
    assert state.start.tolist() == [24]
    history = TRACE.histories[history_of(5, 8)]
    columns = [sum(column < masks for column in step.committed) for step in history]
    assert TRACE.counts(5, 8, masks) == [count for count in columns if count]
    assert sum(TRACE.counts(5, 8, masks)) == masks
