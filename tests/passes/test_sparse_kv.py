"""SparseKV: where it fires, what it leaves alone, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dgraph.errors import DgraphWarning, InputError, PassError
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.passes import PASSES, CacheKV, ChunkLMHead, EvictTokens, FuseProjections, PartialAttention, SparseKV
from dgraph.passes.base import Pass, Report, pass_from_json
from dgraph.passes.manager import run_passes
from dgraph.passes.sparse_kv import SELECTORS
from dgraph.text.writer import dump
from dgraph.types.nodes import args_of
from tests.golden_files import check_golden
from tests.passes.sparse_step import FAMILIES, family_of
from tests.tiny import report_of, rewritten

# -- where it fires ----------------------------------------------------------------------------------------------


def counts_of(graph: Graph) -> dict[str, list[int]]:
    """Layers of the calls of each op, in order."""
    names = ("kv_votes", "kv_scores", "feature_read", "kv_pack", "sparse_attention", "paged_attention", "kv_write")
    return {name: [n.meta["layer"] for n in graph.find(name)] for name in names}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("name", "selector"),
    [*((f, s) for f in FAMILIES for s in ("mask_voting", "block")), *(("dream", s) for s in SELECTORS)],
)
def test_it_fires_once_per_attention(name: str, reuse: bool, cached: bool, selector: str) -> None:
    before = family_of(name).cached
    layers = list(range(before.spec.layers))
    sparse = SparseKV(selector, reuse=reuse, cached=cached)
    graph = before.copy()
    (report,) = run_passes(graph, [sparse])
    assert [a.layer for a in report.applied] == layers
    assert report.skipped == []
    chooses, votes = [] if reuse else layers, selector not in ("block", "shared")
    assert counts_of(graph) == {
        "kv_votes": chooses if votes else [],
        "kv_scores": [] if votes else chooses,
        "feature_read": [i for i in chooses for _ in "kv" if cached],
        "kv_pack": chooses,
        "sparse_attention": layers,
        "paged_attention": [],
        "kv_write": layers,
    }
    added = {"window", "action", "pack_start"}
    added |= {f"{kind}_{i}" for kind in ("k_pack", "v_pack", "pack_count") for i in layers}
    added |= {f"pack_index_{i}" for i in chooses}
    if cached and not reuse:
        added |= {"key_positions", "cu_keys"}
    assert set(graph.inputs) - set(before.inputs) == added
    assert set(before.inputs) <= set(graph.inputs)
    assert [args_of(n)[-1] for n in graph.find("sparse_attention")] == [not reuse for _ in layers]
    assert [args_of(n)[-2] for n in graph.find("sparse_attention")] == layers


@pytest.mark.parametrize("dtype", [None, "fp8"])
@pytest.mark.parametrize("reuse", [False, True])
def test_keys_that_stay_in_pages_are_read_there(reuse: bool, dtype: str | None) -> None:
    """Nothing is packed but their positions, which both programs have."""
    before = rewritten(family_of("sdar").packed, CacheKV(dtype))
    graph = rewritten(before, SparseKV("block", reuse=reuse, cached=True, kept="pages"))
    layers = list(range(before.spec.layers))
    added = {
        "window",
        "action",
        "pack_start",
        *(f"{kind}_{i}" for kind in ("pack_count", "pack_index") for i in layers),
    }
    assert set(graph.inputs) - set(before.inputs) == added | (set() if reuse else {"key_positions", "cu_keys"})
    for layer in layers:
        (read,), index = graph.find("sparse_attention", layer), graph.input(f"pack_index_{layer}")
        stored = dict(zip(OPS["sparse_attention"].arguments, args_of(read), strict=True))
        assert stored["pack_index"] is index
        assert [stored[name] for name in ("k_pack", "v_pack", "k_pack_scale", "v_pack_scale")] == [None] * 4
        scales = [graph.input(f"{kind}_scale_{layer}") for kind in "kv"] if dtype else [None, None]
        assert [stored["k_cache_scale"], stored["v_cache_scale"]] == scales
        assert (stored["k_scale"] is None) == (reuse or dtype is None)
        for pack in graph.find("kv_pack", layer):
            given = dict(zip(OPS["kv_pack"].arguments, args_of(pack), strict=False))
            assert given["pack_index"] is index
            assert [given[name] for name in ("k", "v", "k_pack", "v_pack")] == [None] * 4
            assert "k_scale" not in given


def test_settings_go_to_the_ops() -> None:
    sparse = SparseKV("snapkv", 0.0, (3, 5, 7), "adaptive", 0.25, 5, "mean", 2)
    graph = rewritten(family_of("llada").cached, sparse)
    assert [args_of(n)[-2:] for n in graph.find("kv_votes")] == [(-32, 0)] * 3
    for layer, node in enumerate(graph.find("kv_pack")):
        assert args_of(node)[-8:] == (layer, 0.0, (3, 5, 7)[layer], "adaptive", 0.25, 5, "mean", 2)
    front = rewritten(family_of("llada").cached, SparseKV("front_voting"))
    assert [args_of(n)[-5:] for n in front.find("kv_votes")] == [(0, 2**31 - 1, None, 0, 1)] * 3
    halves = rewritten(family_of("llada").cached, SparseKV("all_voting", 0, (3, 8, 1), recent=2, recent_share=0.5))
    assert [args_of(n)[-1] for n in halves.find("kv_pack")] == [3, 6, 2]
    for selector, shared in (("block", False), ("shared", True)):
        graph = rewritten(family_of("llada").cached, SparseKV(selector))
        assert [args_of(n)[-1] for n in graph.find("kv_scores")] == [shared] * 3
    assert [args_of(n)[-7:-5] for n in graph.find("kv_pack")] == [(0.5, 0)] * 3


def test_queries_of_fewer_rows_have_positions_of_their_own() -> None:
    graph = rewritten(family_of("sdar").cached, EvictTokens(after=2), SparseKV("block"))
    for node in graph.find("kv_scores"):
        q, k, positions, cu_rows, cu_keys, *_ = args_of(node)
        later = node.meta["layer"] >= 2
        assert (graph.row_set(positions) == "N") == (graph.row_set(q) == "N") == (not later)
        assert (cu_rows is cu_keys) == (node.meta["layer"] != 2)
        assert (graph.row_set(k) == "N") == (node.meta["layer"] <= 2)


# -- near misses and errors --------------------------------------------------------------------------------------


def reasons(graph: Graph, step: Pass) -> set[str]:
    return {s.reason for s in report_of(graph, step).skipped}


def test_without_a_cache_there_is_nothing_to_keep() -> None:
    packed = family_of("sdar").packed
    why = "this attention reads no cache, so there is nothing to keep of it; run CacheKV first"
    assert reasons(packed, SparseKV()) == {why}
    with pytest.raises(PassError, match="applied nowhere"):
        rewritten(packed, SparseKV())


def test_other_attentions_are_left_alone() -> None:
    cached = family_of("sdar").cached
    partial = report_of(rewritten(cached, PartialAttention()), SparseKV())
    why = "this attention is updated by what changes of all keys, so none can be dropped"
    assert {(s.layer, s.reason) for s in partial.skipped} == {(i, why) for i in range(4)}
    assert partial.applied == []
    again = report_of(rewritten(cached, SparseKV()), SparseKV(reuse=True))
    assert {(s.layer, s.reason) for s in again.skipped} == {
        (i, "this attention reads packed keys already") for i in range(4)
    }


@pytest.mark.parametrize("writes", [0, 2])
def test_a_layer_writes_its_keys_once(writes: int) -> None:
    graph = family_of("sdar").cached.copy()
    (write,) = graph.find("kv_write", 1)
    if writes:
        graph.call(OPS["kv_write"], args_of(write), before=write, by="test")
    else:
        write.graph.erase_node(write)
    report = Report("SparseKV", "", SparseKV.effect)
    SparseKV().run(graph, report)
    why = f"{writes} writes of keys and values in the layer of this attention; expected 1"
    assert [(s.layer, s.reason) for s in report.skipped] == [(1, why)]
    assert [a.layer for a in report.applied] == [0, 2, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"selector": "best"},
            r"selector must be one of 'mask_voting', 'front_voting', .*, 'snapkv', 'block', 'shared', got 'best'",
        ),
        ({"heads": "all"}, r"heads must be one of 'uniform', 'mass', 'adaptive', got 'all'"),
        ({"kept": "page"}, r"kept must be one of 'packed', 'pages', got 'page'"),
        ({"pooling": "min"}, r"pooling must be one of 'max', 'mean', got 'min'"),
        ({"ratio": 1.5}, r"ratio must be a number in \(0, 1\], or 0 if pairs says how many, got 1\.5"),
        ({"ratio": True}, r"ratio must be a number in \(0, 1\]"),
        ({"ratio": 0.5, "pairs": (3,)}, r"give either ratio .* got 0\.5 and \(3,\)"),
        ({"ratio": 0.0}, r"give either ratio .* got 0\.0 and \(\)"),
        ({"ratio": 0.0, "pairs": (3, -1)}, r"pairs must be a tuple of integers of at least 0, .* got \(3, -1\)"),
        ({"ratio": 0.0, "pairs": 3}, r"pairs must be a tuple of integers of at least 0, .* got 3"),
        ({"floor": 1.1}, r"floor must be a number from 0 to 1, got 1\.1"),
        ({"recent_share": 2}, r"recent_share must be a number from 0 to 1, got 2"),
        ({"floor": False}, r"floor must be a number from 0 to 1, got False"),
        ({"pool": 4}, r"pool must be odd and at least 1, got 4"),
        ({"pool": 0}, r"pool must be odd and at least 1, got 0"),
        ({"recent": -1}, r"recent must be an integer of at least 0, got -1"),
        ({"reuse": 1}, r"reuse must be True or False, got 1"),
        ({"cached": None}, r"cached must be True or False, got None"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SparseKV(**settings)


def test_pairs_by_layer_are_as_many_as_layers() -> None:
    with pytest.raises(InputError, match="pairs has 2 numbers, but the model 4 layers; give one, or one for each"):
        rewritten(family_of("sdar").cached, SparseKV(ratio=0, pairs=(3, 4)))
    with pytest.raises(InputError, match=r"recent_share=0\.5 is a share of pairs; give pairs instead of ratio"):
        rewritten(family_of("sdar").cached, SparseKV("all_voting", recent_share=0.5))


def test_a_selector_by_its_former_name() -> None:
    with pytest.warns(DgraphWarning, match=r"SparseKV\(selector='h2o'\) is 'all_voting' since version 0.2"):
        assert SparseKV("h2o") == SparseKV("all_voting")


@pytest.mark.parametrize(
    "sparse", [SparseKV(), SparseKV("block", 0, (3, 4), "mass", 0.1, 5, "mean", 2, True, True, "pages")]
)
def test_it_reads_back_from_json(sparse: SparseKV) -> None:
    read = pass_from_json(json.loads(json.dumps(sparse.to_json())), PASSES)
    assert read == sparse
    assert hash(read) == hash(sparse)


@pytest.mark.parametrize(("phase", "reuse"), [("select", False), ("step", True)])
def test_dumps(phase: str, reuse: bool) -> None:
    """Of a block-causal model, whose keys are read from the cache, and a bidirectional one."""
    for name, model, sparse in (
        ("qwen3", "sdar", SparseKV("block", 0.5, pool=3, cached=True, reuse=reuse, kept="pages")),
        ("llada", "llada", SparseKV("mask_voting", 0.0, (8,), "mass", 0.1, reuse=reuse)),
    ):
        graph = rewritten(family_of(model).cached, FuseProjections(), sparse, ChunkLMHead())
        check_golden(f"{name}_sparse_{phase}.txt", dump(graph))
