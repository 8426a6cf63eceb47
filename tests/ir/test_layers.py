"""The view of a layer: its parts before and after rewrites, and a reason where one is not there."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx import Node

import dgraph
from dgraph.ir.graph import Graph
from dgraph.ir.layers import FeedForward, GatedUnit, Layer, Mixing, Projections, layers_of
from dgraph.ir.linears import (
    Linear,
    Projection,
    embedding_of,
    head_of,
    linear_of,
    linears_of,
    projection_of,
)
from dgraph.ops import OPS
from dgraph.passes import CacheKV, CountRows, EvictTokens, FuseGLU, FuseProjections, GateFFN
from dgraph.testing import TinyModel, models
from tests.tiny import Hand, rewritten


@pytest.mark.parametrize("stage", ["packed", "cached", "evicted"])
def test_the_parts_of_a_layer(request: pytest.FixtureRequest, stage: str) -> None:
    graph: Graph = request.getfixturevalue(stage)
    layers = layers_of(graph)
    assert [layer.index for layer in layers] == [0, 1, 2, 3]
    for layer in layers:
        roles = [linear.node.meta["role"].rpartition(".")[2] for linear in layer.linears]
        assert sorted(roles) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        assert len(layer.norms) == 4
        assert (layer.experts, layer.router) == ([], None)
        ffn = layer.feed_forward
        assert isinstance(ffn, FeedForward)
        mixing = layer.mixing(ffn.stream)
        assert isinstance(mixing, Mixing)
        assert [linear.node for linear in linears_of(mixing.nodes)] == [mixing.result]
        assert len(linears_of(ffn.nodes)) == 3
        write = layer.write
        expected = "0 writes of keys and values in the layer of this attention; expected one"
        assert write == expected if stage == "packed" else write is graph.find("kv_write", layer.index)[0]


def test_it_survives_what_passes_do(packed: Graph) -> None:
    graph = rewritten(packed, FuseProjections(), CacheKV(), EvictTokens(), CountRows(), FuseGLU())
    kinds = [[linear.kind for linear in layer.linears] for layer in layers_of(graph)]
    assert kinds[0] == ["plain"] * 4
    assert kinds[2] == ["counted", "counted", "gated", "counted"]
    assert isinstance(layers_of(graph)[0].feed_forward, FeedForward)
    counted = layers_of(graph)[2].feed_forward
    assert isinstance(counted, str)
    assert counted.endswith("beside the residual stream"), "the count of its rows"
    gated = rewritten(packed, CacheKV(), GateFFN(0.9))
    assert layers_of(gated)[0].feed_forward == "the layer is gated already"


def test_a_linear_layer_of_each_kind() -> None:
    hand = Hand()
    x, weight, bias = hand.input("x", "N", 8), hand.weight("w", 6, 8), hand.weight("b", 6)
    cu_rows = hand.input("cu_rows", "b+1", dtype=torch.int32)
    plain = hand.call(torch.ops.aten.linear.default, x, weight, bias)
    bare = hand.call(torch.ops.aten.linear.default, x, weight)
    counted = hand.call(OPS["rows_linear"], x, weight, None, cu_rows)
    gated = hand.call(OPS["rows_glu"], x, weight, bias, cu_rows)
    found = linears_of(hand.graph.calls)
    assert [f.node for f in found] == [plain, bare, counted, gated]
    assert [(f.kind, f.bias, f.count) for f in found] == [
        ("plain", bias, None),
        ("plain", None, None),
        ("counted", None, cu_rows),
        ("gated", bias, cu_rows),
    ]
    assert all(f.shape == (6, 8) and f.by_vectors and f.stored is not None and not f.routes for f in found)
    assert linear_of(x) is None
    assert linear_of(None) is None
    assert Layer(hand.graph, plain).feed_forward == "an attention outside the layers has no feed-forward network"


def roles(layer: Layer) -> list[str]:
    """The weights of a layer by role: q, k, v, o; gate, up, down where it has them; each with its part."""

    def named(linear: Linear, *part: int) -> str:
        name = linear.weight.meta["weight"].removesuffix(".weight").rpartition(".")[2]
        return f"{name}{list(part)}" if part else name

    def of(projection: Projection | None) -> str:
        assert projection is not None
        part = projection.begin, projection.end
        return named(projection.linear, *(() if part == (0, projection.linear.shape[0]) else part))

    found, unit = layer.projections, layer.gated_unit
    assert isinstance(found, Projections), found
    assert not isinstance(unit, str), unit
    names = [of(found.q), of(found.k), of(found.v), named(found.o)]
    return names + ([of(unit.gate), of(unit.up), named(unit.down)] if unit is not None else [])


GATED = ["gate_proj", "up_proj", "down_proj"]
ROUTED = ("llada_moe", "sdar_moe")
"""Families with a mixture in every layer, and no expert for all rows."""


@pytest.mark.parametrize("tiny", models(), ids=str)
def test_the_projections_of_every_family_by_role(tiny: TinyModel) -> None:
    graph, spec = tiny.graph, tiny.model.spec
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if tiny.family == "llada2":  # one projection, and a first layer without experts
        q, k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        ends = [0, q, q + k, q + 2 * k]
        attention = [f"query_key_value{[begin, end]}" for begin, end in itertools.pairwise(ends)] + ["dense"]
    layers = layers_of(graph)
    assert len(layers) == spec.layers
    for layer in layers:
        assert roles(layer) == attention + ([] if tiny.family in ROUTED else GATED)
        assert bool(layer.experts) == (layer.router is not None)
        assert bool(layer.experts) == (tiny.family in ROUTED or (tiny.family == "llada2" and layer.index != 0))
        unit = layer.gated_unit
        if isinstance(unit, GatedUnit):
            assert ("shared_experts" in unit.down.weight.meta["weight"]) == bool(layer.experts)
    head, embedding = head_of(graph), embedding_of(graph)
    assert isinstance(head, Linear)
    assert isinstance(embedding, Node)
    assert head.shape == embedding.args[0].meta["val"].shape == (spec.vocab, spec.hidden)  # type: ignore[union-attr]
    assert (head.kind, embedding.meta["layer"]) == ("plain", None)


@pytest.mark.parametrize("recipe", ["focus", "dyllm", "dllm_cache"])
@pytest.mark.parametrize("tiny", models(None, "dream", "llada2"), ids=str)
def test_they_are_found_after_every_recipe(tiny: TinyModel, recipe: str) -> None:
    """Fused, gathered, counted and packed: by the same weights, some as parts of one."""
    if recipe == "dllm_cache" and tiny.family == "llada2":
        recipe = "dllm_serve"
    graph = dgraph.rewrite(tiny.graph, tiny.recipe(recipe))["step"].graph
    wanted = {layer.index: roles(layer) for layer in layers_of(tiny.graph)}
    for layer in layers_of(graph):
        found = roles(layer)
        assert len(found) == len(wanted[layer.index])
        for name, plain in zip(found, wanted[layer.index], strict=True):
            assert plain.partition("[")[0] in name.partition("[")[0].split("+"), f"layer {layer.index}: {found}"
    head = head_of(graph)
    assert isinstance(head, Linear)
    assert (head.kind, head.weight.meta["weight"]) == ("head", "lm_head.weight")


def test_a_role_that_is_not_there_is_named() -> None:
    hand = Hand()
    x, down = hand.input("x", "N", 8), hand.weight("down", 8, 6)
    up = hand.call(torch.ops.aten.linear.default, x, hand.weight("up", 6, 8))
    for act in (torch.ops.aten.relu.default, torch.ops.aten.silu.default):  # no gate: up alone
        node = hand.call(torch.ops.aten.linear.default, hand.call(act, up), down)
        linear = linear_of(node)
        assert linear is not None
        assert projection_of(linear.x) == Projection(linear_of(up), 0, 6)  # type: ignore[arg-type]
    assert projection_of(x) == "x is computed from x, not by a linear layer"
    layer = Layer(hand.graph, up)
    assert layer.keys_values == "0 writes of keys and values in the layer of this attention; expected one"
    assert layer.projections == layer.gated_unit == layer.keys_values
