"""Captured stages after a cut: nothing but one replay follows the host's read, and no row of an earlier step leaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dgraph
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.program import ProgramResult
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.stage import LoweredStage, Runner, run_in_order
from dgraph.ops import OPS
from dgraph.ops.draws import cu_rows_of
from dgraph.runtime.graphs.pinned import Mapped
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import ConfidenceThreshold
from dgraph.runtime.results import Generation
from tests.kv import kv_pairs
from tests.lowering.test_schedule import two_cuts
from tests.runtime.recorder import Recorder
from tests.tiny import Hand

aten = torch.ops.aten


def one_cut() -> Graph:
    """x over N, what lives on of it over K; other inputs are read by the second stage alone."""
    hand = Hand()
    graph = hand.graph
    x, y, keep = hand.input("x", "N", 8), hand.input("y", "N"), hand.input("keep", "N", dtype=torch.bool)
    cu_rows, shift = hand.input("cu_rows", "b+1", dtype=torch.int32), hand.input("shift", 1, 8)
    x = hand.call(aten.relu.default, x)
    cut = graph.call(OPS["keep_index"], (keep, cu_rows, -1), before=graph.output, by="", rows=graph.new_row_set())
    index, cu_rows = graph.parts(cut, 2, "")
    x, y = graph.parts(graph.call(OPS["compact"], ([x, y], index), before=graph.output, by=""), 2, "")
    return hand.returns(
        x=hand.call(aten.add.Tensor, x, shift), y=hand.call(aten.neg.default, y), kept=index, cu_rows=cu_rows
    )


def inputs(graph: Graph, counts: tuple[int, ...], kept: int, seed: int) -> dict[str, Tensor]:
    """Rows of sequences, of which the first `kept` of each are kept."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(counts)
    values = {
        "x": torch.randn(n, 8, generator=generator),
        "y": torch.randn(n, generator=generator),
        "keep": torch.cat([torch.arange(c) < kept for c in counts]),
        "cu_rows": cu_rows_of(counts),
        "shift": torch.randn(1, 8, generator=generator),
    }
    return {name: values[name] for name in graph.inputs}


def lower(
    graph: Graph, runner: Callable[[LoweredStage], Runner], buckets: Sequence[int] = (4, 8, 16, 32, 64)
) -> LoweredProgram:
    return LoweredProgram(graph, RegionCompiler("eager"), Buckets.of(list(buckets)), runner)


def check(program: LoweredProgram, plain: LoweredProgram, given: dict[str, Tensor]) -> ProgramResult:
    """Both give the same, padding rows included."""
    rows = len(given["x"])
    mine, theirs = program(given, rows), plain(given, rows)
    assert (mine.rows, mine.padded) == (theirs.rows, theirs.padded)
    assert set(mine.outputs) == set(theirs.outputs)
    for name, value in theirs.outputs.items():
        torch.testing.assert_close(mine.outputs[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
    return mine


@pytest.fixture(params=[one_cut, two_cuts], ids=["two stages", "three stages"])
def graph(request: pytest.FixtureRequest) -> Graph:
    return request.param()


# -- what is left after the read --------------------------------------------------------------------------------


class Log(TorchDispatchMode):
    """Every op that the host issues by itself, and every replay."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside:
            self.events.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))

    def capture(self, function: Callable[[], object]) -> Recorder:
        """A recorder whose replays are events, and what runs in them is none."""

        def quiet() -> None:
            self.inside += 1
            function()
            self.inside -= 1

        made = Recorder(quiet)
        run = made.replay

        def replay() -> None:
            self.events.append("replay")
            run()

        made.replay = replay  # type: ignore[method-assign]
        return made


def test_one_replay_follows_each_read(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    log, read = Log(), Mapped.read

    def noted(self: Mapped) -> Any:
        log.events.append("read")
        return read(self)

    monkeypatch.setattr(Mapped, "read", noted)
    program = lower(graph, GraphPool(recorder=log.capture).runner)
    for seed, counts in enumerate([(9, 12, 11), (9, 12, 11), (4, 0, 7)]):
        given = inputs(graph, counts, 5, seed)
        program(given, len(given["x"]))
        log.events.clear()
        with log:
            program(given, len(given["x"]))
        reads = [i for i, event in enumerate(log.events) if event == "read"]
        assert len(reads) == len(program.stages) - 1
        assert log.events.count("replay") == len(program.stages)
        for begin, end in zip(reads, [*reads[1:], None], strict=True):
            after = log.events[begin + 1 : end]
            assert after[0] == "replay"
            assert set(after[1:]) <= {"slice"}, "what is left is a view: of the numbers of the rows"
        assert "_local_scalar_dense" not in log.events, "a read that waits for all that was launched"
        ahead = log.events[: log.events.index("replay")]
        assert ahead.count("_foreach_copy_") == len({value.dtype for value in given.values()})


def test_nothing_but_a_replay_follows_the_number_of_rows(graph: Graph) -> None:
    log = Log()
    program = lower(graph, GraphPool(recorder=log.capture).runner)
    for seed in range(3):
        given = inputs(graph, (9, 12, 11), 5, seed)
        run = program.bound(given)
        log.events.clear()
        with log:
            run(32)
    assert log.events[0] == "replay"


def test_what_was_bound_before_something_else_gives_its_own(graph: Graph) -> None:
    program, plain = lower(graph, GraphPool(recorder=Recorder).runner), lower(graph, run_in_order)
    for seed in range(3):
        first, second = inputs(graph, (30, 25), 4, seed), inputs(graph, (9, 12), 5, 10 + seed)
        longer = {name: torch.cat([value, value]) if len(value) == 21 else value for name, value in second.items()}
        runs = [program.bound(given) for given in (first, longer)]
        for run, given, rows in reversed(list(zip(runs, (first, second), (55, 21), strict=True))):
            result, expected = run(rows), plain(given, rows)
            assert result.rows == expected.rows
            for name, value in expected.outputs.items():
                live = len(value) if name == "cu_rows" else result.rows[-1]
                assert torch.equal(result.outputs[name][:live], value[:live]), name


# -- buffers -----------------------------------------------------------------------------------------------------


def test_buckets_of_the_stage_before_share_a_graph_and_leak_nothing(graph: Graph) -> None:
    pool = GraphPool(recorder=Recorder)
    program, plain = lower(graph, pool.runner), lower(graph, run_in_order)
    large = inputs(graph, (30, 30), 3, 0)
    large["x"][3:] = torch.nan
    large["keep"] |= torch.arange(60) == 59
    for i, given in enumerate([large, inputs(graph, (2, 9), 3, 1), inputs(graph, (15, 13), 2, 2)]):
        mine, theirs = program(given, len(given["x"])), plain(given, len(given["x"]))
        assert mine.rows == theirs.rows
        for name, value in theirs.outputs.items():
            torch.testing.assert_close(mine.outputs[name], value, rtol=0, atol=0, equal_nan=True)
            assert i == 0 or not value[: theirs.rows[-1]].isnan().any()
    last = inputs(graph, (30, 30), 0, 3)
    last["keep"][[7, 40, 59]] = True
    check(program, plain, last)
    assert [rows for name, rows in pool.recorded if name == "prefix"] == [64, 16, 32]
    assert [rows for name, rows in pool.recorded if name == "suffix"] == [8, 4]


def test_a_graph_is_not_replayed_with_a_buffer_that_was_outgrown(graph: Graph) -> None:
    pool = GraphPool(recorder=Recorder)
    program, plain = lower(graph, pool.runner), lower(graph, run_in_order)
    sizes = [(3, 4), (8, 7), (3, 4), (30, 20), (8, 7), (3, 5), (30, 20), (16, 16)]
    for _ in range(2):
        for seed, counts in enumerate(sizes):
            check(program, plain, inputs(graph, counts, 2, seed))
    before = list(pool.recorded)
    for seed, counts in enumerate(sizes):
        check(program, plain, inputs(graph, counts, 2, 50 + seed))
    assert pool.recorded == before
    assert before.count(("suffix", 4)) == 3, "buffers of 8, 16 and 64 rows"


def test_buffers_are_outgrown_a_few_times_at_most(graph: Graph) -> None:
    pool = GraphPool(recorder=Recorder)
    sizes = range(4, 68, 4)
    program, plain = (lower(graph, runner, buckets=list(sizes)) for runner in (pool.runner, run_in_order))
    for rows in sizes:
        check(program, plain, inputs(graph, (rows,), 3, rows))
    assert pool.recorded.count(("suffix", 4)) == 5, "buffers of 4, 8, 16, 32 and 64 rows"
    assert len([rows for name, rows in pool.recorded if name == "prefix"]) == len(sizes)


def test_another_number_of_sequences_is_another_graph(graph: Graph) -> None:
    pool = GraphPool(recorder=Recorder)
    program, plain = lower(graph, pool.runner), lower(graph, run_in_order)
    for seed, counts in enumerate([(5, 6, 4), (9, 6), (3, 4, 7), (8, 8), (2, 2, 2, 2, 2)]):
        check(program, plain, inputs(graph, counts, 1, seed))


# -- stages that are not captured --------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", range(4))
def test_a_stage_that_does_not_fit_leaves_the_others_captured(graph: Graph, refused: int) -> None:
    asked: list[int] = []

    def capture(function: Callable[[], None]) -> Recorder:
        asked.append(1)
        if len(asked) - 1 == refused:
            raise torch.OutOfMemoryError("no memory")
        return Recorder(function)

    pool = GraphPool(recorder=capture)
    program, plain = lower(graph, pool.runner), lower(graph, run_in_order)
    for seed in range(3):
        for counts in ((9, 12), (20, 30)):
            check(program, plain, inputs(graph, counts, 3, seed))
    assert len(pool.refused) == 1
    assert len(pool.recorded) >= len(program.stages)


@pytest.mark.filterwarnings("ignore:.* CUDA graphs are in use")
@pytest.mark.parametrize("limit", range(5))
def test_a_full_pool(graph: Graph, limit: int) -> None:
    pool = GraphPool(limit=limit, recorder=Recorder)
    program, plain = lower(graph, pool.runner), lower(graph, run_in_order)
    for seed in range(3):
        for counts in ((9, 12), (20, 30)):
            check(program, plain, inputs(graph, counts, 3, seed))
    assert len(pool.recorded) == limit


# -- a whole generation ------------------------------------------------------------------------------------------


@pytest.mark.release
def test_a_generation_of_a_trained_model() -> None:
    """Of a batch whose sequences end at different times: rows go through many buckets, down and up again."""
    made = dgraph.optimize("tiny_sdar", "focus", backend="eager")
    prompts = [[5 + (7 * i + j) % 60 for j in range(3 + 9 * i)] for i in range(3)]

    def generate(runner: Callable[[LoweredStage], Runner], calls: int = 1) -> Generation:
        programs = {
            name: LoweredProgram(phase.graph, made.compiler, Buckets.of([4, 8, 12, 16, 24, 32, 48, 64, 96]), runner)
            for name, phase in made.phases.items()
        }
        session = BlockSession(made.spec, programs, block_cache="dc+")
        for _ in range(calls):
            found = session.generate(prompts, max_new_tokens=20, policy=ConfidenceThreshold(0.8), keep_kv=True)
        return found

    pool = GraphPool(recorder=Recorder)
    graphed, plain = generate(pool.runner, 2), generate(run_in_order)
    assert graphed.token_ids == plain.token_ids
    assert graphed.stats.rows == plain.stats.rows
    assert graphed.stats.kept_rows == plain.stats.kept_rows
    assert all(torch.equal(*pair) for pair in kv_pairs(graphed, plain))
    for stage in ("prefix", "suffix"):
        assert len({rows for name, rows in pool.recorded if name == stage}) >= 4
    assert not pool.refused
