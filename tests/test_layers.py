"""The view of a layer: its parts before and after rewrites, and a reason where one is not there."""

from __future__ import annotations

import pytest
import torch

from dgraph.graph import Graph
from dgraph.layers import FeedForward, Layer, Mixing, layers_of, linear_of, linears_of
from dgraph.ops import OPS
from dgraph.passes import CacheKV, CountRows, EvictTokens, FuseGLU, FuseProjections, GateFFN
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
    assert all(f.shape == (6, 8) and f.by_vectors and f.is_stored and not f.routes for f in found)
    assert linear_of(x) is None
    assert linear_of(None) is None
    assert Layer(hand.graph, plain).feed_forward == "an attention outside the layers has no feed-forward network"
