"""OnlyMasked: what masked rows predict stays, all keys and values are written, and the last layer sees no other row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgraph.ir.graph import Graph
from dgraph.lowering.schedule import schedule
from dgraph.ops import OPS
from dgraph.passes import (
    BoundRows,
    CacheKV,
    ChunkLMHead,
    CountRows,
    EvictTokens,
    FuseGLU,
    FuseProjections,
    GateFFN,
    OnlyMasked,
    PartialAttention,
    SparseKV,
)
from dgraph.passes.base import Pass, Report
from dgraph.text.writer import dump
from tests.golden_files import check_golden
from tests.passes.scene import Scene, oracle_step, padded, scene
from tests.passes.sparse_step import family_of
from tests.tiny import MASK, caches_of, draw, interpret, report_of, rewritten, rows_of

LAST = 3
DECISION = ("token", "confidence", "margin", "entropy")
aten = torch.ops.aten


@pytest.fixture(scope="module")
def fused(packed: Graph) -> Graph:
    return rewritten(packed, FuseProjections(), CacheKV())


@pytest.fixture(scope="module")
def step(fused: Graph) -> Scene:
    return scene(fused)


# -- where it fires ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_product", [False, True])
def test_it_fires_once_in_the_last_layer(cached: Graph, fused: Graph, one_product: bool) -> None:
    before = rewritten(fused if one_product else cached, ChunkLMHead(7))
    report = report_of(before, OnlyMasked())
    linears = 4 if one_product else 5  # q, out, gate and up, down
    found = [(a.layer, a.what) for a in report.applied]
    assert found == [
        *[(LAST, "linear over the count of K")] * linears,
        (LAST, "queries and what follows on masked rows"),
    ]
    assert report.skipped == []
    graph = rewritten(before, OnlyMasked())
    assert (graph.inputs, graph.outputs) == (before.inputs, before.outputs)
    assert [graph.type_text(graph.result(name)) for name in DECISION] == ["i64[N]", "f32[N]", "f32[N]", "f32[N]"]
    (kept,), (compact,) = graph.find("list_kept"), graph.find("compact")
    assert kept.args == (graph.input("candidate"), graph.input("cu_rows"))
    assert (kept.meta["rows"], kept.meta["layer"], compact.meta["layer"]) == ("K", LAST, LAST)
    over = {n.meta["layer"] for n in graph.calls if graph.row_set(n) == "K" and n not in (kept, compact)}
    assert over == {LAST, None}, "the last layer, and the last norm"
    (write,) = graph.find("kv_write", LAST)
    assert graph.row_set(write.args[0]) == graph.row_set(write.args[1]) == "N"  # type: ignore[arg-type]
    (head,) = graph.find("lm_head")
    assert head.args[8] is True
    assert graph.row_set(head.args[0]) == "K"  # type: ignore[arg-type]
    assert all(graph.row_set(n) == "N" for n in head.args[3:6])  # type: ignore[arg-type]


def test_the_program_stays_one_stage(fused: Graph) -> None:
    (stage,) = schedule(rewritten(fused, ChunkLMHead(), OnlyMasked()))
    assert (stage.name, stage.rows, stage.cut) == ("step", "N", None)


def test_its_dump() -> None:
    passes = (FuseProjections(), CacheKV(), ChunkLMHead(), OnlyMasked(), FuseGLU(), BoundRows())
    check_golden("llada_masked_step.txt", dump(rewritten(family_of("llada").packed, *passes)))


# -- the same values ---------------------------------------------------------------------------------------------


def check(before: Graph, after: Graph, step: Scene, rows: int = 0) -> dict[str, Tensor]:
    """Equal outputs and equal caches; the outputs, of as many rows as there are."""
    mine, theirs = step.copy(), step.copy()
    got, want = interpret(after, padded(mine.inputs, rows)), interpret(before, theirs.inputs)
    assert set(got) == set(want)
    for name, value in want.items():
        assert not got[name][: len(value)].isnan().any(), name
        torch.testing.assert_close(got[name][: len(value)], value, atol=1e-6, rtol=1e-5)
    for name, value in theirs.inputs.items():
        assert torch.equal(mine.inputs[name].nan_to_num(), value.nan_to_num()), name
    return got


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("chunk", [3, 2048])
def test_masked_rows_predict_the_same(fused: Graph, step: Scene, rows: int, chunk: int) -> None:
    before = rewritten(fused, ChunkLMHead(chunk))
    got = check(before, rewritten(before, OnlyMasked()), step, rows)
    masked = step.inputs["candidate"]
    assert 0 < int(masked.sum()) < len(masked)
    assert (got["token"][: len(masked)][~masked] == -1).all()
    assert (got["token"][: len(masked)][masked] >= 0).all()


@pytest.mark.parametrize("every", [False, True])
def test_with_every_row_masked_or_none(fused: Graph, step: Scene, every: bool) -> None:
    """The lossless limit: with every row, the same products in the same order, so the same bits."""
    before, given = rewritten(fused, ChunkLMHead(32)), step.copy()
    given.inputs["candidate"][:] = every
    got = check(before, rewritten(before, OnlyMasked()), given)
    want = interpret(before, given.copy().inputs)
    for name in DECISION:
        assert torch.equal(got[name], want[name]), name
    assert (got["token"] >= 0).all() == every


def test_it_is_the_oracle(fused: Graph, step: Scene) -> None:
    graph = rewritten(fused, ChunkLMHead(), OnlyMasked(), FuseGLU(), BoundRows())
    out = interpret(graph, step.copy().inputs)
    starts = torch.tensor([0, *step.counts]).cumsum(0).tolist()
    for s in range(len(step.counts)):
        rows = slice(starts[s], starts[s + 1])
        masked = step.inputs["candidate"][rows]
        logits = oracle_step(s, None)[0].index_fill(1, torch.tensor([MASK]), -torch.inf)
        assert torch.equal(out["token"][rows][masked], logits.argmax(-1)[masked])
        probability = logits.softmax(-1).amax(-1)
        torch.testing.assert_close(out["confidence"][rows][masked], probability[masked], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alpha", [1.0, 1.5, float("inf")])
def test_after_an_eviction_on_what_is_left(fused: Graph, step: Scene, alpha: float) -> None:
    before = rewritten(fused, EvictTokens(alpha=alpha), ChunkLMHead(7))
    after = rewritten(before, OnlyMasked())
    assert {after.row_set(n) for n in after.calls} >= {"N", "K", "K1"}
    assert after.row_set(after.find("lm_head")[0].args[0]) == "K1"  # type: ignore[arg-type]
    check(before, after, step)


@pytest.mark.parametrize("family", ["llada", "dream", "sdar", "llada2", "sdar_moe"])
def test_on_every_family(family: str) -> None:
    """Fused in the model or not, with rotary embeddings of a part of a head, with experts."""
    before = rewritten(family_of(family).cached, ChunkLMHead())
    report = report_of(before, OnlyMasked())
    assert report.applied[-1].what == "queries and what follows on masked rows"


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("family", ["sdar_moe", "llada2"])
def test_padding_goes_to_no_expert(family: str, evicts: bool) -> None:
    """After masked rows, and after an eviction that is counted on the device."""
    cached = family_of(family).cached
    front: list[Pass] = [EvictTokens(keep=2), ChunkLMHead()] if evicts else [ChunkLMHead()]
    before = rewritten(cached, *front)
    after = rewritten(before, OnlyMasked(), *([CountRows()] if evicts else []))
    sequences = [[*draw(5, 1), *[MASK] * 3], [*draw(2, 2), *[MASK] * 6]]
    found = []
    for graph in (before, after):
        routed: list[int] = []

        def note(x: Tensor, choice: Tensor, *rest: Tensor, routed: list[int] = routed) -> Tensor:
            routed.append(int((choice >= 0).any(1).sum()))
            return OPS["experts"].reference(x, choice, *rest)  # type: ignore[no-any-return]

        inputs = {**rows_of(sequences), **caches_of(cached.spec, [8, 8])}
        found.append((interpret(graph, inputs, {"experts": note}), routed))
    (want, all_rows), (got, live) = found
    masked = want["token"] >= 0
    assert 0 < int(masked.sum()) < len(masked)
    assert len(live) == len(all_rows) == len(cached.find("experts"))
    assert live == [*all_rows[:-1], int(masked.sum())]
    kept = len(want["token"])
    for name in DECISION:
        torch.testing.assert_close(got[name][:kept], want[name], atol=1e-5, rtol=1e-5)


# -- beside what keeps features ----------------------------------------------------------------------------------


def test_nothing_is_gated_in_a_layer_of_masked_rows(fused: Graph) -> None:
    front: tuple[Pass, ...] = (ChunkLMHead(), OnlyMasked())
    graph = rewritten(fused, *front, GateFFN(0.9), PartialAttention(0.9, update=False))
    assert [n.meta["layer"] for n in graph.find("drift")] == [0, 1, 2]
    assert {"c_cache_2", "f_cache_2"} < set(graph.inputs)
    assert not {"c_cache_3", "f_cache_3"} & set(graph.inputs)
    (write,) = graph.find("kv_write", LAST)
    flags = graph.find("drift", LAST - 1)[0]
    assert [u.args[0] for u in flags.users if u.target is OPS["list_kept"].overload] == [flags]
    assert write.args[6].args[0].args[0] is flags, "keys and values are those of the layer's salient rows"  # type: ignore[union-attr]
    ffn = report_of(rewritten(fused, *front), GateFFN(0.9))
    assert [s.layer for s in ffn.skipped] == [LAST]
    assert "masked rows alone" in ffn.skipped[0].reason


def test_contexts_of_masked_rows_cannot_be_updated(fused: Graph) -> None:
    graph = rewritten(fused, ChunkLMHead(), OnlyMasked(), GateFFN(0.9))
    (skipped,) = report_of(graph, PartialAttention(0.9)).skipped
    assert skipped.layer == LAST
    assert skipped.reason == (
        "it runs on masked rows alone, so there is no context of the others to update; use update=False"
    )


# -- where it does not fire --------------------------------------------------------------------------------------


def reasons(graph: Graph) -> list[str]:
    report = report_of(graph, OnlyMasked())
    assert report.applied == []
    return [s.reason for s in report.skipped]


def test_without_an_lm_head_it_is_a_near_miss(cached: Graph) -> None:
    assert reasons(cached) == ["no lm_head says which rows need logits; run ChunkLMHead first"]


def test_without_a_cache_it_is_a_near_miss(packed: Graph) -> None:
    graph = rewritten(packed, ChunkLMHead())
    assert reasons(graph) == ["it is dgraph.packed_attention; only paged_attention is left to some of its rows"]


def test_a_last_layer_of_which_nothing_is_known_is_a_near_miss(cached: Graph) -> None:
    graph = rewritten(cached, ChunkLMHead())
    (attention,), step = graph.find("paged_attention", LAST), OnlyMasked()
    graph.replace(attention, attention.args[0])  # type: ignore[arg-type]
    report = Report(step.name, repr(step), step.effect)
    step.run(graph, report)
    assert [s.reason for s in report.skipped] == ["nothing in layer 3, the last one, is known to attend"]


def test_twice_it_is_a_near_miss(cached: Graph) -> None:
    graph = rewritten(cached, ChunkLMHead(), OnlyMasked())
    assert reasons(graph) == ["the last layer runs on masked rows already"]


def test_few_keys_are_a_near_miss() -> None:
    graph = rewritten(family_of("llada").cached, SparseKV("mask_voting", 0.0, (4,)), ChunkLMHead())
    assert reasons(graph) == ["it is dgraph.sparse_attention; only paged_attention is left to some of its rows"]


@pytest.mark.parametrize("late", [GateFFN(0.9), PartialAttention(0.9, update=False)])
def test_after_what_keeps_features_it_is_a_near_miss(cached: Graph, late: Pass) -> None:
    graph = rewritten(cached, ChunkLMHead(), late)
    (reason,) = reasons(graph)
    assert reason.endswith("of all rows") or "not known to act row by row" in reason


def test_where_rows_are_gathered_after_the_last_layer_it_is_a_near_miss(cached: Graph) -> None:
    graph = rewritten(cached, ChunkLMHead()).copy()
    (head,) = graph.find("lm_head")
    masked, cu_rows = graph.input("candidate"), graph.input("cu_rows")
    kept = graph.call(OPS["list_kept"], (masked, cu_rows), before=head, by="Test", rows="K")
    (index,) = graph.parts(kept, 1, "Test")
    gathered = graph.call(OPS["compact"], ([head.args[0]], index), before=head, by="Test")
    head.replace_input_with(head.args[0], graph.parts(gathered, 1, "Test")[0])  # type: ignore[arg-type]
    assert reasons(graph) == ["the LM head reads rows K, this attention makes rows N"]


def test_in_the_layer_that_evicts(cached: Graph, step: Scene) -> None:
    before = rewritten(cached, EvictTokens(after=LAST), ChunkLMHead())
    check(before, rewritten(before, OnlyMasked()), step)


def test_queries_that_something_else_reads_stay(fused: Graph) -> None:
    graph = rewritten(fused, ChunkLMHead()).copy()
    (attention,) = graph.find("paged_attention", LAST)
    other = graph.call(aten.neg.default, (attention.args[0],), before=attention, by="Test")
    graph.set_outputs({**graph.results(), "other": other})
    report = report_of(graph, OnlyMasked())
    assert report.applied[-1].what == "what follows on masked rows"
