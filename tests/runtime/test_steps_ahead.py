"""Steps that are launched before the report of the last one is read: which they are, and that they change nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import DgraphError
from dgraph.families import families
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram, run_in_order
from dgraph.lowering.program import ProgramResult
from dgraph.lowering.regions import RegionCompiler
from dgraph.plans.block_cache import BlockCache
from dgraph.recipes import RECIPES, build
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.batch import FEW_STEPS, Batch
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.loop.transition import StepTransition
from dgraph.runtime.policies import Candidates, ConfidenceThreshold, FixedSteps, Renoise, SubBlocks
from tests.recipes.bidirectional import Setup, setup_of
from tests.runtime.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:block_length=8, but:dgraph.errors.DgraphWarning")
PROMPTS = [list(range(6, 20)), [7, 8, 9]]
NEW = 40


@pytest.fixture(scope="module")
def setup() -> Setup:
    return setup_of("llada")


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool] | None]:
    """Grows with every turn by what the host foresaw of its step, None where it read the report first."""
    seen: list[tuple[int, bool] | None] = []
    foresee = Batch._foreseen

    def noted(self: Batch) -> tuple[int, bool] | None:
        seen.append(foresee(self))
        return seen[-1]

    monkeypatch.setattr(Batch, "_foreseen", noted)
    monkeypatch.setattr(StepTransition, "_capture", lambda self, pool: None)
    return seen


def session(setup: Setup | Modes, recipe: str, pool: GraphPool | None, block_cache: BlockCache = "off") -> BlockSession:
    chosen = build(RECIPES, recipe, setup.model.spec, {})
    compiler, buckets = RegionCompiler("eager"), Buckets.of("hybrid")
    graphs = {name: phase.graph for name, phase in dgraph.rewrite(setup.graph, chosen).items()}
    runner = run_in_order if pool is None else pool.runner
    programs = {name: LoweredProgram(graph, compiler, buckets, runner) for name, graph in graphs.items()}
    return BlockSession(setup.model.spec, programs, plan=chosen.plan, pool=pool, block_cache=block_cache)


@dataclass(frozen=True)
class Modes:
    """A random tiny model that denoises a block and then encodes it, and what was captured of it."""

    model: dgraph.Model
    graph: dgraph.Graph


@functools.cache
def modes_of(family: str) -> Modes:
    model = families()[family].random(0)
    return Modes(replace(model, spec=replace(model.spec, eos_ids=())), dgraph.capture(model))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Grows with every step: rows it was launched with, rows it has, and sequences that go on in it."""
    seen: list[tuple[int, int, int]] = []
    launched = Batch._launched

    def noted(self: Batch, bound: Any, result: ProgramResult, count: int, slots: Sequence[int]) -> None:
        seen.append((count, int(self.transition.rows.cu_rows[-1]), int(self.transition.state.active.sum())))
        launched(self, bound, result, count, slots)

    monkeypatch.setattr(Batch, "_launched", noted)
    return seen


@pytest.mark.parametrize(("recipe", "foresees"), [("dense", True), ("dyllm", True), ("fast_dllm", False)])
def test_they_change_nothing(setup: Setup, ahead: list[Any], recipe: str, foresees: bool) -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW, "block_length": 8, "policy": FixedSteps(8)}
    plain = session(setup, recipe, None).generate(PROMPTS, **options)
    assert set(ahead) == {None}, "without a pool, every report is read first"
    ahead.clear()
    found = session(setup, recipe, GraphPool(recorder=Recorder)).generate(PROMPTS, **options)
    assert found.token_ids == plain.token_ids
    assert found.stats.sequence_steps == plain.stats.sequence_steps
    assert found.stats.kept_rows == plain.stats.kept_rows
    known = [one for one in ahead if one is not None]
    if foresees:
        assert len(known) > found.stats.steps / 2
    else:
        assert not known, "rows of a block are known to the device alone"


@pytest.mark.parametrize("recipe", ["dense", "dyllm"])
@pytest.mark.parametrize("new", [24, 40, 64])
def test_at_a_steady_pace_no_step_is_in_vain(setup: Setup, ahead: list[Any], recipe: str, new: int) -> None:
    options: dict[str, Any] = {"max_new_tokens": new, "block_length": 8, "policy": FixedSteps(8)}
    prompts = [list(range(6, 22)), list(range(7, 15))]
    found = session(setup, recipe, GraphPool(recorder=Recorder)).generate(prompts, **options)
    assert found.stats.steps == new
    assert sum(one is not None for one in ahead) > new / 2


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("recipe", ["dense", "dyllm", "dllm_cache"])
@pytest.mark.parametrize("new", [16, 21])
def test_rows_are_foreseen_exactly(
    ahead: list[Any], counts: list[tuple[int, int, int]], family: str, recipe: str, new: int
) -> None:
    """A row too few would be lost, one too many is another bucket."""
    options: dict[str, Any] = {"max_new_tokens": new, "block_length": 8, "policy": FixedSteps(8)}
    session(setup_of(family), recipe, GraphPool(recorder=Recorder)).generate(PROMPTS, **options)
    whole = [pair for *pair, active in counts if active == len(PROMPTS)]  # one that has ended unnoticed has no rows
    assert len(whole) > 4
    assert all(given == there for given, there in whole)
    assert any(one is not None for one in ahead)


@pytest.mark.parametrize(
    ("family", "decoding"),
    [
        ("diffusion_gemma", {"policy": Renoise(confidence=0.0, steps=6)}),
        ("diffusion_gemma", {"policy": Renoise(confidence=9.0, stability=0, steps=9)}),
        ("nemotron", {"policy": FixedSteps(6)}),
        ("nemotron", {"threshold": 0.02}),
        ("nemotron", {"policy": "self_speculation"}),
        ("fast_dllm_v2", {"policy": FixedSteps(4)}),
    ],
)
def test_blocks_of_two_modes_are_foreseen(
    ahead: list[Any], counts: list[tuple[int, int, int]], family: str, decoding: dict[str, Any]
) -> None:
    setup = modes_of(family)
    block = setup.model.spec.block_length
    options: dict[str, Any] = {"max_new_tokens": 6 * block, **decoding}
    plain = session(setup, "dense", None).generate(PROMPTS, **options)
    assert set(ahead) == {None}, "without a pool, every report is read first"
    ahead.clear()
    counts.clear()
    found = session(setup, "dense", GraphPool(recorder=Recorder)).generate(PROMPTS, **options)
    assert found.token_ids == plain.token_ids
    assert found.stats.sequence_steps == plain.stats.sequence_steps
    known = [one for one in ahead if one is not None]
    assert len(known) > found.stats.steps / 3
    assert all(given >= there for given, there, _ in counts)
    assert all(rows == block * len(PROMPTS) for rows, _ in known)


@pytest.mark.parametrize(
    ("family", "block_cache", "decoding"),
    [
        ("nemotron", "off", {"policy": "autoregressive"}),
        ("fast_dllm_v2", "off", {"policy": SubBlocks(size=4, cached=True)}),
        ("fast_dllm_v2", "dc", {"policy": FixedSteps(4)}),
    ],
)
def test_steps_of_fewer_rows_than_a_block_are_not(
    ahead: list[Any], family: str, block_cache: BlockCache, decoding: dict[str, Any]
) -> None:
    setup = modes_of(family)
    made = session(setup, "dense", GraphPool(recorder=Recorder), block_cache)
    made.generate(PROMPTS, max_new_tokens=4 * setup.model.spec.block_length, **decoding)
    assert all(one is None for one in ahead)


def test_a_canvas_of_known_steps_ends_where_it_was_expected(ahead: list[Any]) -> None:
    """The last canvas is committed all at once, so its tokens say nothing of how far it is."""
    setup = modes_of("diffusion_gemma")
    options: dict[str, Any] = {"max_new_tokens": 4 * setup.model.spec.block_length}
    found = session(setup, "dense", GraphPool(recorder=Recorder)).generate(
        [PROMPTS[1]], policy=Renoise(confidence=0.0, steps=8), **options
    )
    assert found.stats.steps == 4 * 8 + 3, "none in vain"
    encoded = 3
    first, last = 1, FEW_STEPS
    assert sum(one is not None for one in ahead) >= found.stats.steps - encoded - first - last - 1


def test_a_short_generation_reads_every_report_first(setup: Setup, ahead: list[Any]) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "block_length": 8, "policy": FixedSteps(8)}
    found = session(setup, "dense", GraphPool(recorder=Recorder)).generate(PROMPTS, **options)
    assert found.stats.steps == 4
    assert set(ahead) == {None}


@pytest.mark.parametrize("recipe", ["dense", "dyllm", "fast_dllm", "focus"])
def test_a_warm_up_prepares_bidirectional_programs(setup: Setup, recipe: str) -> None:
    pool = GraphPool(recorder=Recorder)
    prepared = session(setup, recipe, pool)
    count = prepared.warm_up(2, 80)
    captured = len(pool.recorded)
    assert captured in (count, 2 * count)
    options: dict[str, Any] = {"max_new_tokens": 8, "block_length": 8, "policy": FixedSteps(8)}
    plain = session(setup, recipe, None).generate([[7, 8, 9]], **options)
    assert prepared.generate([[7, 8, 9]], **options).token_ids == plain.token_ids
    assert {name for name, _ in pool.recorded[captured:]} <= {"transition"}, "few rows: every bucket was there"


def test_what_went_wrong_in_one_is_noticed_later(setup: Setup, ahead: list[Any]) -> None:
    class Lazy(ConfidenceThreshold):
        """Commits nothing in one step, which no policy may that does not say so."""

        def choose(self, candidates: Candidates) -> torch.Tensor:
            chosen = super().choose(candidates)
            wrong = (candidates.start == len(PROMPTS[0]) + 16) & (candidates.forwards == 3)
            return chosen & ~wrong[:, None]

    options: dict[str, Any] = {"max_new_tokens": NEW, "block_length": 8, "policy": Lazy(1.0)}
    with pytest.raises(DgraphError, match="gave no usable confidence for prompt 0"):
        session(setup, "dense", GraphPool(recorder=Recorder)).generate(PROMPTS, **options)
    assert len(ahead) == 16 + 3 + 2, "its step, and the turn after it"
