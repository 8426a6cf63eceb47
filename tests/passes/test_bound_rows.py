"""BoundRows: norms and rotary embeddings of listed rows stop after them; every reason to leave one alone."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Node

from dgraph.errors import PassError
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.passes import (
    PASSES,
    BoundRows,
    CacheKV,
    CountRows,
    EvictTokens,
    FuseGLU,
    FuseProjections,
    GateFFN,
    PartialAttention,
    ReuseRows,
)
from dgraph.passes.base import Pass, Report, pass_from_json
from dgraph.text.writer import dump
from tests.golden_files import check_golden
from tests.oracle.dyllm import Method
from tests.passes.scene import check_kept_rows
from tests.passes.sparse_step import FAMILIES, check_against_oracle, check_lossless, family_of
from tests.tiny import Hand, interpret, ops_of, report_of, rewritten

aten = torch.ops.aten
FFN = "rows_norm of post_attention_layernorm"
KEYS = "rows_rope of self_attn"


def sparse_of(name: str, tau: float = 0.7, update: bool = True) -> Graph:
    """Feed-forward networks, keys and values of salient rows only."""
    return rewritten(family_of(name).cached, FuseProjections(), GateFFN(tau), PartialAttention(tau, update))


# -- where it fires ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("name", ["llada", "dream", "sdar"])
def test_it_fires_at_the_keys_and_the_feed_forward_network_of_each_layer(name: str, update: bool) -> None:
    before = sparse_of(name, update=update)
    report = report_of(before, BoundRows())
    assert report.skipped == []
    layers = range(before.spec.layers)
    assert [(a.layer, a.what) for a in report.applied] == [(x, what) for x in layers for what in (KEYS, FFN)]
    graph = rewritten(before, BoundRows())
    for layer in layers:
        (norm,), (rope,) = graph.find("rows_norm", layer), graph.find("rows_rope", layer)
        (write,) = graph.find("kv_update", layer) + graph.find("kv_write", layer)
        assert rope in write.args
        assert rope.args[3] is write.args[6]
        (linear,) = norm.users
        assert norm.args[3] is linear.args[3]
        assert (rope.args[4] is not None) == (name == "sdar"), "a norm of heads is part of the call"
        assert {norm.meta["by"], rope.meta["by"]} == {"BoundRows"}
        assert graph.row_set(norm) == graph.row_set(rope) == "N"
    # Of each layer, the norm before the queries stays, and so do the queries' own.
    per_layer = 2 if name == "sdar" else 1
    assert len(graph.find("rms_norm")) == per_layer * graph.spec.layers + 1
    assert len(graph.find("rope")) == graph.spec.layers
    assert (graph.inputs, graph.outputs, graph.tensors) == (before.inputs, before.outputs, before.tensors)


@pytest.mark.parametrize("unit_first", [True, False])
def test_it_fires_before_a_gated_unit_that_is_one_call(unit_first: bool) -> None:
    passes = (FuseGLU(), BoundRows()) if unit_first else (BoundRows(), FuseGLU())
    graph = rewritten(sparse_of("llada"), *passes)
    assert len(graph.find("rows_norm")) == len(graph.find("rows_glu")) == graph.spec.layers


def test_a_norm_of_keys_without_a_weight_is_no_part_of_their_rotation() -> None:
    """There the kernel would rotate what was not normed."""
    graph = sparse_of("sdar").copy()
    for norm in graph.find("rms_norm"):
        if all(user.target is OPS["rope"].overload for user in norm.users):
            norm.args = (norm.args[0], None, *norm.args[2:])
    graph.propagate()
    report = report_of(graph, BoundRows())
    assert {a.what for a in report.applied} == {FFN}
    assert len(report.skipped) == graph.spec.layers
    assert all("rms_norm computes its input for all rows" in one.reason for one in report.skipped)


@pytest.mark.parametrize("name", ["sdar_moe", "llada2"])
def test_a_norm_that_experts_read_is_a_near_miss(name: str) -> None:
    graph = sparse_of(name)
    mixed = [layer for layer in range(graph.spec.layers) if graph.find("experts", layer)]
    report = report_of(graph, BoundRows())
    misses = [(s.layer, s.reason) for s in report.skipped if "post_attention_layernorm" in s.node]
    assert misses == [(layer, "linear reads it for every row, listed or not") for layer in mixed] != []
    assert [a.layer for a in report.applied if a.what == FFN] == sorted({*range(graph.spec.layers)} - {*mixed})


def test_keys_of_which_a_part_is_rotated_are_a_near_miss() -> None:
    report = report_of(sparse_of("llada2"), BoundRows())
    misses = [s for s in report.skipped if "key_layernorm" in s.node]
    assert [s.layer for s in misses] == [0, 1, 2]
    assert {s.reason for s in misses} == {"slice reads it for every row, listed or not"}


def test_after_an_eviction_that_is_counted_queries_stop_as_well(packed: Graph) -> None:
    """There the norms of the residual stream follow a sum over all rows."""
    before = rewritten(packed, FuseProjections(), CacheKV(), EvictTokens(after=1), CountRows(), FuseGLU())
    report = report_of(before, BoundRows())
    assert [(a.layer, a.what) for a in report.applied] == [(layer, KEYS) for layer in (2, 2, 3, 3)]
    # After the eviction in layer 1: its second norm, two of each layer, and the one before the LM head.
    assert [s.layer for s in report.skipped] == [1, 2, 2, 3, 3, None]
    assert {s.reason for s in report.skipped} == {"add computes its input for all rows; the two are one kernel"}
    graph = rewritten(before, BoundRows())
    assert {graph.row_set(n) for n in graph.find("rows_rope")} == {"K"}
    assert [ops_of(graph, layer).count("dgraph.rope") for layer in range(4)] == [2, 2, 0, 0]


def test_it_fires_after_rows_that_are_reused() -> None:
    before = rewritten(family_of("llada").cached, FuseProjections(), ReuseRows(0.25))
    report = report_of(before, BoundRows())
    assert report.skipped == []
    assert [(a.layer, a.what) for a in report.applied] == [(x, what) for x in (1, 2) for what in (KEYS, KEYS, FFN)]


# -- the same values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", ["llada", "dream", "sdar", "sdar_moe"])
def test_it_is_the_method_in_plain_pytorch(name: str, padding: int) -> None:
    graph = rewritten(sparse_of(name), FuseGLU(), BoundRows())
    counts = check_against_oracle(family_of(name), graph, Method(0.7), padding)
    assert 0 < counts[2] < counts[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_with_tau_above_one_it_is_the_dense_program(name: str) -> None:
    dense = rewritten(family_of(name).cached, FuseProjections())
    check_lossless(dense, rewritten(sparse_of(name, 1.01), BoundRows()), exactly=False, first=False)


def test_kept_rows_have_the_values_of_the_program_without_it(packed: Graph) -> None:
    check_kept_rows(packed, BoundRows())


# -- near misses and errors --------------------------------------------------------------------------------------


class Listed(Hand):
    """Rows of x [N, 8] gathered by a list, and another list."""

    def __init__(self) -> None:
        super().__init__()
        self.x, cu_rows = self.input("x", "N", 8), self.input("cu_rows", "b+1", dtype=torch.int32)
        keep = [self.input(name, "N", dtype=torch.bool) for name in ("keep", "other")]
        self.cu_rows, self.layer = cu_rows, 0
        self.lists = [self.graph.parts(self.call(OPS["list_kept"], flags, cu_rows), 2, "") for flags in keep]

    def gathered(self, value: Node | None = None) -> Node:
        compact = self.call(OPS["compact"], [self.x if value is None else value], self.lists[0][0])
        return self.call(operator.getitem, compact, 0)

    def norm(self, x: Node) -> Node:
        weight = self.weight(f"norm_{len(self.graph.calls)}", x.meta["val"].shape[-1])
        return self.call(OPS["rms_norm"], x, weight, 1e-6)

    def linear(self, x: Node, count: Node | None = None) -> Node:
        weight = self.weight(f"linear_{len(self.graph.calls)}", 8, 8)
        return self.call(OPS["rows_linear"], x, weight, None, self.lists[0][1] if count is None else count)

    def rotated(self, x: Node, angles: int = 1) -> Node:
        heads = self.call(aten.reshape.default, x, [-1, 2, 4])
        cos, sin = (self.gathered(self.input(name, "N", angles, 4)) for name in ("cos", "sin"))
        return self.call(OPS["rope"], heads, cos, sin)

    def attended(self, q: Node) -> Node:
        caches = [self.input(name, "pages", "page", 2, 4) for name in ("k_cache", "v_cache")]
        table = self.input("page_table", "b", "P", dtype=torch.int32)
        limit = self.gathered(self.input("limit", "N", dtype=torch.int32))
        return self.call(OPS["paged_attention"], q, *caches, table, self.lists[0][1], limit, 0.5)


def misses(graph: Graph) -> list[str]:
    """Of a graph that the verifier may refuse: it looks for the same mistakes."""
    before, after, step = ops_of(graph), graph.copy(), BoundRows()
    report = Report(step.name, repr(step), step.effect)
    step.run(after, report)
    assert report.applied == []
    assert ops_of(after) == before
    return [s.reason for s in report.skipped]


def test_a_plain_norm_stops_after_the_list() -> None:
    hand = Listed()
    norm = hand.norm(hand.gathered())
    graph = hand.returns(y=hand.linear(norm), z=hand.linear(norm))
    bounded = rewritten(graph, BoundRows())
    assert ops_of(bounded).count("dgraph.rows_norm") == 1
    assert "dgraph.rms_norm" not in ops_of(bounded)
    inputs = {
        "x": torch.randn(6, 8),
        "cu_rows": torch.tensor([0, 4, 6], dtype=torch.int32),
        "keep": torch.tensor([True, False, True, False, False, True]),
        "other": torch.ones(6, dtype=torch.bool),
    }
    got, want = interpret(bounded, inputs), interpret(graph, inputs)
    for name in "yz":
        assert torch.equal(got[name][:3], want[name][:3])
        assert got[name][3:].isnan().all()


@pytest.mark.parametrize("normed", [False, True])
def test_heads_of_a_product_over_a_count_stop_after_it(normed: bool) -> None:
    hand = Listed()
    projected = hand.linear(hand.gathered())
    heads = hand.call(aten.reshape.default, projected, [-1, 2, 4])
    cos, sin = (hand.gathered(hand.input(name, "N", 1, 4)) for name in ("cos", "sin"))
    rope = hand.call(OPS["rope"], hand.norm(heads) if normed else heads, cos, sin)
    bounded = rewritten(hand.returns(y=hand.attended(rope)), BoundRows())
    (call,) = bounded.find("rows_rope")
    assert (call.args[4] is not None, call.args[5]) == ((True, 1e-6) if normed else (False, 0.0))
    assert "dgraph.rms_norm" not in ops_of(bounded)


def test_a_norm_of_heads_that_something_else_reads_stays() -> None:
    hand = Listed()
    heads = hand.norm(hand.call(aten.reshape.default, hand.linear(hand.gathered()), [-1, 2, 4]))
    cos, sin = (hand.gathered(hand.input(name, "N", 1, 4)) for name in ("cos", "sin"))
    rope = hand.call(OPS["rope"], heads, cos, sin)
    graph = hand.returns(y=hand.attended(rope), z=heads)
    assert misses(graph) == [
        "dgraph.rope reads it for every row, listed or not",
        "dgraph.rms_norm computes its input for all rows; the two are one kernel",
    ]


def test_a_norm_that_all_rows_read_is_a_near_miss() -> None:
    hand = Listed()
    norm = hand.norm(hand.gathered())
    graph = hand.returns(y=hand.linear(norm), z=hand.call(aten.relu.default, norm))
    assert misses(graph) == ["relu reads it for every row, listed or not"]
    hand = Listed()
    assert misses(hand.returns(y=hand.norm(hand.gathered()))) == ["output reads it for every row, listed or not"]


def test_a_norm_after_a_sum_over_all_rows_is_a_near_miss() -> None:
    hand = Listed()
    total = hand.call(aten.add.Tensor, hand.gathered(), hand.linear(hand.gathered()))
    graph = hand.returns(y=hand.linear(hand.norm(total)))
    assert misses(graph) == ["add computes its input for all rows; the two are one kernel"]
    with pytest.raises(PassError, match=r"applied nowhere(.|\n)*near miss at layer 0(.|\n)*add computes its input"):
        rewritten(graph, BoundRows())


@pytest.mark.parametrize("which", ["another list", "all rows", "one of two"])
def test_a_reader_that_counts_other_rows_is_a_near_miss(which: str) -> None:
    hand = Listed()
    norm = hand.norm(hand.gathered())
    count = hand.cu_rows if which == "all rows" else hand.lists[1][1]
    results = {"y": hand.linear(norm, count)} | ({"z": hand.linear(norm)} if which == "one of two" else {})
    assert misses(hand.returns(**results)) == [
        "what reads it counts other rows than those that its input was gathered by"
    ]


def test_a_norm_of_anything_but_vectors_is_a_near_miss() -> None:
    hand = Listed()
    heads = hand.call(aten.reshape.default, hand.gathered(), [-1, 2, 4])
    graph = hand.returns(y=hand.attended(hand.norm(heads)))
    assert misses(graph) == ["it normalises f32[N, 2, 4], not one vector per row"]


@pytest.mark.parametrize("angles", [1, 2])
def test_angles_that_differ_from_head_to_head_are_a_near_miss(angles: int) -> None:
    hand = Listed()
    graph = hand.returns(y=hand.attended(hand.rotated(hand.linear(hand.gathered()), angles)))
    if angles == 1:
        assert len(rewritten(graph, BoundRows()).find("rows_rope")) == 1
    else:
        reason = "it rotates f32[N, 2, 4] by f32[N, 2, 4], not heads by angles of their row"
        assert misses(graph) == [reason]


def test_keys_that_are_the_values_as_well_are_a_near_miss() -> None:
    """The count says nothing about the second argument."""
    hand = Listed()
    k = hand.rotated(hand.linear(hand.gathered()))
    caches = [hand.input(name, "pages", "page", 2, 4) for name in ("k_cache", "v_cache")]
    table, positions = hand.input("page_table", "b", "P", dtype=torch.int32), hand.input("at", "N", dtype=torch.int64)
    out = hand.call(OPS["kv_update"], k, k, *caches, positions, table, hand.lists[0][1])
    assert misses(hand.returns(y=out)) == ["dgraph.kv_update reads it for every row, listed or not"]


def test_rows_that_the_host_knows_are_no_near_miss() -> None:
    hand = Listed()
    hand_norm = hand.norm(hand.x)
    plain = hand.returns(y=hand.linear(hand_norm, hand.cu_rows), z=hand.call(aten.relu.default, hand_norm))
    dense = rewritten(family_of("llada").cached, FuseProjections())
    for graph in (plain, dense, rewritten(sparse_of("llada"), BoundRows())):
        assert misses(graph) == []


def test_it_reads_back_from_json() -> None:
    step: Pass = BoundRows()
    value: dict[str, Any] = step.to_json()
    assert pass_from_json(value, PASSES) == step


# -- dump --------------------------------------------------------------------------------------------------------


def test_the_dump_of_a_step() -> None:
    check_golden("qwen3_bound_step.txt", dump(rewritten(sparse_of("sdar"), FuseGLU(), BoundRows())))
