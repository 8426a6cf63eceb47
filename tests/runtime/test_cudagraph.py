"""The buffers, keys and limits of captured stages, with a recorder in the place of a CUDA graph.

The recorder runs the captured function on each replay. Like a CUDA graph it sees only the buffers that it was captured
with, so a stage that forgot to fill a buffer replays old values here, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import DgraphWarning, InputError, LoweringError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.instructions import Instruction, Register, Registers
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.stage import LoweredStage, Runner, run_in_order
from dgraph.recipes import RECIPES, build
from dgraph.runtime.graphs.pool import IDLE, GraphPool
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import Candidates, ConfidenceThreshold, FixedSteps, Policy, policy_key
from dgraph.runtime.results import Generation
from tests.kv import kv_pairs
from tests.oracle.models import mask_id, random_weights, tiny_config, to_transformers
from tests.runtime.recorder import Recorder


@pytest.fixture(scope="module")
def phases() -> tuple[dgraph.Model, dict[str, dgraph.Graph]]:
    config = tiny_config(layers=3)
    model = dgraph.adopt(to_transformers(config, random_weights(config, 3)), mask_id=mask_id(config), block_length=16)
    recipe = build(RECIPES, "focus", model.spec, {})
    return model, {name: phase.graph for name, phase in dgraph.rewrite(dgraph.capture(model), recipe).items()}


def generate(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]], runner: Callable[[LoweredStage], Runner], calls: int = 1
) -> Generation:
    model, graphs = phases
    compiler, buckets = RegionCompiler("eager"), Buckets.of("hybrid")
    programs = {name: LoweredProgram(graph, compiler, buckets, runner) for name, graph in graphs.items()}
    session = BlockSession(model.spec, programs, block_cache="dc+")
    prompts = [list(range(6, 30)), list(range(40, 45)), list(range(50, 82))]
    for _ in range(calls):
        result = session.generate(prompts, max_new_tokens=40, policy=ConfidenceThreshold(0.7), keep_kv=True)
    return result


def test_replayed_stages_give_what_plain_steps_give(phases: tuple[dgraph.Model, dict[str, dgraph.Graph]]) -> None:
    recorders: list[Recorder] = []

    def capture(function: Callable[[], None]) -> Recorder:
        recorders.append(Recorder(function))
        return recorders[-1]

    pool = GraphPool(recorder=capture)
    plain, graphed = generate(phases, run_in_order), generate(phases, pool.runner, calls=2)
    assert graphed.token_ids == plain.token_ids
    assert all(torch.equal(*pair) for pair in kv_pairs(graphed, plain))
    assert {name for name, _ in pool.recorded} == {"step", "prefix", "suffix"}
    assert len(pool.recorded) == len(recorders) == len(set(pool.recorded)), "a bucket was captured twice"
    assert sum(r.replays for r in recorders) > 2 * len(recorders), "buckets were not reused"
    assert not pool.refused


def test_a_stage_runs_once_where_it_is_captured() -> None:
    """Capturing ran it; one that compares rows with what it cached of them would find nothing new the second time."""
    cache, x = torch.zeros(1, 4), torch.arange(4.0)
    pool = GraphPool(recorder=Recorder)
    step = stage_of(pool)
    for count in (1, 2, 3):
        step(cache, x)
        assert cache.equal(count * x[None])
    assert pool.recorded == [("step", 4)]


def test_a_full_pool_runs_further_buckets_step_by_step_and_says_so(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgraph.runtime.graphs.pool.IDLE", 10**6)
    pool = GraphPool(limit=1, recorder=Recorder)
    with pytest.warns(DgraphWarning, match="1 CUDA graphs are in use.* on .* rows runs op by op") as seen:
        result = generate(phases, pool.runner)
    assert len(seen) == 1, "once, not in every step"
    assert result.token_ids == generate(phases, run_in_order).token_ids
    assert len(pool.recorded) == 1
    assert len(pool.refused) == len(set(pool.refused)) > 1
    assert all("limit of 1" in reason for _, _, reason in pool.refused)


def stage_of(pool: GraphPool, name: str = "step") -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A stage that adds rows to a cache in place."""
    stage = LoweredStage(
        name=name,
        bridge=(),
        instructions=(Instruction(torch.Tensor.add_, [Register(0), Register(1)], ()),),
        inputs=(0, 1),
        rowed=frozenset({1}),
        in_place=frozenset({0}),
        sources=frozenset(),
        index=None,
        ahead=(),
        outputs=(),
        live=None,
        graph_rows=None,
    )
    run = pool.runner(stage)
    return lambda cache, x: run(Registers([cache, x]))(len(x))


def test_graphs_of_caches_that_have_grown_are_let_go() -> None:
    """They counted toward the limit, so that after enough growth every stage ran op by op."""
    pool = GraphPool(limit=2, recorder=Recorder)
    step = stage_of(pool)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DgraphWarning)
        for pages in range(1, 9):
            cache, x = torch.zeros(pages, 4), torch.arange(4.0)
            pool.keep({"k_cache_0": cache})
            for count in (1, 2, 3):
                step(cache, x)
                assert cache.equal((count * x).expand(pages, 4))
            assert pool.live == 1
    assert len(pool.recorded) == 8
    assert not pool.refused


def test_a_cache_that_has_grown_where_it_lies_is_another_one() -> None:
    """An allocator hands out pieces of 2 MiB, so a few pages more may begin where the old ones did. Bulk copies of a
    graph that was recorded before take what lies after the old pages for zeros.
    """
    pool, room, x = GraphPool(recorder=Recorder), torch.zeros(3, 4), torch.arange(4.0)
    step = stage_of(pool)
    for pages in (2, 3, 3):
        cache = room[:pages].zero_()
        pool.keep({"k_cache_0": cache})
        step(cache, x)
        assert cache.equal(x.expand(pages, 4))
        assert pool.live == 1
    assert len(pool.recorded) == 2


def test_a_session_lets_graphs_go_when_its_caches_grow(phases: tuple[dgraph.Model, dict[str, dgraph.Graph]]) -> None:
    pool = GraphPool(recorder=Recorder)
    session = recorded_session(phases, pool)
    options: dict[str, Any] = {"max_new_tokens": 20, "policy": ConfidenceThreshold(0.7)}
    for length in (10, 40, 70):
        before = len(pool.recorded)
        session.generate([list(range(6, 6 + length))], **options)
        stages = [name for name, _ in pool.recorded[before:] if name != "transition"]
        assert stages
        assert pool.live == len(stages) + 1, "the transition stays, graphs of caches that are gone do not"
    reserved = recorded_session(phases, GraphPool(recorder=Recorder))
    reserved.kv.reserve(reserved.kv.pages_for(96))
    for length in (10, 40, 70):
        reserved.generate([list(range(6, 6 + length))], **options)
    assert reserved.pool is not None
    names = [name for name, _ in reserved.pool.recorded]
    assert reserved.pool.live == len(names), "caches of their final size: nothing is let go"


def test_a_full_pool_lets_an_idle_graph_go() -> None:
    pool = GraphPool(limit=2, recorder=Recorder)
    cache, x = torch.zeros(1, 1), torch.ones(1)
    first, second, third = (stage_of(pool, name) for name in ("first", "second", "third"))
    first(cache, x)
    second(cache, x)
    with pytest.warns(DgraphWarning, match="2 CUDA graphs are in use"):
        third(cache, x)
    assert pool.refused == [("third", 1, "limit of 2 graphs")]
    for _ in range(IDLE * pool.limit):
        second(cache, x)
    third(cache, x)
    assert [name for name, _ in pool.recorded] == ["first", "second", "third"]
    assert pool.live == 2
    assert float(cache) == 3 + IDLE * pool.limit + 1


def test_a_bucket_that_does_not_fit_runs_step_by_step(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]],
) -> None:
    def capture(function: Callable[[], None]) -> Recorder:
        raise torch.OutOfMemoryError("no memory for this bucket\nand more")

    pool = GraphPool(recorder=capture)
    assert generate(phases, pool.runner).token_ids == generate(phases, run_in_order).token_ids
    assert not pool.recorded
    assert {reason for _, _, reason in pool.refused} == {"no memory for this bucket"}


def recorded_session(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]], pool: GraphPool, buckets: str = "hybrid", prompt: int = 64
) -> BlockSession:
    """prompt: rows of prompts that are recorded, at most."""
    model, graphs = phases
    compiler = RegionCompiler("eager")
    how: dict[str, dict[str, Any]] = {"step": {}, "prefill": {"graph_rows": prompt, "name": "prefill"}}
    programs = {
        name: LoweredProgram(graph, compiler, Buckets.of(buckets), pool.runner, **how[name])
        for name, graph in graphs.items()
    }
    return BlockSession(model.spec, programs, block_cache="dc+", pool=pool)


def test_prompts_of_few_rows_are_replayed_and_of_many_are_not(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]],
) -> None:
    pool = GraphPool(recorder=Recorder)
    session = recorded_session(phases, pool, prompt=40)
    session.kv.reserve(64)
    options: dict[str, Any] = {"max_new_tokens": 20, "policy": ConfidenceThreshold(0.7), "keep_kv": True}
    batches = [
        [list(range(6, 30))],  # one block of 16
        [list(range(40, 62))],
        [list(range(6, 26)), list(range(30, 49))],  # two blocks: 32 rows
        [list(range(6, 54))],  # three, which are padded to 64
    ]
    for batch in batches:
        want = generate_plainly(phases, batch, **options)
        got = session.generate(batch, **options)
        assert got.token_ids == want.token_ids
        assert all(torch.equal(*pair) for pair in kv_pairs(got, want))
    assert [rows for name, rows in pool.recorded if name == "prefill"] == [16, 32]
    assert pool.refused == [("prefill", 64, "more than 40 rows")]
    before = list(pool.recorded)
    session.generate(batches[0], **options)
    assert pool.recorded == before


def generate_plainly(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]], prompts: list[list[int]], **options: Any
) -> Generation:
    model, graphs = phases
    programs = {name: LoweredProgram(g, RegionCompiler("eager"), Buckets.of("hybrid")) for name, g in graphs.items()}
    return BlockSession(model.spec, programs, block_cache="dc+").generate(prompts, **options)


@pytest.mark.parametrize("policy", [ConfidenceThreshold(0.7), FixedSteps(5)], ids=["threshold", "steps"])
def test_a_captured_transition_gives_what_plain_steps_give(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]], policy: Policy
) -> None:
    pool = GraphPool(recorder=Recorder)
    session = recorded_session(phases, pool)
    first = [list(range(6, 30)), list(range(40, 45)), list(range(50, 82))]
    second = [list(range(9, 50)), list(range(60, 63)), [7]]
    for prompts in (first, second, first):
        plain = recorded_session(phases, GraphPool(limit=0, recorder=Recorder)).generate(
            prompts, max_new_tokens=40, policy=policy, observer=lambda record: None
        )
        graphed = session.generate(prompts, max_new_tokens=40, policy=policy)
        assert graphed.token_ids == plain.token_ids
        assert graphed.stats.sequence_steps == plain.stats.sequence_steps
        assert graphed.stats.rows == plain.stats.rows
    assert [name for name, _ in pool.recorded].count("transition") == 1, "batches of one shape share a capture"
    session.generate(first, max_new_tokens=40, policy=policy, temperature=0.8)
    assert [name for name, _ in pool.recorded].count("transition") == 2


def test_draws_in_a_captured_transition_follow_seed_and_prompt(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]],
) -> None:
    session = recorded_session(phases, GraphPool(recorder=Recorder))
    prompts = [list(range(6, 30)), list(range(40, 45)), list(range(50, 82))]
    options = {"max_new_tokens": 40, "policy": FixedSteps(4), "temperature": 1.2}
    runs = [session.generate(prompts, seed=seed, **options).token_ids for seed in (3, 4, 3)]
    assert runs[0] == runs[2] != runs[1]
    alone = recorded_session(phases, GraphPool(recorder=Recorder)).generate(prompts, seed=3, max_batch=1, **options)
    assert alone.token_ids == runs[0]


def test_a_warm_session_captures_no_further_stage(phases: tuple[dgraph.Model, dict[str, dgraph.Graph]]) -> None:
    pool = GraphPool(recorder=Recorder)
    session = recorded_session(phases, pool)
    seen: list[tuple[int, int]] = []
    count = session.warm_up(3, 80, lambda done, all_of_them: seen.append((done, all_of_them)))
    assert seen == [(i + 1, count) for i in range(count)]
    sizes, recorded = Buckets.of("hybrid").up_to(3 * 32), len(pool.recorded)
    wanted = [(stage, size) for stage in ("prefix", "suffix") for size in sizes]
    wanted += [("prefill", size) for size in (16, 32, 64)]  # of a block, and at most of as many rows as are recorded
    assert sorted(pool.recorded) == sorted(wanted)
    assert count == len(sizes) + 3
    for prompts in ([list(range(6, 30)), list(range(40, 45)), list(range(50, 82))], [list(range(9, 19))]):
        session.generate(prompts, max_new_tokens=40, policy=ConfidenceThreshold(0.7))
    assert {name for name, _ in pool.recorded[recorded:]} == {"transition"}


def test_a_warm_up_that_cannot_be(phases: tuple[dgraph.Model, dict[str, dgraph.Graph]]) -> None:
    pool = GraphPool(recorder=Recorder)
    with pytest.raises(InputError, match="'exact' cannot be prepared ahead"):
        recorded_session(phases, pool, "exact").warm_up(2, 64)
    with pytest.raises(InputError, match="batch of at least 1 and 1 to"):
        recorded_session(phases, pool).warm_up(0, 64)
    model, graphs = phases
    plain = BlockSession(
        model.spec, {name: LoweredProgram(g, RegionCompiler("eager"), Buckets()) for name, g in graphs.items()}
    )
    with pytest.raises(InputError, match="this session runs without"):
        plain.warm_up(2, 64)


def test_a_policy_that_reads_on_the_host_is_named(phases: tuple[dgraph.Model, dict[str, dgraph.Graph]]) -> None:
    class Reads(ConfidenceThreshold):
        pass

    def capture(function: Callable[[], None]) -> Recorder:
        if function.__qualname__.startswith("StepTransition"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return Recorder(function)

    session = recorded_session(phases, GraphPool(recorder=capture))
    with pytest.raises(LoweringError, match="Policy Reads may read values on the host; decode with graphs=False"):
        session.generate([list(range(6, 30))], max_new_tokens=40, policy=Reads(0.7))


def test_an_equal_policy_with_state_of_its_own_is_another_policy(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]],
) -> None:
    """A captured transition reads the tensors of the policy that it was captured with."""

    class AtLeast(ConfidenceThreshold):
        def __init__(self, least: float):
            super().__init__(0.99)
            object.__setattr__(self, "least", torch.tensor(least))

        def choose(self, candidates: Candidates) -> torch.Tensor:
            return super().choose(candidates) | (candidates.committable & (candidates.confidence >= self.least))

    everything, nothing = AtLeast(0.0), AtLeast(2.0)
    assert everything == nothing
    session = recorded_session(phases, GraphPool(recorder=Recorder))
    prompts = [list(range(6, 30)), list(range(40, 45)), list(range(50, 82))]
    steps = []
    for policy in (everything, nothing, everything):
        want = recorded_session(phases, GraphPool(limit=0, recorder=Recorder)).generate(
            prompts, max_new_tokens=40, policy=policy, observer=lambda record: None
        )
        got = session.generate(prompts, max_new_tokens=40, policy=policy)
        assert got.token_ids == want.token_ids
        assert got.stats.sequence_steps == want.stats.sequence_steps
        steps.append(sum(got.stats.sequence_steps))
    assert steps[0] == steps[2] < steps[1]


def test_only_values_share_what_was_captured() -> None:
    class Holds(ConfidenceThreshold):
        pass

    holds = Holds(0.5)
    object.__setattr__(holds, "seen", torch.zeros(1))
    assert policy_key(ConfidenceThreshold(0.5)) == policy_key(ConfidenceThreshold(0.5))
    assert policy_key(ConfidenceThreshold(0.5)) != policy_key(ConfidenceThreshold(0.6))
    assert policy_key(Holds(0.5)) == policy_key(Holds(0.5)), "nothing of its own"
    assert policy_key(holds) == policy_key(holds)
    assert policy_key(holds) != policy_key(Holds(0.5))
    assert policy_key(object()) != policy_key(object())  # type: ignore[arg-type]
