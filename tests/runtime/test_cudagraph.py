"""The buffers, keys and limits of captured stages, with a recorder in the place of a CUDA graph.

The recorder runs the captured function on each replay. Like a CUDA graph it sees only the buffers that it was captured
with, so a stage that forgot to fill a buffer replays old values here, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dgraph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram, Runner, StagePlan, run_steps
from dgraph.lowering.regions import RegionCompiler
from dgraph.recipes import RECIPES, build
from dgraph.runtime.cudagraph import GraphPool
from dgraph.runtime.policies import ConfidenceThreshold
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
