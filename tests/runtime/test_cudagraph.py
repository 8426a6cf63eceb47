"""The buffers, keys and limits of captured stages, with a recorder in the place of a CUDA graph.

The recorder runs the captured function on each replay. Like a CUDA graph it sees only the buffers that it was captured
with, so a stage that forgot to fill a buffer replays old values here, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dgraph
from dgraph.errors import InputError, LoweringError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.plan import Runner, StagePlan, run_steps
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.steps import Slot, Slots, Step
from dgraph.recipes import RECIPES, build
from dgraph.runtime.cudagraph import GraphPool
from dgraph.runtime.policies import ConfidenceThreshold, FixedSteps, Policy
from dgraph.runtime.session import BlockSession, Generation
from tests.oracle.models import mask_id, random_weights, tiny_config, to_transformers


class Recorder:
    """Runs a function once when it is captured, and again on each replay."""

    def __init__(self, function: Callable[[], None]):
        self.function = function
        function()
        self.replays = 0

    def replay(self) -> None:
        """Run it on what its buffers hold now."""
        self.replays += 1
        self.function()


@pytest.fixture(scope="module")
def phases() -> tuple[dgraph.Model, dict[str, dgraph.Graph]]:
    config = tiny_config(layers=3)
    model = dgraph.adopt(to_transformers(config, random_weights(config, 3)), mask_id=mask_id(config), block_length=16)
    recipe = build(RECIPES, "focus", model.spec, {})
    return model, {name: phase.graph for name, phase in dgraph.rewrite(dgraph.capture(model), recipe).items()}


def generate(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]], runner: Callable[[StagePlan], Runner], calls: int = 1
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

    pool = GraphPool(capture=capture)
    plain, graphed = generate(phases, run_steps), generate(phases, pool.runner, calls=2)
    assert graphed.token_ids == plain.token_ids
    assert graphed.kv is not None
    assert plain.kv is not None
    for mine, theirs in zip(graphed.kv, plain.kv, strict=True):
        for got, want in zip(mine.layers, theirs.layers, strict=True):
            assert torch.equal(got[0][: mine.committed], want[0][: theirs.committed])
    assert {name for name, _ in pool.captured} == {"step", "prefix", "suffix"}
    assert len(pool.captured) == len(recorders) == len(set(pool.captured)), "a bucket was captured twice"
    assert sum(r.replays for r in recorders) > 2 * len(recorders), "buckets were not reused"
    assert not pool.refused


def test_a_stage_runs_once_where_it_is_captured() -> None:
    """Capturing ran it; one that compares rows with what it cached of them would find nothing new the second time."""
    cache, x = torch.zeros(1, 4), torch.arange(4.0)
    plan = StagePlan(
        name="step",
        bridge=(),
        steps=(Step(torch.Tensor.add_, [Slot(0), Slot(1)], ()),),
        inputs=(0, 1),
        in_place=frozenset({0}),
        sources=frozenset(),
        index=None,
        ahead=(),
        outputs=(),
        last=True,
        chunk_rows=None,
    )
    pool = GraphPool(capture=Recorder)
    run = pool.runner(plan)
    for count in (1, 2, 3):
        run(Slots([cache, x]))(4)
        assert cache.equal(count * x[None])
    assert pool.captured == [("step", 4)]


def test_a_full_pool_runs_further_buckets_step_by_step_and_says_so(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]],
) -> None:
    pool = GraphPool(limit=1, capture=Recorder)
    result = generate(phases, pool.runner)
    assert result.token_ids == generate(phases, run_steps).token_ids
    assert len(pool.captured) == 1
    assert pool.refused
    assert all("limit of 1" in reason for _, _, reason in pool.refused)


def test_a_bucket_that_does_not_fit_runs_step_by_step(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]],
) -> None:
    def capture(function: Callable[[], None]) -> Recorder:
        raise torch.OutOfMemoryError("no memory for this bucket\nand more")

    pool = GraphPool(capture=capture)
    assert generate(phases, pool.runner).token_ids == generate(phases, run_steps).token_ids
    assert not pool.captured
    assert {reason for _, _, reason in pool.refused} == {"no memory for this bucket"}


def captured_session(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]], pool: GraphPool, buckets: str = "hybrid"
) -> BlockSession:
    model, graphs = phases
    compiler = RegionCompiler("eager")
    programs = {
        name: LoweredProgram(graph, compiler, Buckets.of(buckets), run_steps if name == "prefill" else pool.runner)
        for name, graph in graphs.items()
    }
    return BlockSession(model.spec, programs, block_cache="dc+", pool=pool)


@pytest.mark.parametrize("policy", [ConfidenceThreshold(0.7), FixedSteps(5)], ids=["threshold", "steps"])
def test_a_captured_transition_gives_what_plain_steps_give(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]], policy: Policy
) -> None:
    pool = GraphPool(capture=Recorder)
    session = captured_session(phases, pool)
    first = [list(range(6, 30)), list(range(40, 45)), list(range(50, 82))]
    second = [list(range(9, 50)), list(range(60, 63)), [7]]
    for prompts in (first, second, first):
        plain = captured_session(phases, GraphPool(limit=0, capture=Recorder)).generate(
            prompts, max_new_tokens=40, policy=policy, observer=lambda record: None
        )
        graphed = session.generate(prompts, max_new_tokens=40, policy=policy)
        assert graphed.token_ids == plain.token_ids
        assert graphed.stats.sequence_steps == plain.stats.sequence_steps
        assert graphed.stats.rows == plain.stats.rows
    assert [name for name, _ in pool.captured].count("transition") == 1, "batches of one shape share a capture"
    session.generate(first, max_new_tokens=40, policy=policy, temperature=0.8)
    assert [name for name, _ in pool.captured].count("transition") == 2


def test_draws_in_a_captured_transition_follow_seed_and_prompt(
    phases: tuple[dgraph.Model, dict[str, dgraph.Graph]],
) -> None:
    session = captured_session(phases, GraphPool(capture=Recorder))
    prompts = [list(range(6, 30)), list(range(40, 45)), list(range(50, 82))]
    options = {"max_new_tokens": 40, "policy": FixedSteps(4), "temperature": 1.2}
    runs = [session.generate(prompts, seed=seed, **options).token_ids for seed in (3, 4, 3)]
    assert runs[0] == runs[2] != runs[1]
    alone = captured_session(phases, GraphPool(capture=Recorder)).generate(prompts, seed=3, max_batch=1, **options)
    assert alone.token_ids == runs[0]


def test_a_warm_session_captures_no_further_stage(phases: tuple[dgraph.Model, dict[str, dgraph.Graph]]) -> None:
    pool = GraphPool(capture=Recorder)
    session = captured_session(phases, pool)
    seen: list[tuple[int, int]] = []
    count = session.warm_up(3, 80, lambda done, all_of_them: seen.append((done, all_of_them)))
    assert seen == [(i + 1, count) for i in range(count)]
    sizes = Buckets.of("hybrid").up_to(3 * 32)
    assert sorted(pool.captured) == sorted((stage, size) for stage in ("prefix", "suffix") for size in sizes)
    for prompts in ([list(range(6, 30)), list(range(40, 45)), list(range(50, 82))], [list(range(9, 19))]):
        session.generate(prompts, max_new_tokens=40, policy=ConfidenceThreshold(0.7))
    assert {name for name, _ in pool.captured[2 * count :]} == {"transition"}


def test_a_warm_up_that_cannot_be(phases: tuple[dgraph.Model, dict[str, dgraph.Graph]]) -> None:
    pool = GraphPool(capture=Recorder)
    with pytest.raises(InputError, match="'exact' cannot be prepared ahead"):
        captured_session(phases, pool, "exact").warm_up(2, 64)
    with pytest.raises(InputError, match="batch of at least 1 and 1 to"):
        captured_session(phases, pool).warm_up(0, 64)
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
        if function.__qualname__.startswith("Advance"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return Recorder(function)

    session = captured_session(phases, GraphPool(capture=capture))
    with pytest.raises(LoweringError, match="Policy Reads may read values on the host; decode with graphs=False"):
        session.generate([list(range(6, 30))], max_new_tokens=40, policy=Reads(0.7))
