"""GateFFN: the feed-forward network on salient rows, against the method in plain PyTorch, and its near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from dgraph.errors import InputError, PassError
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import VerifyError, verify
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import schedule
from dgraph.ops import OPS
from dgraph.passes import PASSES, CountRows, EvictTokens, FuseProjections, GateFFN, PartialAttention
from dgraph.passes.base import Pass, pass_from_json
from dgraph.text.writer import dump
from tests.golden_files import check_golden
from tests.oracle.dyllm import Method
from tests.passes.sparse_step import (
    FAMILIES,
    LENGTHS,
    check_against_oracle,
    check_lossless,
    family_of,
    memory_of,
    own_table,
    run,
    three_steps,
)
from tests.tiny import Hand, interpret, read_cache, report_of, rewritten

aten = torch.ops.aten

# -- where it fires ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_it_fires_once_per_layer(name: str) -> None:
    cached = family_of(name).cached
    layers = cached.spec.layers
    report = report_of(cached, GateFFN())
    assert [a.layer for a in report.applied] == list(range(layers))
    assert report.skipped == []
    graph = rewritten(cached, GateFFN())
    for op in ("drift", "list_kept", "compact", "feature_write", "feature_take"):
        assert [n.meta["layer"] for n in graph.find(op)] == list(range(layers)), op
    (slots,) = graph.find("row_slots")
    assert {n.args[1] for n in graph.find("feature_take")} == {slots}
    assert len(graph.find("experts")) == len(cached.find("experts"))
    for layer in range(layers):
        dense = len(cached.find("experts", layer)) == 0
        shared = name == "llada2" and not dense
        assert len(graph.find("rows_linear", layer)) == (3 if dense or shared else 0)
    assert graph.outputs == (*cached.outputs, "salient")
    assert graph.type_text(graph.result("salient")) == f"i32[{layers}]"
    added = {f"{kind}_cache_{layer}" for kind in "cf" for layer in range(layers)}
    assert set(graph.inputs) - set(cached.inputs) == {"full", *added, *own_table(cached.spec)}
    assert graph.tensors == cached.tensors


@pytest.mark.parametrize(("name", "pages"), [("dream", "pages"), ("sdar", "pages_1")])
def test_types_of_its_caches(name: str, pages: str) -> None:
    """Of a block-causal model they are pages of their own, with places for the positions of a step."""
    graph = rewritten(family_of(name).cached, GateFFN())
    spec = graph.spec
    assert graph.inputs["c_cache_1"].shape == (pages, "page", spec.heads, spec.head_dim)
    assert graph.inputs["f_cache_1"].shape == (pages, "page", spec.hidden)
    table = graph.input("page_table" + pages.removeprefix("pages"))
    assert {n.args[4] for n in graph.find("drift")} | {n.args[3] for n in graph.find("feature_write")} == {table}
    assert graph.find("row_slots")[0].args[1] is table
    assert {n.args[3].name for n in graph.find("paged_attention")} == {"page_table"}
    assert graph.inputs["full"].dtype == torch.bool


@pytest.mark.parametrize("name", FAMILIES)
def test_the_program_is_one_stage_over_one_row_set(name: str) -> None:
    graph = rewritten(family_of(name).cached, GateFFN())
    (stage,) = schedule(graph)
    assert (stage.rows, stage.cut) == ("N", None)
    assert {graph.row_set(n) for n in graph.calls} <= {"N", None}


# -- the method --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("tau", [0.7, (0.9, 0.2, 0.8)], ids=str)
@pytest.mark.parametrize("name", FAMILIES[:-1])
def test_it_is_the_method_in_plain_pytorch(name: str, tau: Any, padding: int) -> None:
    family = family_of(name)
    if isinstance(tau, tuple):
        tau = (tau * 2)[: family.config.layers]
    counts = check_against_oracle(family, rewritten(family.cached, GateFFN(tau)), Method(tau, partial=False), padding)
    assert 0 < counts[2] < counts[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_with_tau_above_one_it_is_the_dense_program(name: str) -> None:
    family = family_of(name)
    check_lossless(family.cached, rewritten(family.cached, GateFFN(1.01)), exactly=True)


def test_in_full_steps_it_is_the_dense_program() -> None:
    family = family_of("llada")
    steps = three_steps(family.cached.spec, full=(True, True, True))
    mine = run(rewritten(family.cached, GateFFN(-1.01)), steps, memory_of(family.cached.spec, LENGTHS))
    theirs = run(family.cached, steps, memory_of(family.cached.spec, LENGTHS))
    for (got, _), (wanted, _) in zip(mine, theirs, strict=True):
        assert torch.equal(got["logits"], wanted["logits"])
        assert got["salient"].tolist() == [sum(LENGTHS)] * 3


@pytest.mark.parametrize("name", FAMILIES)
def test_with_tau_below_minus_one_no_row_is_salient_after_the_full_step(name: str) -> None:
    graph = rewritten(family_of(name).cached, GateFFN(-1.01))
    memory, steps = memory_of(graph.spec, LENGTHS), three_steps(graph.spec)
    run(graph, steps[:1], memory)
    before = [read_cache(memory, f"f_cache_{layer}", 2, LENGTHS[2]) for layer in range(graph.spec.layers)]
    for out, _ in run(graph, steps[1:], memory):
        assert out["salient"].tolist() == [0] * graph.spec.layers
        assert out["logits"].isfinite().all()
    for layer, values in enumerate(before):
        assert torch.equal(read_cache(memory, f"f_cache_{layer}", 2, LENGTHS[2]), values)


def test_nothing_new_is_nothing_salient() -> None:
    """The same rows again: every context is that of the cache, so every row takes its features from there."""
    graph = rewritten(family_of("dream").cached, GateFFN(0.99))
    memory, steps = memory_of(graph.spec, LENGTHS), three_steps(graph.spec)
    ((first, _),) = run(graph, steps[:1], memory)
    again = {**steps[0], "full": torch.zeros_like(steps[0]["full"])}
    ((second, _),) = run(graph, [again], memory)
    assert second["salient"].tolist() == [0, 0, 0]
    assert torch.equal(first["logits"], second["logits"])


@pytest.mark.parametrize("name", ["sdar_moe", "llada2"])
def test_rows_that_are_not_salient_are_routed_to_no_expert(name: str) -> None:
    graph = rewritten(family_of(name).cached, GateFFN(0.7))
    memory, steps = memory_of(graph.spec, LENGTHS), three_steps(graph.spec, padding=3)
    routed: list[int] = []

    def note(x: Any, choice: torch.Tensor, *rest: Any) -> Any:
        chosen = choice >= 0
        assert (chosen.all(1) == chosen.any(1)).all()
        routed.append(int(chosen.any(1).sum()))
        return OPS["experts"].reference(x, choice, *rest)

    for inputs in steps:
        routed.clear()
        out = interpret(graph, {**inputs, **memory}, {"experts": note})
        layers = [n.meta["layer"] for n in graph.find("experts")]
        assert routed == out["salient"][layers].tolist()


# -- with other passes -------------------------------------------------------------------------------------------


def test_after_fused_projections_their_one_product_is_gated() -> None:
    family = family_of("llada")
    graph = rewritten(family.cached, FuseProjections(), GateFFN(0.7))
    assert len(graph.find("rows_linear")) == 2 * 3
    check_against_oracle(family, graph, Method(0.7, partial=False))
    fused = rewritten(family.cached, FuseProjections())
    check_lossless(fused, rewritten(fused, GateFFN(1.01)), exactly=True)


def test_projections_are_fused_after_it_where_they_run_on_all_rows() -> None:
    family = family_of("llada")
    gated = rewritten(family.cached, GateFFN(0.7))
    assert [a.what for a in report_of(gated, FuseProjections()).applied] == ["q_proj+k_proj+v_proj"] * 3
    check_against_oracle(family, rewritten(gated, FuseProjections()), Method(0.7, partial=False))


def test_after_an_eviction_it_gates_the_kept_rows() -> None:
    cached = family_of("sdar").cached
    graph = rewritten(cached, EvictTokens(), GateFFN(1.01))
    assert [graph.row_set(n) for n in graph.find("drift")] == ["N", "K", "K", "K"]
    assert [graph.row_set(n) for n in graph.find("feature_take")] == ["N", "K", "K", "K"]
    assert [graph.row_set(n) for n in graph.find("row_slots")] == ["N", "K"], "found once per row set"
    for take in graph.find("feature_take"):
        assert graph.row_set(take.args[1]) == graph.row_set(take)


@pytest.mark.parametrize("counted", [(), (CountRows(),)], ids=["cut", "counted"])
def test_rows_that_an_eviction_keeps_take_their_own_features(counted: tuple[Pass, ...]) -> None:
    """What a step kept for all rows is read by those that the next step keeps, none of which is salient."""
    cached = family_of("sdar").cached
    graph = rewritten(cached, EvictTokens(keep=1), GateFFN(-1.01), *counted)
    assert len(graph.find("row_slots")) == 2
    first, second, _ = three_steps(graph.spec)
    everything = {**first, "candidate": torch.zeros_like(first["full"])}  # nothing to evict
    some = {**second, "candidate": torch.ones_like(second["full"])}
    memory = memory_of(graph.spec, LENGTHS)
    interpret(graph, {**everything, **memory})
    again = {name: value.clone() for name, value in memory.items()}

    def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        taken.append(slots[slots >= 0].tolist())
        return OPS["feature_take"].reference(cache, slots)

    taken: list[list[int]] = []
    wanted = interpret(graph, {**some, **memory}, {"feature_take": read})
    kept = wanted["kept"][wanted["kept"] >= 0]
    assert 0 < len(kept) < sum(LENGTHS)
    places = (some["positions"], memory["page_table_1"], some["cu_rows"])
    assert taken[0] == OPS["row_slots"].reference(*places, memory["f_cache_0"]).tolist()
    assert taken[1:] == [[taken[0][i] for i in kept]] * 3
    got = LoweredProgram(graph, RegionCompiler("eager"), Buckets())({**some, **again}, sum(LENGTHS)).outputs
    assert torch.equal(got["logits"][: len(kept)], wanted["logits"][: len(kept)])
    for name, value in memory.items():
        assert torch.equal(again[name].nan_to_num(7.0), value.nan_to_num(7.0)), name


# -- near misses and errors --------------------------------------------------------------------------------------


def reasons(graph: Graph, step: Pass) -> list[str]:
    return list(dict.fromkeys(s.reason for s in report_of(graph, step).skipped))


def test_without_a_cache_there_is_no_place_to_keep_features() -> None:
    for graph in (family_of("sdar").packed,):
        (reason,) = reasons(graph, GateFFN())
        assert reason == "this attention reads no cache, so features have no place to be kept; run CacheKV first"
        with pytest.raises(PassError, match=r"applied nowhere(.|\n)*near miss at layer 0"):
            rewritten(graph, GateFFN())


def test_a_layer_is_gated_once() -> None:
    assert reasons(rewritten(family_of("sdar").cached, GateFFN()), GateFFN()) == ["the layer is gated already"]


def test_after_counted_linear_layers_it_leaves_the_layer_alone() -> None:
    graph = rewritten(family_of("sdar").cached, EvictTokens(after=3), CountRows())
    report = report_of(graph, GateFFN())
    assert [a.layer for a in report.applied] == [0, 1, 2]
    assert [s.layer for s in report.skipped] == [3]
    assert "also reads" in report.skipped[0].reason


Tail = Callable[[Hand, Node, Node, Node], Node]


def layer_with(tail: Tail, layer: int | None = 0) -> Graph:
    """One layer: an attention over the cache, and whatever `tail` makes of the stream, the context and an input."""
    hand = Hand(layers=1)
    x, y = hand.input("x", "N", 16), hand.input("y", "N", 16)
    positions, limit = hand.input("positions", "N", dtype=torch.int64), hand.input("limit", "N", dtype=torch.int32)
    cu_rows = hand.input("cu_rows", "b+1", dtype=torch.int32)
    table = hand.input("page_table", "b", "P", dtype=torch.int32)
    caches = [hand.input(f"{kind}_cache_0", "pages", "page", 4, 4) for kind in "kv"]
    hand.layer = layer
    heads = hand.call(aten.reshape.default, x, [-1, 4, 4])
    hand.call(OPS["kv_write"].overload, heads, heads, *caches, positions, table, cu_rows)
    context = hand.call(OPS["paged_attention"].overload, heads, *caches, table, cu_rows, limit, 0.5)
    out = tail(hand, x, hand.call(aten.reshape.default, context, [-1, 16]), y)
    hand.layer = None
    return hand.returns(z=hand.call(aten.neg.default, out))


def added(hand: Hand, x: Node, y: Node) -> Node:
    return hand.call(aten.add.Tensor, x, y)


def project(hand: Hand, x: Node) -> Node:
    return hand.call(aten.linear.default, x, hand.weight(f"layers.0.p{len(hand.graph.tensors)}.weight", 16, 16))


def plain(hand: Hand, x: Node, context: Node, y: Node) -> Node:
    h = added(hand, added(hand, x, y), context)
    return added(hand, h, project(hand, h))


def in_parallel(hand: Hand, x: Node, context: Node, y: Node) -> Node:
    h = added(hand, x, project(hand, x))
    return added(hand, added(hand, context, y), h)


def beside(hand: Hand, x: Node, context: Node, y: Node) -> Node:
    h = added(hand, x, context)
    return added(hand, h, hand.call(aten.mul.Tensor, project(hand, h), y))


def no_sum(hand: Hand, x: Node, context: Node, y: Node) -> Node:
    return project(hand, added(hand, x, context))


def before_the_attention(hand: Hand, x: Node, context: Node, y: Node) -> Node:
    h = added(hand, x, y)
    return added(hand, h, project(hand, h))


def twice(hand: Hand, x: Node, context: Node, y: Node) -> Node:
    return added(hand, added(hand, context, y), added(hand, x, project(hand, context)))


@pytest.mark.parametrize("tail", [plain, in_parallel])
def test_a_plain_layer_is_gated(tail: Tail) -> None:
    graph = rewritten(layer_with(tail), GateFFN())
    assert [n.meta["role"] for n in graph.find("rows_linear")] == ["block"]


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (twice, "the layer ends in a sum of 4 values, of which 2 are computed from the attention and 0 beside it"),
        (beside, "the feed-forward network also reads y, beside the residual stream"),
        (no_sum, "0 sums leave the layer; expected one, of residual stream and feed-forward network"),
        (before_the_attention, "what the layer adds last does not read its attention"),
    ],
)
def test_a_feed_forward_network_that_cannot_be_told_is_a_near_miss(tail: Tail, reason: str) -> None:
    report = report_of(layer_with(tail), GateFFN())
    assert report.applied == []
    assert [s.reason.partition(";")[0] for s in report.skipped] == [reason.partition(";")[0]]


def test_an_attention_outside_the_layers_is_a_near_miss() -> None:
    report = report_of(layer_with(plain, None), GateFFN())
    assert [s.reason for s in report.skipped] == ["an attention outside the layers has no feed-forward network"]


@pytest.mark.parametrize("tau", [float("nan"), float("inf"), "0.9", None, True, (), (0.9, None)], ids=str)
@pytest.mark.parametrize("step", [GateFFN, PartialAttention])
def test_tau_is_a_number_or_one_for_each_layer(step: Any, tau: Any) -> None:
    with pytest.raises(InputError, match="tau must be a number, or one for each layer"):
        step(tau=tau)


@pytest.mark.parametrize("step", [GateFFN, PartialAttention])
def test_there_are_as_many_taus_as_layers(step: Any) -> None:
    with pytest.raises(InputError, match="tau has 2 values, but the model 4 layers"):
        rewritten(family_of("sdar").cached, step((0.9, 0.8)))


@pytest.mark.parametrize("step", [GateFFN(0.98), GateFFN((0.9, 1, -1.01)), PartialAttention([0.5, 0.25])], ids=repr)  # type: ignore[arg-type]
def test_it_reads_back_from_json(step: Pass) -> None:
    assert pass_from_json(step.to_json(), PASSES) == step
    assert isinstance(hash(step), int)


def test_features_are_read_after_their_write() -> None:
    graph = rewritten(family_of("sdar").cached, GateFFN())
    (write,), (read,) = graph.find("feature_write", 1), graph.find("feature_take", 1)
    read.append(write)
    with pytest.raises(VerifyError, match=r"reads f_cache_1 before its write"):
        verify(graph)


def test_the_dump_of_a_step() -> None:
    check_golden("qwen3_gated_step.txt", dump(rewritten(family_of("sdar").cached, GateFFN())))
