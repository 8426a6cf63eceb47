"""OnlyKV: what is left writes the same caches, and nothing else."""

from __future__ import annotations

import pytest
import torch

import dgraph
from dgraph.errors import VerifyError
from dgraph.ir.graph import Graph
from dgraph.ops import op_of
from dgraph.passes import CacheKV, EvictTokens, OnlyKV, PackRows
from tests.oracle.models import random_weights, tiny_config, to_transformers
from tests.tiny import MASK, caches_of, draw, interpret, report_of, rewritten, rows_of

LAYERS = 4


@pytest.fixture(scope="module")
def only(cached: Graph) -> Graph:
    return rewritten(cached, OnlyKV())


def test_nothing_after_the_last_write_is_left(cached: Graph, only: Graph) -> None:
    assert only.outputs == ()
    last = only.calls[-1]
    assert op_of(last.target).name == "kv_write"  # type: ignore[union-attr]
    assert last.meta["layer"] == LAYERS - 1
    assert [n.meta["layer"] for n in only.find("kv_write")] == list(range(LAYERS))
    assert [n.meta["layer"] for n in only.find("paged_attention")] == list(range(LAYERS - 1))
    assert {n.meta["role"].split(".")[0] for n in only.calls if n.meta["layer"] == LAYERS - 1} == {
        "input_layernorm",
        "self_attn",
    }
    needed = {n for n in only.calls if op_of(n.target) is not None and op_of(n.target).mutates}  # type: ignore[union-attr]
    for node in reversed(only.calls):
        assert node in needed, f"{node.name} is computed for nothing"
        needed.update(node.all_input_nodes)
    gone = set(cached.tensors) - set(only.tensors)
    assert {name.removeprefix(f"model.layers.{LAYERS - 1}.") for name in gone} == {
        "self_attn.q_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


def test_it_fires_once_and_says_how_much_went(cached: Graph, only: Graph) -> None:
    (fired,) = report_of(cached, OnlyKV()).applied
    assert fired.layer is None
    removed = len(cached.calls) - len(only.calls)
    assert fired.what == f"{removed} calls removed after the KV write of layer {LAYERS - 1}"
    assert removed > 10


def test_the_caches_are_bit_for_bit_those_of_the_whole_program(cached: Graph, only: Graph) -> None:
    sequences = [draw(n, n) for n in (8, 16)]
    rows = rows_of(sequences)
    rows["limit"] = ((rows["positions"] // 8 + 1) * 8).int()
    whole, part = ({**rows, **caches_of(cached.spec, [8, 16])} for _ in range(2))
    interpret(cached, whole)
    assert interpret(only, part) == {}
    for name in whole:
        assert torch.equal(part[name], whole[name]), name
    assert not part["k_cache_3"].isnan().any()


def test_without_a_cache_it_is_a_near_miss(packed: Graph) -> None:
    report = report_of(packed, OnlyKV())
    assert report.applied == []
    assert [s.reason for s in report.skipped] == ["no kv_write in the graph; run CacheKV first"]


def test_a_model_of_one_layer() -> None:
    config = tiny_config(layers=1)
    model = to_transformers(config, random_weights(config, 0))
    graph = rewritten(dgraph.capture(model, mask_id=MASK), PackRows(), CacheKV(), OnlyKV())
    assert graph.find("paged_attention") == []
    assert set(graph.inputs) == {"input_ids", "positions", "cu_rows", "page_table", "k_cache_0", "v_cache_0"}


def test_the_inputs_of_an_eviction_may_not_go_unsaid(cached: Graph) -> None:
    """A program that evicts is no prefill: what OnlyKV would take from it, it does not declare."""
    evicted = rewritten(cached, EvictTokens(after=3))
    with pytest.raises(VerifyError, match=r"after OnlyKV: rule 'signature'"):
        rewritten(evicted, OnlyKV())


def test_a_graph_of_nothing_but_writes_stays(cached: Graph, only: Graph) -> None:
    (fired,) = report_of(only, OnlyKV()).applied
    assert fired.what.startswith("0 calls removed")
