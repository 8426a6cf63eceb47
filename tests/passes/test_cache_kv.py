"""CacheKV: attention over the paged cache is attention over the rows, and a step needs only the rows that changed."""

from __future__ import annotations

import pytest
import torch

from dgraph.errors import PassError
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.passes import CacheKV
from dgraph.types.nodes import op_name
from tests.passes.scene import oracle_step, scene
from tests.tiny import Hand, caches_of, draw, interpret, ops_of, read_cache, report_of, rows_of

LAYERS = 4


def test_it_fires_once_per_layer(packed: Graph, cached: Graph) -> None:
    report = report_of(packed, CacheKV())
    assert [(a.layer, a.what) for a in report.applied] == [
        (layer, "packed_attention -> kv_write, paged_attention") for layer in range(LAYERS)
    ]
    assert report.skipped == []
    assert cached.find("packed_attention") == []
    for layer in range(LAYERS):
        (write,), (read,) = cached.find("kv_write", layer), cached.find("paged_attention", layer)
        order = cached.nodes
        assert order.index(write) < order.index(read)
        k, v = write.args[:2]
        assert op_name(k.target) == "dgraph.rope", "keys are cached after the rotary embedding"  # type: ignore[union-attr]
        assert op_name(v.target) != "dgraph.rope"  # type: ignore[union-attr]
        assert [a.meta["input"] for a in write.args[2:]] == [  # type: ignore[union-attr]
            f"k_cache_{layer}",
            f"v_cache_{layer}",
            "positions",
            "page_table",
            "cu_rows",
        ]
        assert [a.meta["input"] for a in read.args[1:6]] == [  # type: ignore[union-attr]
            f"k_cache_{layer}",
            f"v_cache_{layer}",
            "page_table",
            "cu_rows",
            "limit",
        ]
        assert read.args[6] == packed.find("packed_attention", layer)[0].args[6]
        assert {write.meta["by"], read.meta["by"]} == {"CacheKV"}
    assert len(ops_of(cached)) == len(ops_of(packed)) + LAYERS


def test_the_new_inputs_are_declared(packed: Graph, cached: Graph) -> None:
    new = [s for name, s in cached.inputs.items() if name not in packed.inputs]
    assert [s.name for s in new] == ["page_table", *(f"{n}_cache_{i}" for i in range(LAYERS) for n in "kv")]
    assert (new[0].dtype, new[0].shape) == (torch.int32, ("b", "P"))
    assert {(s.dtype, s.shape) for s in new[1:]} == {(torch.float32, ("pages", "page", 2, 16))}
    assert cached.outputs == ("logits",)
    assert cached.tensors == packed.tensors


def test_all_rows_at_once_equal_attention_over_rows(packed: Graph, cached: Graph) -> None:
    sequences = [draw(n, n) for n in (9, 3, 14)]
    rows = rows_of(sequences)
    inputs = {**rows, **caches_of(cached.spec, [9, 3, 14])}
    expected = interpret(packed, rows)["logits"]
    got = interpret(cached, inputs)["logits"]
    assert (got - expected).abs().max() < 2e-6 * expected.abs().max()


def test_a_step_after_the_cache_equals_the_whole_sequence(packed: Graph, cached: Graph) -> None:
    """Block-causal rows in one call, and block by block through the cache."""
    sequences, block = [draw(16, 1), draw(12, 2)], 4
    rows = rows_of(sequences)
    rows["limit"] = ((rows["positions"] // block + 1) * block).int()
    expected = interpret(packed, rows)["logits"].split([16, 12])
    caches = caches_of(cached.spec, [16, 12])
    for start in range(0, 16, block):
        present = [s[start : start + block] for s in sequences]
        step = rows_of(present, [start, start])
        got = interpret(cached, {**step, **caches})["logits"].split([len(p) for p in present])
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs[start : start + block], atol=5e-5, rtol=1e-5)


def test_caches_and_logits_equal_the_oracles(cached: Graph) -> None:
    step = scene(cached)
    logits = interpret(cached, step.inputs)["logits"].split(step.counts)
    for s, mine in enumerate(logits):
        theirs, _, cache = oracle_step(s, None)
        torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=1e-5)
        for layer in range(LAYERS):
            k, v = cache.read(layer, step.lengths[s])
            for name, expected in (("k", k), ("v", v)):
                got = read_cache(step.inputs, f"{name}_cache_{layer}", s, step.lengths[s])
                torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_nobody_elses_pages_are_written(cached: Graph) -> None:
    inputs = {**rows_of([draw(5), []]), **caches_of(cached.spec, [8, 8])}
    interpret(cached, inputs)
    for name in ("k_cache_0", "v_cache_3"):
        written = ~inputs[name].isnan().flatten(2).all(-1)
        assert written.sum() == 5
        first, second = inputs["page_table"][0]
        assert written[first].all()
        assert written[second].tolist() == [True, False, False, False]


def test_a_padded_batch_is_a_near_miss(captured: Graph) -> None:
    report = report_of(captured, CacheKV())
    assert report.applied == []
    assert [(s.layer, s.reason) for s in report.skipped] == [
        (layer, "attention over a padded batch; run PackRows first") for layer in range(LAYERS)
    ]


def attention_in(*layers: int | None) -> Graph:
    hand = Hand(layers=2)
    q, k = hand.input("q", "N", 4, 4), hand.input("k", "N", 2, 4)
    positions = hand.input("positions", "N", dtype=torch.int64)
    cu_rows, limit = hand.input("cu_rows", "b+1", dtype=torch.int32), hand.input("limit", "N", dtype=torch.int32)
    for layer in layers:
        hand.layer = layer
        q = hand.call(OPS["packed_attention"], q, k, k, positions, cu_rows, limit, 0.5)
    return hand.returns(y=q)


def test_an_attention_outside_the_layers_is_a_near_miss() -> None:
    report = report_of(attention_in(None, 1), CacheKV())
    assert [a.layer for a in report.applied] == [1]
    assert [(s.layer, s.reason) for s in report.skipped] == [(None, "an attention outside the layers has no cache")]


def test_two_attentions_of_a_layer_cannot_share_a_cache() -> None:
    with pytest.raises(PassError, match=r"CacheKV: layer 1 \(block\), node packed_attention.*second attention"):
        report_of(attention_in(0, 1, 1), CacheKV())
