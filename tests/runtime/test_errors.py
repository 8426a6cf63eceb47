"""Every refusal names the thing, and a failed call keeps no page."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dgraph.errors import DgraphError, InputError, LoweringError, UnknownName
from dgraph.lowering.program import ProgramResult
from dgraph.plans.regions import Block, Suffix
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.runtime import BlockSession, FixedSteps
from dgraph.types.shapes import InputSpec
from tests.runtime.fake import MASK, FakeProgram, fake_spec, offered


def programs() -> dict[str, Any]:
    return {"prefill": FakeProgram("prefill"), "step": FakeProgram("step")}


def make_session(**changes: object) -> BlockSession:
    return BlockSession(fake_spec(8, **changes), programs())


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty; give at least one token."),
        ([[1, 2.5]], {}, "prompt 0: token 1 is 2.5, expected an integer id."),
        ([[1], [2, 29]], {}, "prompt 1: token 1 is 29, outside the vocabulary of 29 ids"),
        ([[-1]], {}, "prompt 0: token 0 is -1, outside the vocabulary"),
        ([[1, 2, MASK]], {}, "prompt 0: token 2 is the mask token (id 28)"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0."),
        ([[1]], {"temperature": -0.5}, "temperature is a finite number, at least 0, got -0.5"),
        ([[1]], {"temperature": float("nan")}, "temperature is a finite number, at least 0, got nan"),
        ([[1]], {"max_batch": 0}, "max_batch must be at least 1, got 0"),
        ([[1]], {"block_length": 0}, "block_length must be at least 1, got 0."),
        (
            [[1] * 20],
            {"max_new_tokens": 50},
            "prompt 0: 20 tokens and max_new_tokens=50 take 72 positions in blocks of 8, more than the 70 of "
            "fake; ask for at most 44 new tokens.",
        ),
        ([[1], [1] * 64], {}, "prompt 1: 64 tokens and max_new_tokens=10 take 80 positions"),
        ([[1] * 64], {}, "shorten the prompt"),
    ],
)
def test_requests_that_cannot_be_met(prompts: list, options: dict, message: str) -> None:
    session = make_session(max_positions=70)
    with pytest.raises(InputError, match=re.escape(message)):
        session.generate(prompts, **({"max_new_tokens": 10, "policy": FixedSteps(2)} | options))
    assert session.kv.pages == 0  # refused before anything is allocated


def test_the_whole_window_can_be_used() -> None:
    out = make_session(max_positions=64, eos_ids=()).generate([[1] * 20], max_new_tokens=44, policy=FixedSteps(2))
    assert len(out.token_ids[0]) == 44


def test_models_and_programs_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="this block-causal one are final once a block is committed"):
        BlockSession(fake_spec(8), programs(), plan=RowPlan(Suffix()))
    for plan in (
        RowPlan(Block(after=2)),
        RowPlan(Block(), Counted(widen=3)),
        RowPlan(Block(), Counted(full_steps=0, warm_up=1)),
    ):
        with pytest.raises(InputError, match=r"Leave the plan out, or say which steps .*: RowPlan\("):
            BlockSession(fake_spec(8), programs(), plan=plan)
    BlockSession(fake_spec(8), programs(), plan=RowPlan(Block(), Counted(full_steps=2, every=3)))
    with pytest.raises(InputError, match=r"a model whose attention is bidirectional; 'step' is missing"):
        BlockSession(fake_spec(8, attention="bidirectional"), {"prefill": FakeProgram("prefill")})
    with pytest.raises(InputError, match="logit_shift=1, expected 0"):
        make_session(logit_shift=1)
    with pytest.raises(UnknownName, match=r"unknown block_cache 'dc\+\+'\. Did you mean 'dc\+'"):
        BlockSession(fake_spec(8), programs(), block_cache="dc++")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"'prefill' is missing \(got: step\)"):
        BlockSession(fake_spec(8), {"step": FakeProgram("step")})
    noisy = FakeProgram("evict", noise=True)
    with pytest.raises(InputError, match="'step' reads the input 'noise'"):
        BlockSession(fake_spec(8), programs() | {"step": noisy}, select_noise=False)
    strange = FakeProgram("step")
    strange.inputs |= {"hidden": InputSpec("hidden", torch.float32, ("N", 4)), "window": offered("window")}
    with pytest.raises(LoweringError, match=r"'step' reads inputs that .* not have: hidden, window\. It offers"):
        BlockSession(fake_spec(8), programs() | {"step": strange})
    sparse = FakeProgram("step")
    sparse.inputs |= {name: offered(name) for name in ("full", "changed")}
    with pytest.raises(LoweringError, match=r"'step' reads inputs that .* not have: changed, full\. It offers"):
        BlockSession(fake_spec(8), programs() | {"step": sparse})
    BlockSession(fake_spec(8), programs() | {"step": sparse}, plan=RowPlan(Block()))
    with pytest.raises(InputError, match="page_size must be a multiple or a divisor"):
        BlockSession(fake_spec(8), programs(), page_size=6)


class Broken(FakeProgram):
    """Changes the outputs of the third step."""

    def __init__(self, how: str):
        super().__init__("step")
        self.how = how

    def __call__(self, inputs, rows):
        result = super().__call__(inputs, rows)
        if len(self.calls) < 3:
            return result
        if self.how == "raise":
            raise RuntimeError("the device is gone")
        if self.how == "names":
            return ProgramResult({"hidden": inputs["seed"]}, (rows,), (rows,), (0.0,))
        last = inputs["candidate"].nonzero()[-1]
        if self.how == "nan":
            result.outputs["confidence"][last] = torch.nan
        else:
            begin = int(inputs["cu_rows"][-2])
            result.outputs["token"][begin:] = -1
        return result


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", RuntimeError, "the device is gone"),
        ("names", LoweringError, "must output token and confidence, or logits; got: hidden"),
        ("nan", DgraphError, "no usable confidence for prompt 3 (block at position 8)"),
        ("nothing", DgraphError, "no usable confidence for prompt 3 (block at position 8)"),
    ],
)
def test_programs_that_fail_give_their_pages_back(how: str, error: type, message: str) -> None:
    broken = Broken(how)
    spec = fake_spec(8, eos_ids=())
    session = BlockSession(spec, {"prefill": FakeProgram("prefill"), "step": broken})
    prompts = [[1] * 3, [2] * 3, [4] * 9, [5] * 9]  # the first batch takes two steps
    with pytest.raises(error, match=re.escape(message)):
        session.generate(prompts, max_new_tokens=5, policy=FixedSteps(2), max_batch=2)
    assert session.kv.pages > 0
    assert session.kv.free_pages == session.kv.pages
