"""CountRows: one stage without a host read, and the values of the program that reads the count."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import pytest
import torch

from dgraph.errors import PassError
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import VerifyError, verify
from dgraph.lowering.schedule import schedule
from dgraph.ops import OPS
from dgraph.passes import CacheKV, ChunkLMHead, CountRows, EvictTokens, FuseProjections
from dgraph.passes.base import Pass
from dgraph.text.writer import dump
from tests.golden_files import check_golden
from tests.passes.scene import Scene, padded, scene
from tests.tiny import Hand, interpret, ops_of, report_of, rewritten

LAYERS = 4
aten = torch.ops.aten


@pytest.fixture(scope="module")
def step(cached: Graph) -> Scene:
    return scene(cached)


@pytest.fixture(scope="module")
def counted(evicted: Graph) -> Graph:
    return rewritten(evicted, CountRows())


# -- where it fires ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_it_replaces_every_linear_layer_after_the_eviction(packed: Graph, after: int, fused: bool) -> None:
    passes: list[Pass] = [*([FuseProjections()] if fused else []), CacheKV(), EvictTokens(after=after)]
    before = rewritten(packed, *passes)
    report = report_of(before, CountRows())
    layers = LAYERS - 1 - after
    # Of the layer that evicts: out, gate, up, down; of those after it: q, k, v as well; and the LM head.
    linears = (3 + 4 * layers if fused else 4 + 7 * layers) + 1
    assert report.skipped == []
    assert [a.what for a in report.applied] == [
        "row set K is counted on the device",
        *["linear over the count of K"] * linears,
    ]
    assert report.applied[0].layer == after
    graph = rewritten(before, CountRows())
    assert len(graph.find("rows_linear")) == linears
    assert graph.find("keep_index") == []
    (kept,) = graph.find("list_kept")
    assert (kept.meta["layer"], kept.meta["rows"], kept.meta["by"]) == (after, "K", "CountRows")
    for node in graph.find("rows_linear"):
        assert node.args[3].args == (kept, 1)  # type: ignore[union-attr]
        assert graph.row_set(node) == "K"
        assert node.meta["role"]
    assert all(graph.row_set(n) == "N" for n in graph.calls if n.target is aten.linear.default)


def test_the_program_is_one_stage(evicted: Graph, counted: Graph) -> None:
    assert [s.name for s in schedule(evicted)] == ["prefix", "suffix"]
    (stage,) = schedule(counted)
    assert (stage.name, stage.rows, stage.cut) == ("step", "N", None)


def test_signature_and_types_stay(evicted: Graph, counted: Graph) -> None:
    assert counted.inputs == evicted.inputs
    assert counted.outputs == evicted.outputs
    assert counted.tensors == evicted.tensors
    types = [[g.type_text(g.result(name)) for name in g.outputs] for g in (evicted, counted)]
    assert types[0] == types[1]


def test_a_value_before_the_eviction_may_not_meet_one_after_it(counted: Graph) -> None:
    """They have one size at run time, so only the row sets tell."""

    def meet(op: Any) -> Graph:
        graph = counted.copy()
        product = graph.find("rows_linear")[0]
        early = next(n for n in graph.calls if n.target is aten.linear.default and graph.type_text(n) == "f32[N, 64]")
        graph.call(op, (product, early), before=product.next, by="Test")
        return graph

    with pytest.raises(VerifyError, match=r"f32\[K, 64\], .*f32\[N, 64\]"):
        meet(aten.add.Tensor)
    graph = meet(aten.linear.default)
    with pytest.raises(VerifyError, match=r"mixes row sets: .* over K, .* over N"):
        verify(graph)


# -- the same values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"after": 2}, {"keep": 3}, {"alpha": 2.5, "select": "bottom"}], ids=str)
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("chunked", [False, True])
def test_kept_rows_have_the_values_of_the_program_that_is_cut(
    cached: Graph, step: Scene, options: dict[str, Any], rows: int, chunked: bool
) -> None:
    cut = rewritten(cached, EvictTokens(**options), *([ChunkLMHead(7)] if chunked else []))
    counted, mine, theirs = rewritten(cut, CountRows()), step.copy(), step.copy()
    got, want = interpret(counted, padded(mine.inputs, rows)), interpret(cut, theirs.inputs)
    live = len(want["kept"])
    assert live < 32
    for name in want:
        if cut.row_set(cut.result(name)) == "K":
            assert len(got[name]) == 32 + rows
            assert torch.equal(got[name][:live], want[name]), name
        else:
            assert torch.equal(got[name][: len(want[name])], want[name]), name
    assert (got["kept"][live:] == -1).all()
    if chunked:
        assert (got["token"][live:] == -1).all()
        assert (got["confidence"][live:] == -torch.inf).all()
    for name, value in theirs.inputs.items():
        assert torch.equal(mine.inputs[name].nan_to_num(), value.nan_to_num()), name


def test_the_padding_holds_what_no_live_row_may_read(counted: Graph, step: Scene) -> None:
    """The reference leaves NaN after the live rows; logits of kept rows are finite all the same."""
    logits = interpret(counted, step.copy().inputs)["logits"]
    live = int((interpret(counted, step.copy().inputs)["kept"] >= 0).sum())
    assert logits[:live].isfinite().all()
    assert logits[live:].isnan().all()


@pytest.mark.parametrize("after", [1, 3])
def test_with_alpha_infinite_the_program_is_the_dense_one(cached: Graph, step: Scene, after: int) -> None:
    graph = rewritten(cached, EvictTokens(alpha=math.inf, after=after), CountRows())
    mine, theirs = step.copy(), step.copy()
    got, expected = interpret(graph, mine.inputs), interpret(cached, theirs.inputs)
    assert got["kept"].tolist() == list(range(32))
    assert torch.equal(got["logits"], expected["logits"]), "bit for bit"
    for name, value in theirs.inputs.items():
        assert torch.equal(mine.inputs[name].nan_to_num(), value.nan_to_num()), name


# -- near misses and errors --------------------------------------------------------------------------------------


def gathered(capacity: int, *, heads: bool = False) -> Graph:
    """Rows that are kept and projected, each as a vector or as two heads."""
    hand = Hand()
    x, cu_rows = hand.input("x", "N", 8), hand.input("cu_rows", "b+1", dtype=torch.int32)
    keep = hand.input("keep", "N", dtype=torch.bool)
    hand.layer = 0
    graph = hand.graph
    cut = graph.call(OPS["keep_index"], (keep, cu_rows, capacity), before=graph.output, by="", rows="K")
    index, _ = graph.parts(cut, 2, "")
    value = hand.call(operator.getitem, hand.call(OPS["compact"].overload, [x], index), 0)
    if heads:
        value = hand.call(aten.view.default, value, [-1, 2, 4])
    out = hand.call(aten.linear.default, value, hand.weight("layers.0.p.weight", 8, 4 if heads else 8))
    return hand.returns(y=out, index=index)


def test_a_cut_of_fixed_room_is_a_near_miss() -> None:
    report = report_of(gathered(16), CountRows())
    assert report.applied == []
    assert [s.reason for s in report.skipped] == ["it keeps room for 16 rows, not for all; cut with capacity -1"]
    with pytest.raises(PassError, match=r"applied nowhere(.|\n)*near miss at .*keep_index.*room for 16 rows"):
        rewritten(gathered(16), CountRows())


def test_a_layer_over_heads_is_a_near_miss() -> None:
    report = report_of(gathered(-1, heads=True), CountRows())
    assert [a.what for a in report.applied] == ["row set K is counted on the device"]
    (skipped,) = report.skipped
    assert re.match(r"its input is f32\[K, 2, 4\], not one vector per row; it runs on padding", skipped.reason)


def test_offsets_that_nobody_read_are_named() -> None:
    graph = gathered(-1)
    graph.sweep()
    assert [n.args[1] for n in graph.find("keep_index")[0].users] == [0]
    assert ops_of(rewritten(graph, CountRows())).count("dgraph.rows_linear") == 1


@pytest.mark.parametrize("stage", ["packed", "cached"])
def test_without_an_eviction_there_is_nothing_to_count(request: pytest.FixtureRequest, stage: str) -> None:
    report = report_of(request.getfixturevalue(stage), CountRows())
    assert (report.applied, report.skipped) == ([], [])


def test_what_is_counted_can_be_evicted_again(cached: Graph, counted: Graph, step: Scene) -> None:
    """The rows of the program that is cut both times."""
    late = EvictTokens(after=2, alpha=1.0)
    got = interpret(rewritten(counted, late), step.copy().inputs)
    want = interpret(rewritten(cached, EvictTokens(), late), step.copy().inputs)
    assert torch.equal(got["kept"], want["kept"])
    assert torch.equal(got["logits"], want["logits"])


# -- dump --------------------------------------------------------------------------------------------------------


def test_the_dump_of_a_step(packed: Graph) -> None:
    passes = (FuseProjections(), CacheKV(), EvictTokens(), ChunkLMHead(), CountRows())
    text = dump(rewritten(packed, *passes))
    assert "-- stage cut" not in text
    check_golden("qwen3_focus_step_counted.txt", text)
