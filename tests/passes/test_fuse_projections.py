"""FuseProjections: one GEMM per input, weights stacked in place, and every reason to leave projections alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

import dgraph
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import Signature, verify
from dgraph.passes import FuseProjections, PackRows
from dgraph.passes.base import Report
from dgraph.passes.fuse_projections import stack
from tests.oracle.models import random_weights, tiny_config, to_transformers
from tests.tiny import MASK, Hand, draw, interpret, ops_of, report_of, rewritten, rows_of

aten = torch.ops.aten
LAYERS = 4


def fresh(packed: Graph) -> tuple[Graph, dict[str, Tensor]]:
    """The packed graph over weights of its own, and what they hold."""
    graph = packed.copy()
    graph.tensors = {name: torch.nn.Parameter(t.detach().clone()) for name, t in packed.tensors.items()}
    return graph, {name: t.detach().clone() for name, t in graph.tensors.items()}


def linears(graph: Graph, layer: int) -> list[Node]:
    return [n for n in graph.calls if n.target is aten.linear.default and n.meta["layer"] == layer]


def storage(tensors: Any) -> int:
    """Bytes of all distinct storages."""
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(seen.values())


def test_it_fires_twice_per_layer(packed: Graph) -> None:
    graph, _ = fresh(packed)
    report = report_of(graph, FuseProjections())
    assert [(a.layer, a.what) for a in report.applied] == [
        (layer, what)
        for layer in range(LAYERS)
        for what in ("q_proj+k_proj+v_proj", "gate_proj+up_proj")
    ]  # fmt: skip
    assert report.skipped == []
    fused = rewritten(graph, FuseProjections())
    for layer in range(LAYERS):
        found = linears(fused, layer)
        assert [fused.type_text(n) for n in found] == ["f32[N, 128]", "f32[N, 64]", "f32[N, 256]", "f32[N, 64]"]
        names = [n.args[1].meta["weight"].split(".", 3)[3] for n in found]
        assert names == [
            "self_attn.q_proj+k_proj+v_proj.weight",
            "self_attn.o_proj.weight",
            "mlp.gate_proj+up_proj.weight",
            "mlp.down_proj.weight",
        ]
        roles = [n.meta["role"] for n in found]
        assert roles[0] == "self_attn.q_proj+k_proj+v_proj"
        assert roles[2] == "mlp.gate_proj+up_proj"
        splits = [
            n.args[1:] for n in fused.calls if n.meta["layer"] == layer and n.target is aten.split_with_sizes.default
        ]
        assert splits == [([64, 32, 32], 1), ([128, 128], 1)]
    assert not any("q_proj.weight" in name and "+" not in name for name in fused.tensors)
    assert len(linears(fused, 0)) == 4
    assert fused.result("logits").target is aten.linear.default, "the head is outside the layers and stays"


def test_the_outputs_are_equal_within_rounding(packed: Graph) -> None:
    graph, _ = fresh(packed)
    inputs = rows_of([draw(7, 1), draw(4, 2)])
    expected = interpret(graph, inputs)["logits"]
    got = interpret(rewritten(graph, FuseProjections()), inputs)["logits"]
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_each_projection_gets_its_own_columns(packed: Graph) -> None:
    graph, _ = fresh(packed)
    fused = rewritten(graph, FuseProjections())
    weight = fused.tensors[linears(fused, 1)[0].args[1].meta["weight"]]
    parts = [graph.tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(weight, torch.cat([p.detach() for p in parts]))


def test_memory_is_shared_and_values_are_unchanged(packed: Graph) -> None:
    graph, values = fresh(packed)
    before = storage(graph.tensors.values())
    objects = dict(graph.tensors)
    fused = rewritten(graph, FuseProjections())
    for name, tensor in objects.items():
        assert torch.equal(tensor, values[name]), name
        assert tensor.requires_grad
    assert storage([*objects.values(), *fused.tensors.values()]) == before, "no byte more than before"
    whole = fused.tensors["model.layers.2.mlp.gate_proj+up_proj.weight"]
    with torch.no_grad():
        objects["model.layers.2.mlp.up_proj.weight"][0, 0] = 42.0
    assert whole[128, 0] == 42.0, "a parameter is a view of the stacked weight"


def test_a_second_graph_over_the_model_stacks_nothing(packed: Graph) -> None:
    graph, _ = fresh(packed)
    first, second = rewritten(graph, FuseProjections()), rewritten(graph, FuseProjections())
    for name, tensor in first.tensors.items():
        assert second.tensors[name].data_ptr() == tensor.data_ptr(), name
        assert second.tensors[name].shape == tensor.shape
    assert storage([*first.tensors.values(), *second.tensors.values()]) == storage(first.tensors.values())


def test_the_weights_of_qwen2_have_biases() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()  # type: ignore[arg-type]
    for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.v_proj):
        torch.nn.init.normal_(projection.bias)
    captured = dgraph.capture(model, mask_id=MASK)
    packed = rewritten(captured, PackRows())
    inputs = rows_of([draw(6, 1)])
    expected = interpret(packed, inputs)["logits"]
    fused = rewritten(packed, FuseProjections())
    (node, *_) = linears(fused, 0)
    assert [fused.type_text(a) for a in node.args[1:]] == ["f32[64, 32]", "f32[64]"]
    assert node.args[2].meta["weight"] == "model.layers.0.self_attn.q_proj+k_proj+v_proj.bias"
    assert fused.tensors[node.args[2].meta["weight"]][:32].std() > 0.5
    torch.testing.assert_close(interpret(fused, inputs)["logits"], expected, atol=1e-6, rtol=1e-5)


def test_a_captured_batch_can_be_fused_too(captured: Graph) -> None:
    fused = rewritten(captured, FuseProjections())
    (split, *_) = [n for n in fused.calls if n.target is aten.split_with_sizes.default]
    assert split.args[1:] == ([64, 32, 32], 2)
    assert fused.type_text(split) == "(f32[b, t, 64], f32[b, t, 32], f32[b, t, 32])"
    assert ops_of(captured).count("linear") == 29
    assert ops_of(fused).count("linear") == 17


# -- near misses -------------------------------------------------------------------------------------------------


def projections(
    *, bias: tuple[bool, ...] = (False, False), computed: str = "", shared: bool = False, layer: int | None = 0
) -> Graph:
    """Two projections of one value, with one obstacle."""
    hand = Hand()
    x = hand.input("x", "N", 8)
    hand.layer = layer
    out = []
    for i, biased in enumerate(bias):
        w = hand.weight(f"layers.0.p{i}.weight", 8, 8)
        b = hand.weight(f"layers.0.p{i}.bias", 8) if biased else None
        if computed == "weight":
            w = hand.call(aten.neg.default, w)
        if computed == "bias" and b is not None:
            b = hand.call(aten.neg.default, b)
        out.append(hand.call(aten.linear.default, x, w, b) if b is not None else hand.call(aten.linear.default, x, w))
        if shared:
            out[-1] = hand.call(aten.mm.default, out[-1], w)
    return hand.returns(**{f"y{i}": y for i, y in enumerate(out)})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"computed": "weight"}, "a projection's weight is computed, not an input"),
        ({"computed": "bias", "bias": (True, True)}, "a projection's bias is computed, not an input"),
        ({"shared": True}, "a projection's weight is read elsewhere too"),
        ({"bias": (True, False)}, "some of the projections have a bias and some have none"),
    ],
)
def test_projections_that_cannot_be_fused_are_near_misses(options: dict[str, Any], reason: str) -> None:
    graph = projections(**options)
    verify(graph)
    before = ops_of(graph)
    report = report_of(graph, FuseProjections())
    assert report.applied == []
    assert [(s.layer, s.reason) for s in report.skipped] == [(0, reason)]
    assert re.match(r"layer 0 \(block\), node linear", report.skipped[0].node)
    assert ops_of(graph) == before


def test_projections_of_different_dtypes_are_a_near_miss() -> None:
    hand = Hand()
    x = hand.input("x", "N", 8)
    hand.layer = 0
    first = hand.call(aten.linear.default, x, hand.weight("layers.0.a.weight", 8, 8))
    second = hand.call(aten.linear.default, x, hand.weight("layers.0.b.weight", 8, 8))
    graph = hand.returns(a=first, b=second)
    graph.tensors["layers.0.b.weight"] = graph.tensors["layers.0.b.weight"].double()
    second.args[1].meta["val"] = graph.symbols.of(graph.tensors["layers.0.b.weight"])  # type: ignore[union-attr]
    report = Report("FuseProjections", "", FuseProjections.effect)
    FuseProjections().run(graph, report)
    assert [s.reason for s in report.skipped] == ["the projections' weights differ in dtype"]


@pytest.mark.parametrize("options", [{"layer": None}, {"bias": (False,)}])
def test_projections_outside_the_layers_or_alone_are_no_near_miss(options: dict[str, Any]) -> None:
    report = report_of(projections(**options), FuseProjections())
    assert (report.applied, report.skipped) == ([], [])


def test_projections_with_biases_of_their_own_are_fused() -> None:
    graph = projections(bias=(True, True, True))
    x = torch.randn(5, 8)
    expected = interpret(graph, {"x": x})
    fused = rewritten(graph, FuseProjections())
    assert ops_of(fused) == ["linear", "split_with_sizes", "getitem", "getitem", "getitem"]
    assert list(fused.tensors) == ["layers.0.p0+p1+p2.weight", "layers.0.p0+p1+p2.bias"]
    got = interpret(fused, {"x": x})
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value)
    assert Signature.of(fused).inputs == Signature.of(graph).inputs


# -- stacking ----------------------------------------------------------------------------------------------------


def test_stack_copies_once_and_then_finds_the_parts_adjacent() -> None:
    parts = [torch.randn(3, 4), torch.randn(2, 4), torch.randn(1, 4)]
    values = torch.cat(parts)
    whole = stack(parts)
    assert torch.equal(whole, values)
    assert [p.data_ptr() - whole.data_ptr() for p in parts] == [0, 3 * 16, 5 * 16]
    assert stack(parts).data_ptr() == whole.data_ptr()
    inner = stack(parts[1:])
    assert inner.data_ptr() == parts[1].data_ptr()
    assert torch.equal(inner, values[3:])


@pytest.mark.parametrize("order", [(1, 0), (0, 2), (0, 0)])
def test_parts_that_are_not_adjacent_in_order_are_copied(order: tuple[int, int]) -> None:
    base = torch.randn(6, 4)
    views = [base[0:2], base[2:4], base[4:6]]
    parts = [views[i][:] for i in order]
    expected = torch.cat(parts)
    whole = stack(parts)
    assert torch.equal(whole, expected)
    assert whole.data_ptr() != base.data_ptr()
    for i, part in enumerate(parts):
        assert torch.equal(part, expected[2 * i : 2 * i + 2])


def test_a_transposed_part_is_copied() -> None:
    part = torch.randn(4, 4).t()
    expected = torch.cat([part, part])
    assert torch.equal(stack([part, part.clone()]), expected)


def test_the_oracles_weights_are_what_is_fused() -> None:
    """The whole way from a transformers object: its own parameters become the views."""
    config = tiny_config(layers=1)
    hf = to_transformers(config, random_weights(config, 5))
    graph = dgraph.capture(hf, mask_id=MASK)
    fused = rewritten(graph, FuseProjections())
    whole = fused.tensors["model.layers.0.self_attn.q_proj+k_proj+v_proj.weight"]
    attention = hf.model.layers[0].self_attn
    assert attention.q_proj.weight.data_ptr() == whole.data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert isinstance(attention.k_proj.weight, torch.nn.Parameter)
