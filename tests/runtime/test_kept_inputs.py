"""What a program that keeps few keys is told of each row: whether it adapts, by the action of its sequence."""

from __future__ import annotations

import torch

from dgraph.ops.attention.sparse import REPACK, REUSE, SELECT
from dgraph.plans.kv import KVPlan
from dgraph.plans.regions import Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart
from dgraph.runtime import ConfidenceThreshold
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.loop.batch_config import BatchConfig
from dgraph.runtime.loop.transition import StepTransition
from dgraph.runtime.policies import PolicyMix
from dgraph.runtime.requests import Request
from dgraph.runtime.state.bidirectional import BidirectionalState
from dgraph.runtime.state.initial import write_request_settings
from dgraph.runtime.state.state_init import StateInit
from tests.runtime.fake import offered

MASK = 99
PLAN = RowPlan(Response(), Apart(2, 3))


def transition_of(kv: KVPlan | None) -> StepTransition:
    """Two sequences before their first step; a step commits one position of each."""
    canvas = torch.tensor([[1, 2, 3, *[MASK] * 8], [4, 5, 6, 7, 8, *[MASK] * 6]])
    state = BidirectionalState.begin(
        StateInit(
            canvas,
            torch.arange(2),
            torch.tensor([3, 5]),
            max_new_tokens=6,
            block=6,
            mask_id=MASK,
            stop_ids=torch.tensor([50]),
            plan=PLAN,
            shift=0,
            kv=kv,
        )
    )
    kept = ("action", "window", "adapt") if kv is not None else ()
    inputs = tuple(map(offered, ("input_ids", "full", "prompt_end", "step", *kept)))
    mixture = PolicyMix.of([ConfidenceThreshold(0.9)])
    write_request_settings(state, mixture, [Request([1], Decoding())] * 2)
    return StepTransition(BatchConfig(mixture, "off", False, False, False, inputs), state, state.capacity)


def test_rows_adapt_where_their_sequence_reuses() -> None:
    """Steps 0, 2 and 4 forward the prompt, which is full; steps 0 and 3 refresh the response."""
    transition = transition_of(KVPlan("response", pairs=(2,)))
    for action, full in ((SELECT, "all"), (REUSE, "none"), (REPACK, "prompt"), (REUSE, "all"), (REPACK, "prompt")):
        inputs, rows = transition.inputs, transition.rows
        assert inputs["action"].tolist() == [action] * 2
        count = int(rows.cu_rows[-1])
        assert inputs["adapt"].dtype == torch.bool
        assert inputs["adapt"][:count].tolist() == [action == REUSE] * count
        prompt = rows.positions[:count] < torch.tensor([3, 5])[rows.sequence[:count]]
        assert prompt.any() == (action != REUSE)
        wanted = {"all": torch.ones_like(prompt), "none": torch.zeros_like(prompt), "prompt": prompt}[full]
        assert torch.equal(inputs["full"][:count], wanted)
        n = transition.capacity
        transition.take({"token": torch.full((n,), 7), "confidence": torch.rand(n) / 2})
        transition.move()


def test_each_sequence_by_itself() -> None:
    transition = transition_of(KVPlan("response", pairs=(2,)))
    state = transition.state.clone()
    state.counter[1], state.whole[1] = 1, False
    transition.admit([0, 1], state)
    transition.pack()
    inputs, rows = transition.inputs, transition.rows
    count = int(rows.cu_rows[-1])
    assert inputs["action"].tolist() == [SELECT, REUSE]
    assert torch.equal(inputs["adapt"][:count], rows.sequence[:count] == 1)


def test_without_keys_to_keep_nobody_asks() -> None:
    assert not {"adapt", "action", "window"} & set(transition_of(None).inputs)
