"""Programs that keep rows twice: the values of rows that were alone from the start, whichever way they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes import CacheKV, ChunkLMHead, CountRows, EvictTokens, FuseProjections, PackRows
from dgraph.passes.base import Effect, Pass, Report
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.state.packed_rows import inverse
from dgraph.types.shapes import InputSpec
from tests.oracle.models import to_transformers
from tests.passes.scene import BLOCKS, CONFIG, WEIGHTS, Scene
from tests.runtime.recorder import Recorder
from tests.tiny import BLOCK, MASK, interpret, read_cache, rewritten

ROWS = 32
DECISION = ("token", "confidence", "margin", "entropy", "kept")


@dataclass(frozen=True)
class KeepNear(Pass):
    """From the attention of a layer on, the rows of an input of flags alone (rows dropped by distance)."""

    layer: int = 1

    effect = Effect.APPROXIMATE
    summary = "keeps flagged rows"
    signature = frozenset({"near_1", "near_2", "kept"})

    def run(self, graph: Graph, report: Report) -> None:
        (attention,) = graph.find("paged_attention", self.layer)
        graph.add_input(InputSpec(f"near_{self.layer}", torch.bool, ("N",)))
        flag = graph.on_rows_of(f"near_{self.layer}", attention, report.name)
        graph.keep_rows(flag, before=attention, by=report.name)
        graph.sweep()
        report.did("kept", self.layer)


def near(step: Scene) -> dict[str, Tensor]:
    """The first six columns of each block go on from layer 1 on, the first three from layer 2 on; a row sees no column
    that is dropped before it is."""
    column = torch.arange(ROWS) % BLOCK
    last = torch.where(column < 3, 3, torch.where(column < 6, 6, BLOCK))
    start = torch.tensor([start for start, _, _ in BLOCKS]).repeat_interleave(BLOCK)
    limit = (start + last).int()
    return {**step.copy().inputs, "near_1": column < 6, "near_2": column < 3, "limit": limit}


def lowered(graph: Graph, backend: str = "eager", buckets: Any = None) -> LoweredProgram:
    return LoweredProgram(graph, RegionCompiler(backend), Buckets.of(buckets))


@pytest.fixture(scope="module")
def fused(packed: Graph, cached: Graph) -> Graph:
    return rewritten(cached, FuseProjections())


@pytest.mark.parametrize(
    ("backend", "buckets", "order"),
    [
        *(("eager", buckets, order) for buckets in (None, [5, 13, 40]) for order in ((1, 2), (2, 1))),
        ("inductor", "hybrid", (1, 2)),  # the other order makes the same stages
    ],
)
def test_rows_that_are_kept_have_the_values_of_a_program_without_cuts(
    fused: Graph, step: Scene, backend: str, buckets: Any, order: tuple[int, int]
) -> None:
    graph = rewritten(fused, *map(KeepNear, order), ChunkLMHead())
    program = lowered(graph, backend, buckets)
    mine, theirs = near(step), near(step)
    result, whole = program(mine, ROWS), interpret(rewritten(fused, ChunkLMHead()), theirs)
    assert program.stage_names == ("prefix", "suffix", "suffix 2")
    assert result.rows == (ROWS, 24, 12)
    assert result.padded == tuple(map(Buckets.of(buckets), result.rows))
    kept = theirs["near_2"].nonzero().flatten()
    assert result.outputs["kept"].tolist() == [*kept.tolist(), *[-1] * (result.padded[-1] - len(kept))]
    for name in DECISION[:-1]:
        torch.testing.assert_close(result.outputs[name][: len(kept)], whole[name][kept], atol=1e-5, rtol=1e-4)
    for s, (start, _, _) in enumerate(BLOCKS):
        for layer, columns in enumerate((BLOCK, BLOCK, 6, 3)):
            name = f"k_cache_{layer}"
            got, want = (read_cache(inputs, name, s, start + BLOCK) for inputs in (mine, theirs))
            torch.testing.assert_close(got[: start + columns], want[: start + columns], atol=1e-5, rtol=1e-4)
            assert columns == BLOCK or not torch.equal(got[start + columns :], want[start + columns :])


@pytest.mark.parametrize("passes", [
    (KeepNear(1), EvictTokens(after=2)),
    (EvictTokens(after=2), KeepNear(1)),
    (EvictTokens(after=1, alpha=2.0), EvictTokens(after=2, alpha=1.0)),
    (EvictTokens(after=2, alpha=1.0, signal="importance"), EvictTokens(after=1, alpha=2.0), KeepNear(1), CountRows()),
], ids=["near+focus", "focus+near", "focus+focus", "counted"])  # fmt: skip
def test_keeping_by_distance_and_evicting_compose(fused: Graph, step: Scene, passes: tuple[Pass, ...]) -> None:
    """Rows are numbered among all; the limit and what was reached are those of the last rows that go on."""
    graph = rewritten(fused, *(p for p in passes if p != CountRows()), ChunkLMHead(), *passes[3:])
    inputs = near(step)
    want, results = interpret(graph, near(step)), [lowered(graph, buckets=b)(near(step), ROWS) for b in (None, [40])]
    index = want["kept"]
    kept = index[index >= 0]
    assert 0 < len(kept) < 24
    for result in results:
        assert torch.equal(result.outputs["kept"][: len(kept)], kept)
        assert torch.equal(result.outputs["reached"], want["reached"])
        for name in DECISION:
            torch.testing.assert_close(result.outputs[name][: len(kept)], want[name][: len(kept)], atol=1e-5, rtol=1e-4)
    row = inverse(results[1].outputs["kept"], ROWS)
    assert (row >= 0).nonzero().flatten().tolist() == kept.tolist()
    if "near_1" in graph.inputs:
        assert inputs["near_1"][kept].all()
    masked = inputs["candidate"][kept]
    positions = inputs["positions"][kept]
    for s in range(len(BLOCKS)):
        mine = positions[(kept // BLOCK == s) & masked]
        assert int(want["reached"][s]) == max([int(step.inputs["reached"][s]), *mine.tolist()])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_three_stages_are_replayed(request: pytest.FixtureRequest, step: Scene, device: str) -> None:
    """Rows dropped by distance, then by FOCUS: each stage of each bucket is recorded once, and gives what it gives when
    it runs op by op, whatever the stages before it left in their buffers."""
    if device == "cpu":
        graph: Graph = request.getfixturevalue("fused")
    else:
        module = to_transformers(CONFIG, WEIGHTS).to(device)
        captured = dgraph.capture(dgraph.adopt(module, mask_id=MASK, block_length=BLOCK))
        graph = rewritten(captured, PackRows(), CacheKV(), FuseProjections())
    graph = rewritten(graph, KeepNear(1), EvictTokens(after=2), ChunkLMHead())
    pool = GraphPool(recorder=Recorder if device == "cpu" else None)
    compiler, buckets = RegionCompiler("eager"), Buckets.of([4, 8, 12, 16, 20, 24, 32])
    plain = LoweredProgram(graph, compiler, buckets)
    graphed = LoweredProgram(graph, compiler, buckets, pool.runner)
    column = torch.arange(ROWS) % BLOCK
    caches = {name: value.to(device) for name, value in near(step).items() if "cache" in name}  # replays keep to them
    for kept in (6, 3, 6, 8, 3):  # columns of each block
        theirs = {name: value.to(device) for name, value in {**near(step), "near_1": column < kept}.items()}
        mine = {**theirs, **{name: cache.copy_(theirs[name]) for name, cache in caches.items()}}
        known = set(pool.recorded)
        want, got = plain(theirs, ROWS), graphed(mine, ROWS)
        assert (got.rows, got.padded) == (want.rows, want.padded)
        assert got.rows[1] == kept * len(BLOCKS) > got.rows[2] > 0
        count = got.rows[2]
        for name in DECISION:
            assert torch.equal(got.outputs[name][:count], want.outputs[name][:count]), name
        assert torch.equal(got.outputs["reached"], want.outputs["reached"])
        for name, cache in caches.items():
            assert torch.equal(cache.nan_to_num(), theirs[name].nan_to_num()), name
        stages = set(zip(("prefix", "suffix", "suffix 2"), got.padded, strict=True))
        assert set(pool.recorded) == known | stages
    assert len(pool.recorded) == len(set(pool.recorded)), "a bucket was recorded twice"
    assert not pool.refused
