"""What a pass declares for itself: states per sequence, and what the loop offers to everybody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError, LoweringError
from dgraph.lowering.program import ProgramResult
from dgraph.plans.regions import All, Block
from dgraph.plans.rows import RowPlan
from dgraph.runtime import BlockSession, FixedSteps
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.step_inputs import STEP_INPUTS
from dgraph.runtime.sampling.sampler import Sampler
from dgraph.types.shapes import InputSpec
from tests.runtime.fake import FakeProgram, fake_spec, offered
from tests.runtime.recorder import Recorder

BLOCKWISE = InputSpec("level", torch.float32, ("b", 2), reset="block", initial=0.5)
EIGHT_BITS = InputSpec("level", torch.float8_e4m3fn, ("b",), reset="response", initial=0.5)
LASTING = InputSpec("count", torch.int64, ("b",), reset="response", initial=3)
ABOUT = ("prompt_end", "response_end", "block_start", "block_end", "step", "block_step")


class Counting(FakeProgram):
    """Adds one to what it carries, for the sequences that have rows."""

    def __init__(self, kind: str):
        super().__init__(kind)
        self.inputs |= {spec.name: spec for spec in (BLOCKWISE, LASTING, *map(offered, ABOUT))}
        self.said: list[dict[str, list[Any]]] = []

    @property
    def output_names(self) -> frozenset[str]:
        return super().output_names | {"level", "count"}

    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        result = super().__call__(inputs, rows)
        self.said.append({name: inputs[name].tolist() for name in (*ABOUT, "level", "count")})
        for name in ABOUT:
            assert inputs[name].dtype == torch.int32
        result.outputs["level"] = inputs["level"] + 1
        took_part = inputs["cu_rows"].diff() > 0
        result.outputs["count"] = inputs["count"] + torch.where(took_part, 1, 99)
        return result


PROMPTS = [[1] * 3, [2] * 9, [4] * 6]


def run(attention: str, kind: str = "step", pool: GraphPool | None = None, **options: Any) -> tuple[Counting, Any]:
    """Three prompts in two slots; every block of 4 takes two steps."""
    shift = int(attention == "shifted")
    causal = attention == "block_causal"
    facts = {"attention": "block_causal" if causal else "bidirectional", "logit_shift": shift, "eos_ids": ()}
    step = Counting(kind)
    programs = {"step": step} | ({"prefill": FakeProgram("prefill")} if causal else {})
    session = BlockSession(
        fake_spec(4, **facts), programs, pool=pool, plan=None if causal else RowPlan(Block()), page_size=4
    )
    out = session.generate(PROMPTS, max_new_tokens=8, policy=FixedSteps(2), max_batch=2, **options)
    return step, out


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("attention", ["block_causal", "bidirectional", "shifted"])
def test_states_are_carried_and_reset(attention: str, pool: bool) -> None:
    """Of a block with each block, of a response with each response; none sees what another left in its slot."""
    step, _ = run(attention, pool=GraphPool(recorder=Recorder) if pool else None)
    for said in step.said:
        for s, prompt_end in enumerate(said["prompt_end"]):
            if said["response_end"][s] - prompt_end != 8 or prompt_end == 0:
                continue  # pads the batch
            if said["block_start"][s] >= said["response_end"][s]:
                continue
            assert said["count"][s] == 3 + said["step"][s]
            assert said["level"][s] == [0.5 + said["block_step"][s]] * 2
            assert said["block_end"][s] == said["block_start"][s] + 4
    begun = {said["prompt_end"][s] for said in step.said for s in range(2) if said["step"][s] == 0}
    assert begun == {3, 9, 6}
    first = step.said[0]
    ends, width = [len(p) for p in PROMPTS[:2]], 4 if attention == "block_causal" else 1
    assert first["prompt_end"][:2] == ends
    assert first["response_end"][:2] == [end + 8 for end in ends]
    assert first["block_start"][:2] == [end // width * width for end in ends]
    assert max(max(said["block_step"]) for said in step.said) >= 1
    assert max(max(said["step"]) for said in step.said) >= 3


@pytest.mark.parametrize("pool", [False, True])
def test_a_state_may_have_eight_bits(pool: bool) -> None:
    said: list[tuple[int, float]] = []

    class Eight(FakeProgram):
        def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
            level, result = inputs["level"].float(), super().__call__(inputs, rows)
            took_part = inputs["cu_rows"].diff() > 0
            said.extend(zip(inputs["step"][took_part].tolist(), level[took_part].tolist(), strict=True))
            result.outputs["level"] = (level + 1).to(EIGHT_BITS.dtype)
            return result

        @property
        def output_names(self) -> frozenset[str]:
            return super().output_names | {"level"}

    step = Eight("step")
    step.inputs |= {spec.name: spec for spec in (EIGHT_BITS, offered("step"))}
    programs = {"step": step, "prefill": FakeProgram("prefill")}
    session = BlockSession(fake_spec(4, eos_ids=()), programs, pool=GraphPool(recorder=Recorder) if pool else None)
    session.generate(PROMPTS, max_new_tokens=8, policy=FixedSteps(2), max_batch=2)
    assert {step for step, _ in said} >= {0, 1, 2, 3}
    assert all(level == 0.5 + step for step, level in said)


def test_a_response_state_goes_through_the_prefill() -> None:
    prefill, step = Counting("prefill"), Counting("step")
    programs = {"prefill": prefill, "step": step}
    session = BlockSession(fake_spec(4, eos_ids=()), programs)
    session.generate(PROMPTS, max_new_tokens=4, policy=FixedSteps(2))
    assert prefill.said[0]["count"] == [3, 3, 3]
    assert step.said[0]["count"] == [3, 4, 4]  # the first prompt has no whole block
    assert step.said[0]["level"] == [[0.5, 0.5]] * 3


def test_under_guidance_there_are_two_of_each() -> None:
    """The second call of a step, without the prompts, is given what it returned, not what the first one did."""

    class Halving(Counting):
        def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
            result = super().__call__(inputs, rows)
            if len(self.said) % 2 == 0:
                result.outputs["count"] = inputs["count"] - 1
            return result

    step = Halving("logits")
    spec = fake_spec(4, attention="bidirectional", eos_ids=())
    session = BlockSession(spec, {"step": step}, plan=RowPlan(All()))
    session.generate([[1] * 3], max_new_tokens=8, policy=FixedSteps(2), sampler=Sampler(cfg_scale=1.0))
    assert len(step.said) >= 8
    for number, (guided, other) in enumerate(zip(step.said[::2], step.said[1::2], strict=True)):
        assert guided["count"] == [3 + number]
        assert other["count"] == [3 - number]


def test_an_observer_sees_them() -> None:
    records: list[Any] = []
    run("bidirectional", observer=records.append)
    assert all(torch.equal(r.states_after["level"], r.states["level"] + 1) for r in records)
    assert {name for r in records for name in r.states} == {"level", "count"}


def test_declarations_that_cannot_be() -> None:
    with pytest.raises(InputError, match=r"'x': an input per row .* resets with 'step', got 'block'"):
        InputSpec("x", torch.float32, ("N",), reset="block")
    with pytest.raises(InputError, match=r"per position .* resets with 'never' or 'response', got 'step'"):
        InputSpec("x", torch.float32, ("pages", "page"), reset="step")
    spec = fake_spec(4)

    def session(*inputs: InputSpec) -> BlockSession:
        step = FakeProgram("step")
        step.inputs |= {i.name: i for i in inputs}
        return BlockSession(spec, {"prefill": FakeProgram("prefill"), "step": step})

    with pytest.raises(LoweringError, match="'level' is a state that resets with a block, but no program returns it"):
        session(BLOCKWISE)
    with pytest.raises(LoweringError, match=r"'step' is declared as torch.float64 per sequence; the decode loop"):
        session(replace(offered("step"), dtype=torch.float64))
    with pytest.raises(LoweringError, match=r"programs 'prefill' and 'step' declare the input 'k_cache_0' differently"):
        session(InputSpec("k_cache_0", torch.float32, ("pages", "page", 5)))


def test_the_table_says_what_is_computed() -> None:
    """Of every offer dtype and size are those that it is declared with, on both families."""
    for attention, kind in (("block_causal", "step"), ("bidirectional", "step")):
        step = FakeProgram(kind)
        names = [
            n for n, o in STEP_INPUTS.items() if not o.needs and o.value is not None and n not in ("noise", "script")
        ]
        step.inputs |= {name: offered(name) for name in names}
        programs = {"step": step} | ({"prefill": FakeProgram("prefill")} if attention == "block_causal" else {})
        BlockSession(fake_spec(4, attention=attention), programs).generate(
            PROMPTS[:2], max_new_tokens=4, policy=FixedSteps(2)
        )
        for call in step.calls:
            sizes = {"row": len(call["positions"]), "sequence": 2, "offsets": 3}
            for name in names:
                assert call[name].dtype == STEP_INPUTS[name].dtype, name
                assert len(call[name]) == sizes[STEP_INPUTS[name].per], name
