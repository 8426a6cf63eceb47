"""Diffs: facts of dense against focus, nothing where nothing changed, no noise from renumbering."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import UnknownName
from dgraph.ir.graph import Graph
from dgraph.recipes import RECIPES, build
from dgraph.text.diff import Diff, diff
from dgraph.text.views import diff as diff_view
from tests.tiny import Hand

aten = torch.ops.aten
OPS = torch.ops.dgraph


def step(graph: Graph, recipe: str, **options: Any) -> Graph:
    return dgraph.rewrite(graph, build(RECIPES, recipe, graph.spec, options))["step"].graph


@pytest.fixture(scope="module")
def dense(captured: Graph) -> Graph:
    return step(captured, "dense")


@pytest.fixture(scope="module")
def dense_to_focus(captured: Graph, dense: Graph) -> Diff:
    return diff(dense, step(captured, "focus"), ("dense", "focus"))


def counts(found: Diff) -> dict[Any, tuple[int, int, int]]:
    """Per group (added, removed, changed), groups without a change left out."""
    each = {g.layers or g.place: (g.total("+"), g.total("-"), g.total("~")) for g in found.groups}
    return {place: numbers for place, numbers in each.items() if any(numbers)}


# -- nothing changed ---------------------------------------------------------------------------------------------


def test_equal_graphs_have_no_difference(captured: Graph, dense: Graph) -> None:
    for a, b in ((captured, captured.copy()), (dense, dense), (dense, step(captured, "dense"))):
        found = diff(a, b)
        assert not found
        assert str(found) == "before and after: no difference\n"
        assert counts(found) == {}
        assert all(not g["changes"] for g in found.to_json()["groups"])


def test_both_phases_of_prefill_are_equal(captured: Graph) -> None:
    assert not diff_view(captured, "dense", "focus", phase="prefill")


# -- dense against focus -----------------------------------------------------------------------------------------


def test_summary_of_dense_to_focus(dense_to_focus: Diff) -> None:
    assert dense_to_focus
    assert counts(dense_to_focus) == {(0, 0): (1, 0, 0), (1, 1): (7, 0, 1), (2, 3): (0, 0, 2)}
    assert {g.layers: dict(g.rows) for g in dense_to_focus.groups if g.rows} == {
        (1, 1): {("N", "K"): 11},
        (2, 3): {("N", "K"): 23},
        None: {("N", "K"): 2},
    }
    assert dense_to_focus.by_pass["EvictTokens"] == {"added": 8, "removed": 0, "changed": 0}
    assert dense_to_focus.by_pass["CacheKV"] == {"added": 0, "removed": 0, "changed": 5}
    declared = dense_to_focus.declared
    assert declared["inputs"].added == ("average f32[b]", "reached i32[b]", "block_step i32[b]")
    assert declared["outputs"].added == ("kept i64[K]", "reached i32[b]", "score f32[N]")
    assert declared["outputs"].removed == ()  # token and confidence have other rows, which is not another type
    assert not declared["weights"]
    assert not declared["model"]
    assert declared["row sets"].added == ("K = rows kept by dgraph.keep_index in layers[1]",)
    assert len(declared["passes"].added) == 1


def test_text_of_dense_to_focus(dense_to_focus: Diff) -> None:
    text = str(dense_to_focus)
    summary, body = text.split("--- dense\n+++ focus\n")
    assert summary.startswith("dense -> focus: calls 8 added, 0 removed, 5 changed, 100 unchanged\n")
    assert "inputs    + average f32[b], reached i32[b], block_step i32[b]\n" in summary
    assert "N -> K in 23 calls" in summary
    assert [line for line in body.splitlines() if line.startswith("@@")] == [
        "@@ layers[0] @@",
        "@@ layers[1] @@",
        "@@ layers[2..3] x2 @@",
    ]
    assert body.count("dgraph.importance(") == 2
    assert "stage cut" in body
    assert len([line for line in body.splitlines() if line.startswith("-")]) == 3


def test_json_of_a_diff(dense_to_focus: Diff) -> None:
    data = json.loads(json.dumps(dense_to_focus.to_json(), allow_nan=False))
    assert data["summary"]["calls"] == {"unchanged": 100, "added": 8, "removed": 0, "changed": 5}
    added = ["average f32[b]", "reached i32[b]", "block_step i32[b]"]
    assert data["summary"]["inputs"] == {"removed": [], "added": added}
    (rest,) = (g for g in data["groups"] if g["layers"] == [2, 3])
    assert rest["rows"] == [{"from": "N", "to": "K", "calls": 23}]
    assert [c["mark"] for c in rest["changes"]] == ["~", "~"]
    assert rest["changes"][0]["before"]["by"] == "CacheKV"


# -- captured against dense --------------------------------------------------------------------------------------


def test_captured_to_dense(captured: Graph, dense: Graph) -> None:
    found = diff(captured, dense)
    assert found.declared["weights"].added[0].startswith("model.layers.0..3.self_attn.q_proj+k_proj+v_proj.weight")
    assert found.declared["inputs"].removed == ()  # input_ids and positions have other rows only
    assert "logits" in found.declared["outputs"].removed[0]
    assert [g.layers for g in found.groups] == [None, (0, 3), None]
    assert found.total("+") - found.total("-") == _calls(dense) - _calls(captured)
    removed = {
        c.before[0].call.split(" = ")[-1].split("(")[0] for g in found.groups for c in g.changes if c.mark == "-"
    }
    assert {"transpose", "dgraph.attention"} <= removed


def _calls(graph: Graph) -> int:
    from dgraph.text.listing import listing

    return sum(len(s.lines) for s in listing(graph).sections)


# -- single changes ----------------------------------------------------------------------------------------------


def chain(insert_at: int | None = None, swap_at: int | None = None, scale_at: int | None = None) -> Graph:
    """Four layers of three calls; optionally one call more, other operands, or another constant in one layer."""
    hand = Hand(layers=4)
    x = hand.call(aten.relu.default, hand.input("x", "N", 16))
    for hand.layer in range(4):
        start = x
        if hand.layer == insert_at:
            start = hand.call(aten.tanh.default, start)
        a = hand.call(aten.mul.Tensor, start, 3.0 if hand.layer == scale_at else 2.0)
        b = hand.call(aten.mul.Tensor, start, 5.0)
        x = hand.call(aten.sub.Tensor, *((b, a) if hand.layer == swap_at else (a, b)))
    return hand.returns(x=x)


def test_an_inserted_call_is_the_only_difference_in_its_layer() -> None:
    found = diff(chain(), chain(insert_at=2))
    # Its readers are rewired to it; what follows was merely renumbered.
    assert counts(found) == {(2, 2): (1, 0, 2)}
    assert "+   %0 = tanh(layers[1].%2)" in str(found)


def test_another_constant_is_one_change() -> None:
    found = diff(chain(), chain(scale_at=1))
    assert counts(found) == {(1, 1): (0, 0, 1)}
    assert "3.0" in str(found)


def test_other_wiring_is_a_change() -> None:
    found = diff(chain(), chain(swap_at=3))
    assert counts(found) == {(3, 3): (0, 0, 1)}
    assert "-   %2 = sub(%0, %1)" in str(found)
    assert "+   %2 = sub(%1, %0)" in str(found)


def test_equal_changes_in_consecutive_layers_are_shown_once() -> None:
    graph = chain()
    for node in graph.calls:
        if node.target is aten.mul.Tensor and node.args[1] == 5.0 and node.meta["layer"] in (1, 2, 3):
            node.args = (node.args[0], 7.0)
    found = diff(chain(), graph)
    assert counts(found) == {(1, 3): (0, 0, 1)}
    assert str(found).count("7.0") == 1
    assert found.total("~") == 3


def test_a_layer_that_is_gone() -> None:
    hand = Hand(layers=3)
    x = hand.call(aten.relu.default, hand.input("x", "N", 16))
    for hand.layer in range(3):
        x = hand.call(aten.sub.Tensor, hand.call(aten.mul.Tensor, x, 2.0), hand.call(aten.mul.Tensor, x, 5.0))
    found = diff(chain(), hand.returns(x=x))
    assert counts(found) == {(3, 3): (0, 3, 0)}
    assert found.declared["model"].removed == ("layers: 4",)


# -- from the name of a model ------------------------------------------------------------------------------------


def test_options_go_to_the_recipe_that_has_them(captured: Graph) -> None:
    found = diff_view(captured, "dense", "focus", alpha=2.0, max_num_logits=64)
    assert "EvictTokens(alpha=2.0" in found.declared["passes"].added[0]
    assert counts(found)[(1, 1)] == (7, 0, 1)
    with pytest.raises(UnknownName, match=r"unknown option of 'dense' or 'focus' 'alhpa'. Did you mean 'alpha'"):
        diff_view(captured, alhpa=2.0)
    with pytest.raises(UnknownName, match=r"unknown recipe 'dens'. Did you mean 'dense'"):
        diff_view(captured, "dens")


def test_captured_is_a_side_too(captured: Graph, dense: Graph) -> None:
    assert str(diff_view(captured, "captured", "dense")) == str(diff(captured, dense, ("captured", "dense step")))
