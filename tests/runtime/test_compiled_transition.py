"""The transition between steps, traced and compiled, leaves every tensor as the ops one by one do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.families import families
from dgraph.lowering.inductor import Compiled, Source
from dgraph.lowering.traced import TraceCompiler, trace
from dgraph.plans.kv import KVPlan
from dgraph.plans.regions import Block, Next, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart, Counted, FirstShare
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.batch_config import BatchConfig
from dgraph.runtime.loop.scripted_policy import BlockStep, Script
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.loop.transition import TRANSITION_PARTS, StepTransition, TransitionPart
from dgraph.runtime.policies import (
    POLICIES,
    PRESETS,
    Candidates,
    ConfidenceThreshold,
    Dream,
    Factor,
    Policy,
    PolicyMix,
    SelfSpeculation,
    policy_of,
    statistics_of,
    traits_of,
)
from dgraph.runtime.requests import Request
from dgraph.runtime.state.bidirectional import BidirectionalState
from dgraph.runtime.state.block_causal import BlockCausalState
from dgraph.runtime.state.encode_denoise import EncodeDenoiseState
from dgraph.runtime.state.initial import write_request_settings
from dgraph.runtime.state.state_init import StateInit
from dgraph.runtime.state.uniform_noise import UniformNoiseState
from tests.amounts import every_value
from tests.plans.outside import Stride, Thirds
from tests.runtime.fake import REACHED, FakeProgram, fake_spec, offered, summary
from tests.runtime.recorder import Recorder

MASK, BLOCK = 99, 8
NEEDED: dict[str, dict[str, Any]] = {
    "confidence_threshold": {"threshold": 0.6},
    "fixed_steps": {"steps": 3},
    "renoise": {"steps": 3},
}
RULES: dict[str, Policy] = {
    **{name: policy_of(name, **NEEDED.get(name, {})) for name in POLICIES},
    **{name: PRESETS[name] for name in ("dkv_greedy", "dinfer_factor", "hierarchical_fast_v2", "llada_random")},
    **{name: PRESETS[name] for name in ("jetengine_dynamic", "dream_origin", "dream_topk_margin", "fast_dllm")},
    "dream_warm": Dream(alg="maskgit_plus", alg_temp=0.5),
    "script": Script(BLOCK, (tuple(BlockStep((c,), tuple(range(c, BLOCK))) for c in range(BLOCK)),)),
}
CAUSAL = {name: rule for name, rule in RULES.items() if traits_of(rule).autoregressive}
RENOISING = {name: rule for name, rule in RULES.items() if traits_of(rule).renoises}
PLANS = {
    "step": None,
    "mixed": None,
    "open": None,
    "encode": None,
    "causal": None,
    "causal mixed": None,
    "kept": None,
    "random": None,
    "canvas": RowPlan(Block()),
    "every": RowPlan(Response(), Counted(every=3, full_steps=1)),
    "hidden": RowPlan(Stride(3), Thirds() | FirstShare(0.2) | Apart(5, 4)),
    "next": RowPlan(Next(around=2), Counted(every=3)),
}


def transition_of(kind: str, policy: Policy, **rule: Any) -> StepTransition:
    """Two sequences of unequal lengths before their first step; some of the second's response is fixed."""
    canvas = torch.tensor([[1, 2, 3, *[MASK] * 37], [4, 5, 6, 7, 8, *[MASK] * 2, 9, *[MASK] * 9, 9, *[MASK] * 22]])
    which = torch.arange(2), torch.tensor([3, 5])
    facts: dict[str, Any] = {"max_new_tokens": 18, "block": BLOCK, "mask_id": MASK, "stop_ids": torch.tensor([50])}
    plan, mixed, open_blocks = PLANS[kind], 9 if "mixed" in kind else 0, 3 if kind == "open" else 1
    if kind in ("encode", "causal", "causal mixed", "kept"):
        kv = KVPlan("response", pairs=(3,)) if kind == "kept" else None
        state: Any = EncodeDenoiseState.begin(
            StateInit(canvas, *which, **facts, shift=1, causal="causal" in kind, kv=kv, most_mixed=mixed)
        )
    elif kind == "random":
        state = UniformNoiseState.begin(StateInit(canvas, *which, **facts, vocab=90))
    elif plan is None:
        state = BlockCausalState.begin(StateInit(canvas, *which, **facts, most_mixed=mixed, open=open_blocks))
    else:
        state = BidirectionalState.begin(StateInit(canvas, *which, **facts, plan=plan, shift=1))
    defaults: dict[str, Any] = {"block_cache": "off", "recommit": True, "select_noise": False}
    offers = ["input_ids", "positions", "limit", "masked", "candidate", "cu_rows", "average", "block_end", "step"]
    offers += ["in_block", "sequence_average"]
    offers += [*["full", "changed"] * (plan is not None), *["script"] * rule.pop("scripted", False), "temperature"]
    offers += [*["noise"] * bool(rule.get("select_noise")), *["window", "action"] * (kind == "kept")]
    defaults["inputs"] = (*map(offered, offers), REACHED)
    heat, mixture = rule.pop("temperature", 0.0), PolicyMix.of([policy])
    decoding = Decoding(policy=policy, temperature=heat, seed=rule.pop("seed", 5), open_blocks=open_blocks)
    write_request_settings(state, mixture, [Request([1], decoding, index) for index in range(2)])
    transition = StepTransition(BatchConfig(mixture, **defaults | {"sampled": heat > 0} | rule), state, state.capacity)
    if mixed:
        transition.mix([1], [4])
        transition.pack()
    return transition


def outputs(transition: StepTransition, draw: torch.Generator, evicting: bool) -> dict[str, Tensor]:
    """What a program might say; with eviction, of the live rows all but every third, others in each step."""
    n, rows = transition.capacity, transition.rows
    count = int(rows.cu_rows[-1])
    first = transition._steps
    some = [r for r in range(count) if not evicting or (r + first) % 3 or not bool(rows.candidate[r])]
    kept = torch.tensor(some, dtype=torch.int64)
    said = {
        "token": torch.randint(0, 90, (n,), generator=draw),
        "confidence": torch.rand(n, generator=draw),
        "margin": torch.rand(n, generator=draw),
        "entropy": torch.rand(n, generator=draw),
    }
    if asked := statistics_of(transition.config.policy):
        said["measured"] = torch.randint(0, 90, (n, len(asked)), generator=draw).float()
    if traits_of(transition.config.policy).renoises:
        said["draw"] = torch.randint(0, 90, (n,), generator=draw)
    if evicting:
        said["kept"] = torch.full((n,), -1).index_copy(0, torch.arange(len(kept)), kept)
        said["reached"] = transition.inputs["reached"] + 1
    return said


def interpreted(transition: StepTransition, part: TransitionPart) -> Any:
    """A part of the transition as traced, run op by op."""
    held = transition._held(part)
    traced = trace(transition._traceable(part, held), held)
    return traced.on(held, traced.source.module())


def tensors_of(transition: StepTransition) -> list[Tensor]:
    """All that a step changes."""
    return transition._held(TRANSITION_PARTS[0])


def same(one: StepTransition, other: StepTransition) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def check_steps(plain: StepTransition, other: StepTransition, steps: int, evicting: bool) -> None:
    """Traced in its first step, `other` goes where `plain` goes."""
    draw = torch.Generator().manual_seed(3)
    runs: list[Any] = []
    for _ in range(steps):
        said = outputs(plain, draw, evicting)
        plain.take(said)
        plain.move()
        other.take(said)
        runs = runs or [interpreted(other, part) for part in TRANSITION_PARTS]
        for run in runs:
            run()
        assert same(plain, other)


@every_value(("kind", ["step", "canvas", "encode"]), ("name", sorted(RULES.keys() - CAUSAL.keys() - RENOISING.keys())))
def test_every_rule_can_be_traced(kind: str, name: str) -> None:
    check_rule(kind, name)


@pytest.mark.parametrize("kind", ["mixed", "causal mixed"])
def test_a_prompt_among_the_rows_of_a_step(kind: str) -> None:
    check_rule(kind, "confidence_threshold")


@pytest.mark.parametrize("name", ["confidence_threshold", "dynamic_threshold", "relative_threshold"])
def test_several_open_blocks_of_a_sequence(name: str) -> None:
    check_rule("open", name)


def test_keys_that_are_chosen_when_a_block_is_denoised() -> None:
    check_rule("kept", "confidence_threshold")


@pytest.mark.parametrize("name", [*CAUSAL, "confidence_threshold"])
def test_every_rule_of_causal_rows_can_be_traced(name: str) -> None:
    check_rule("causal", name)


@pytest.mark.parametrize("name", RENOISING)
def test_every_rule_of_random_canvases_can_be_traced(name: str) -> None:
    check_rule("random", name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("every", "confidence_threshold"),
        ("hidden", "confidence_threshold"),
        *(("next", name) for name, rule in RULES.items() if traits_of(rule).foresees),
    ],
)
def test_every_plan_can_be_traced(kind: str, name: str) -> None:
    check_rule(kind, name)


def check_rule(kind: str, name: str) -> None:
    policy = RULES[name]
    evicting = kind == "step" and name != "script"
    plain, other = transition_of(kind, policy), transition_of(kind, policy)
    check_steps(plain, other, 10, evicting)
    assert summary(plain.state)[2] > BLOCK // 2, "hardly anything was decoded"


@pytest.mark.parametrize(
    "rule",
    [
        {"block_cache": "dc+", "recommit": False},
        {"block_cache": "dc"},
        {"temperature": 0.7},
        {"select_noise": True},
    ],
    ids=str,
)
def test_every_setting_can_be_traced(rule: dict[str, Any]) -> None:
    plain, other = (transition_of("step", ConfidenceThreshold(0.6), **rule) for _ in range(2))
    check_steps(plain, other, 12, True)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """Grows by all tensors of the transition after every step."""
    seen: list[list[Tensor]] = []
    move = StepTransition.move

    def watched(self: StepTransition, *args: Any, **options: Any) -> Any:
        found = move(self, *args, **options)
        seen.append([tensor.clone() for tensor in tensors_of(self)])
        return found

    monkeypatch.setattr(StepTransition, "move", watched)
    return seen


def session_of(model: str, recipe: str, compiler: TraceCompiler | None) -> BlockSession:
    given = families()[model].random() if model in families() else model
    made = dgraph.optimize(given, recipe, backend="eager", buckets="hybrid", artifacts=False)
    chosen = made.recipe
    return BlockSession(
        made.spec,
        made.programs,
        block_cache=chosen.block_cache,  # type: ignore[arg-type]
        recommit=chosen.recommit,
        plan=chosen.plan,
        kv=chosen.kv,
        pool=GraphPool(recorder=Recorder),
        compiler=compiler,
    )


PROMPTS = [list(range(6, 16)), list(range(40, 45))]


@pytest.mark.parametrize(
    ("model", "recipe", "policy", "temperature"),
    [
        ("tiny_sdar", "focus", None, 0.0),
        pytest.param("tiny_llada", "dense", Factor(), 0.9, marks=pytest.mark.release),
        pytest.param("nemotron", "dense", SelfSpeculation(), 0.0, marks=pytest.mark.release),
    ],
    ids=["sdar", "llada", "nemotron"],
)
def test_a_warm_session_runs_compiled_transitions(
    model: str, recipe: str, policy: Policy | None, temperature: float, states: list[list[Tensor]]
) -> None:
    compiler = TraceCompiler()
    session = session_of(model, recipe, compiler)
    used = policy or ConfidenceThreshold(0.9)
    options: dict[str, Any] = {"max_new_tokens": 12, "policy": used, "temperature": temperature}
    plain = session_of(model, recipe, None)
    want = plain.generate(PROMPTS, **options)
    plain, compiled_ahead = list(states), len(compiler.compiled)
    states.clear()
    assert compiled_ahead == 0
    session.warm_up(2, 64, policy=policy, temperature=temperature)
    assert len(compiler.compiled) == 2, "transition and packing"
    got = session.generate(PROMPTS, **options)
    assert compiler.compiled + compiler.loaded == compiler.compiled, "the very functions that were compiled"
    assert got.token_ids == want.token_ids
    assert len(states) == len(plain) > 3
    for mine, theirs in zip(states, plain, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if one.shape == other.shape:  # a warm session pads the canvas to what it was told
                assert torch.equal(one, other)
    assert not compiler.refused


class Waits(ConfidenceThreshold):
    """Reads a number on the host, which a CPU allows."""

    def choose(self, candidates: Candidates) -> Tensor:
        return super().choose(candidates) & (candidates.confidence > min(0.0, candidates.confidence.max().item()))


def captured(policy: Policy, compiler: TraceCompiler | None, steps: int = 4) -> StepTransition:
    """After some steps, the later ones replayed from a capture."""
    transition = transition_of("step", policy)
    transition._pool, transition._compiler = GraphPool(recorder=Recorder), compiler
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        transition.take(outputs(transition, draw, False))
        transition.move()
    return transition


def test_without_a_warm_up_nothing_is_compiled() -> None:
    compiler = TraceCompiler()
    assert same(captured(ConfidenceThreshold(0.123), compiler), captured(ConfidenceThreshold(0.123), None))
    assert not compiler.compiled
    assert not compiler.loaded
    assert not compiler.refused


@pytest.mark.parametrize("often", [0, 5])
def test_what_runs_often_is_compiled_after_all(monkeypatch: pytest.MonkeyPatch, often: int) -> None:
    made: list[int] = []

    def compiled(source: Source, store: object, tell: object) -> Compiled:
        made.append(1)
        return Compiled(source.module(), {}, new=True)

    monkeypatch.setattr("dgraph.lowering.traced.compiled", compiled)
    compiler = TraceCompiler()
    compiler.often = often
    policy = ConfidenceThreshold(0.321)
    assert same(captured(policy, compiler, 4), captured(policy, None, 4))
    assert len(made) == 2 * (often == 0), "not yet"
    found = captured(policy, compiler, 9)
    assert same(found, captured(policy, None, 9))
    assert len(made) == 2, "transition and packing"
    assert found._pool is not None
    assert len(found._pool.recorded) == (1 if often == 0 else 2), "op by op, then compiled"


def test_a_policy_that_cannot_be_traced_runs_op_by_op_and_is_named() -> None:
    compiler = TraceCompiler()
    with pytest.warns(UserWarning, match="under policy Waits is not compiled and runs op by op: .*"):
        found = captured(Waits(0.7), compiler)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        captured(Waits(0.7), compiler)
    assert same(found, captured(Waits(0.7), None))
    assert len(compiler.refused) == 1


def test_a_policy_may_return_what_it_was_given() -> None:
    """The tensor is one of the state: what it becomes must not be read in its place."""

    class All(ConfidenceThreshold):
        def choose(self, candidates: Candidates) -> Tensor:
            return candidates.masked

    canvas = torch.tensor([[1, 2, 3, *[MASK] * 21]])
    state = BlockCausalState.begin(
        StateInit(
            canvas,
            torch.arange(1),
            torch.tensor([3]),
            max_new_tokens=13,
            block=BLOCK,
            mask_id=MASK,
            stop_ids=torch.tensor([50]),
            plan=RowPlan(Block()),
        )
    )
    mixture = PolicyMix.of([All(0.5)])
    write_request_settings(state, mixture, [Request([1], Decoding(policy=All(0.5)))])
    transition = StepTransition(BatchConfig(mixture, "off", True, False, False), state, state.capacity)
    masked = state.masked.clone()
    transition.take({"token": torch.full((16,), 7), "confidence": torch.full((16,), 0.5)})
    transition.move()
    assert state.changed is not None
    assert torch.equal(state.changed, masked)


def test_rules_differ_in_their_keys() -> None:
    """Two rules must not share what was compiled for one of them; what requests say for themselves does not count."""
    compiler = TraceCompiler()
    texts: list[Any] = []
    compiler._make = lambda name, function, inputs, ahead: texts.append(name)  # type: ignore[method-assign, assignment]
    for rule in ({}, {"seed": 7}, {"block_cache": "dc"}, {"temperature": 0.4}, {"temperature": 0.8}):
        for threshold in (0.5, 0.6):
            transition = transition_of("step", ConfidenceThreshold(threshold), **rule)
            transition._compiler = compiler
            transition.take(outputs(transition, torch.Generator(), False))
            transition._compiled(TRANSITION_PARTS[0])
    assert len(texts) == 3


@pytest.mark.parametrize(
    "facts",
    [{}, {"attention": "bidirectional"}, {"next_token": True}, {"next_token": True, "encoding": "causal"}],
    ids=str,
)
@pytest.mark.parametrize("slots", [1, 2])
def test_every_tensor_of_a_batch_has_memory_of_its_own(facts: dict[str, Any], slots: int) -> None:
    """Of a batch of one, too, where a slice of a table looks contiguous: no two may be updated in one kernel."""
    programs = {"step": FakeProgram("step"), "prefill": FakeProgram("prefill")}
    plan = RowPlan(Block()) if "attention" in facts else None
    session = BlockSession(fake_spec(4, **facts), programs, plan=plan, page_size=4)
    batch = session.batch([Decoding()], session.shape(slots, 40, 4, fixed=False))
    held = tensors_of(batch.transition)
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == len(held)
