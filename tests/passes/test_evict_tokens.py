"""EvictTokens: rows, scores, limits and logits equal the oracle of FOCUS; with alpha = inf nothing changes."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from torch.fx import Node

from dgraph.errors import InputError, PassError
from dgraph.ir.graph import Graph
from dgraph.passes import CacheKV, ChunkLMHead, EvictTokens, FuseProjections, PackRows, ShardTensorParallel
from dgraph.testing.ranks import ranks
from dgraph.types.nodes import op_name
from tests.oracle.scoring import Eviction
from tests.passes.scene import BLOCKS, WEIGHTS, Scene, oracle_step, scene
from tests.tiny import BLOCK, MASK, interpret, ops_of, read_cache, report_of, rewritten

LAYERS = 4
aten = torch.ops.aten


@pytest.fixture(scope="module")
def step(cached: Graph) -> Scene:
    return scene(cached)


# -- where it fires ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "signal"), [(0, "importance"), (1, "delta"), (2, "delta"), (3, "importance")])
def test_it_fires_once_at_its_layer(cached: Graph, after: int, signal: str) -> None:
    step = EvictTokens(after=after, signal=signal)
    report = report_of(cached, step)
    assert [a.layer for a in report.applied] == [after]
    assert report.skipped == []
    graph = rewritten(cached, step)
    at = [after - 1, after] if signal == "delta" else [after]
    assert [n.meta["layer"] for n in graph.find("importance")] == at
    for name in ("select_tokens", "keep_index", "compact"):
        assert [n.meta["layer"] for n in graph.find(name)] == [after], name
    order = graph.calls
    (cut,) = graph.find("keep_index")
    where = order.index(cut)
    assert where > order.index(graph.find("kv_write", after)[0]), "the layer's keys are written for all rows"
    assert where < order.index(graph.find("paged_attention", after)[0])
    for layer in range(LAYERS):
        rows = "N" if layer < after else "K"
        assert graph.row_set(graph.find("paged_attention", layer)[0]) == rows
        (write,) = graph.find("kv_write", layer)
        assert graph.row_set(write.args[0]) == ("N" if layer <= after else "K")  # type: ignore[arg-type]
    made = {n.meta["by"] for n in graph.calls if op_name(n.target) in ("dgraph.importance", "dgraph.compact")}
    assert made == {"EvictTokens"}


def test_it_adds_what_the_decode_loop_must_give_and_gets(cached: Graph, evicted: Graph) -> None:
    new = {name: (s.dtype, s.shape) for name, s in evicted.inputs.items() if name not in cached.inputs}
    assert new == {
        "candidate": (torch.bool, ("N",)),
        "average": (torch.float32, ("b",)),
        "reached": (torch.int32, ("b",)),
    }
    assert evicted.outputs == ("logits", "kept", "reached", "score")
    types = [evicted.type_text(evicted.result(name)) for name in evicted.outputs]
    assert types == ["f32[K, 97]", "i64[K]", "i32[b]", "f32[N]"]
    assert evicted.tensors == cached.tensors


def live_across(graph: Graph, anchor: Node) -> set[str]:
    """Values over rows that `anchor` or a later call reads and that stand before it, by walking all calls."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    found = set()
    for node in graph.nodes:
        if order[node] >= order[anchor]:
            found |= {a.name for a in node.all_input_nodes if order[a] < order[anchor] and graph.row_set(a) == "N"}
    return found


@pytest.mark.parametrize("after", [1, 2, 3])
def test_exactly_the_live_values_cross_the_cut(cached: Graph, after: int) -> None:
    expected = live_across(cached, cached.find("paged_attention", after)[0])
    graph = rewritten(cached, EvictTokens(after=after))
    (compact,) = graph.find("compact")
    carried = [n.name for n in compact.args[0]]  # type: ignore[union-attr]
    assert len(carried) == len(set(carried))
    new_limit = graph.find("select_tokens")[0].next.next
    assert set(carried) == (expected - {"limit"}) | {new_limit.name}
    parts = [u for u in compact.users if u.target is operator.getitem]
    assert sorted(p.args[1] for p in parts) == list(range(len(carried)))
    assert all(p.users for p in parts), "nothing is carried in vain"
    (fired,) = report_of(cached, EvictTokens(after=after)).applied
    assert fired.what == f"top of delta; {len(carried)} values carried across the cut"


def test_after_the_cut_nothing_reads_what_lies_before_it(evicted: Graph) -> None:
    order = evicted.nodes
    cut = order.index(evicted.find("compact")[0])
    for node in order[cut + 1 : -1]:
        assert all(evicted.row_set(a) != "N" for a in node.all_input_nodes), node.name
        assert evicted.input("cu_rows") not in node.all_input_nodes
        assert evicted.input("limit") not in node.all_input_nodes


# -- against the oracle ------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {},
    {"alpha": 2.5},
    {"after": 2},
    {"after": 3, "alpha": 1.0},
    {"after": 0, "signal": "importance"},
    {"signal": "importance"},
    {"select": "bottom"},
    {"keep": 3},
    {"keep": 2, "select": "bottom", "signal": "importance"},
    {"pool": 1},
    {"pool": 5},
]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("average", [1.0, 2.3])
def test_one_step_equals_the_oracle(cached: Graph, step: Scene, options: dict[str, Any], average: float) -> None:
    graph = rewritten(cached, EvictTokens(**options))
    mine = step.copy()
    mine.inputs["average"].fill_(average)
    out = interpret(graph, mine.inputs)
    check_against_oracle(mine, out, Eviction(**options), average)


def check_against_oracle(mine: Scene, out: dict[str, torch.Tensor], eviction: Eviction, average: float) -> None:
    rows = 0
    done = 0
    for s, (start, _, seen) in enumerate(BLOCKS):
        logits, hook, cache = oracle_step(s, eviction, average)
        assert hook is not None
        kept = [i - rows for i in out["kept"].tolist() if rows <= i < rows + BLOCK]
        assert kept == hook.kept
        score = out["score"][rows : rows + BLOCK]
        torch.testing.assert_close(score, torch.tensor(hook.score), atol=2e-5, rtol=1e-4)
        assert out["reached"][s] == max(start + kept[-1], start + seen - 1)
        torch.testing.assert_close(out["logits"][done : done + len(kept)], logits, atol=1e-4, rtol=1e-4)
        for layer in range(LAYERS):
            written = [p for p in range(start + BLOCK) if cache.written[layer][p]]
            got = read_cache(mine.inputs, f"k_cache_{layer}", s, start + BLOCK)
            torch.testing.assert_close(got[written], cache.k[layer][written], atol=2e-5, rtol=1e-4)
            assert got.isnan().flatten(1).all(1).nonzero().flatten().tolist() == [
                p for p in range(start + BLOCK) if p not in written
            ]
        rows += BLOCK
        done += len(kept)
    assert done == len(out["kept"]) == len(out["logits"])


def test_something_is_evicted_in_these_steps(cached: Graph, evicted: Graph, step: Scene) -> None:
    kept = interpret(evicted, step.copy().inputs)["kept"]
    assert sum(step.counts) == 32
    assert len(kept) < 26


def test_random_selection_takes_the_noise_and_measures_nothing(cached: Graph, step: Scene) -> None:
    graph = rewritten(cached, EvictTokens(select="random", keep=2))
    assert graph.find("importance") == []
    assert graph.inputs["noise"].shape == ("N",)
    mine = step.copy()
    noise = torch.rand(32, generator=torch.Generator().manual_seed(9))
    out = interpret(graph, {**mine.inputs, "noise": noise})
    assert torch.equal(out["score"], noise)
    rows = 0
    for s in range(len(BLOCKS)):
        part = noise[rows : rows + BLOCK]
        _, hook, _ = oracle_step(s, Eviction(select="random", keep=2, noise=lambda n, p, part=part: part))
        assert hook is not None
        assert [i - rows for i in out["kept"].tolist() if rows <= i < rows + BLOCK] == hook.kept
        rows += BLOCK
    with pytest.raises(KeyError, match="noise"):
        interpret(graph, mine.inputs)


def test_the_identity_of_the_importance(cached: Graph, step: Scene) -> None:
    """The importance of a sequence sums to heads x masks, so that a difference of two sums to nothing."""
    out = interpret(rewritten(cached, EvictTokens(signal="importance")), step.copy().inputs)["score"]
    delta = interpret(rewritten(cached, EvictTokens()), step.copy().inputs)["score"]
    for s, (_, block, _) in enumerate(BLOCKS):
        part = slice(s * BLOCK, (s + 1) * BLOCK)
        assert out[part].sum() == pytest.approx(4 * sum(block), rel=1e-5)
        assert delta[part].sum() == pytest.approx(0, abs=1e-4)
        assert (out[part][~torch.tensor(block)] == 0).all()


# -- the lossless limit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_with_alpha_infinite_the_program_is_the_dense_one(
    cached: Graph, packed: Graph, step: Scene, after: int, fused: bool
) -> None:
    dense = rewritten(packed, FuseProjections(), CacheKV()) if fused else cached
    graph = rewritten(dense, EvictTokens(alpha=math.inf, after=after))
    mine, theirs = step.copy(), step.copy()
    got, expected = interpret(graph, mine.inputs), interpret(dense, theirs.inputs)
    assert got["kept"].tolist() == list(range(32))
    assert torch.equal(got["logits"], expected["logits"]), "bit for bit"
    for name, value in theirs.inputs.items():
        assert torch.equal(mine.inputs[name].nan_to_num(), value.nan_to_num()), name
    assert got["reached"].tolist() == [n - 1 for n in step.lengths]


def test_keeping_as_many_as_there_are_is_lossless_too(cached: Graph, step: Scene) -> None:
    out = interpret(rewritten(cached, EvictTokens(keep=BLOCK)), step.copy().inputs)
    assert torch.equal(out["logits"], interpret(cached, step.copy().inputs)["logits"])


@pytest.mark.parametrize("options", [{}, {"keep": 2}, {"select": "bottom"}], ids=str)
def test_the_full_steps_of_a_block_evict_nothing(cached: Graph, step: Scene, options: dict[str, Any]) -> None:
    """Two of four sequences are in their second step: of the others every row is kept, and all is the dense program."""
    graph = rewritten(cached, EvictTokens(full_steps=2, **options))
    dense, mine = interpret(cached, step.copy().inputs), step.copy()
    mine.inputs["block_step"] = torch.tensor([1, 2, 0, 3], dtype=torch.int32)
    out = interpret(graph, mine.inputs)
    kept = out["kept"].tolist()
    counts = [sum(8 * s <= i < 8 * s + 8 for i in kept) for s in range(4)]
    assert (counts[0], counts[2]) == (8, 8)
    assert max(counts[1], counts[3]) < 8
    for at, row in enumerate(kept):
        if row // 8 in (0, 2):
            assert torch.equal(out["logits"][at], dense["logits"][row]), row
    assert out["reached"][[0, 2]].tolist() == [step.lengths[0] - 1, step.lengths[2] - 1]


def test_after_full_steps_the_kept_rows_see_what_was_forwarded(cached: Graph, evicted: Graph) -> None:
    """The published form hides what lies after the last kept row instead."""
    full = rewritten(cached, EvictTokens(full_steps=1))
    limits = {id(g): g.find("paged_attention", 2)[0].args[5] for g in (evicted, full)}
    for graph, source in ((evicted, "select_tokens"), (full, "limit")):
        part = limits[id(graph)]
        carried = graph.find("compact")[0].args[0][part.args[1]]  # type: ignore[union-attr,index]
        assert carried.name == source if source == "limit" else op_name(carried.args[0].target).endswith(source)
    assert [n.name for n in full.nodes if n.name == "block_step"] == ["block_step"]
    assert "block_step" not in evicted.inputs


# -- with other passes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.2, math.inf])
def test_the_lm_head_may_be_chunked_before_or_after(cached: Graph, step: Scene, alpha: float) -> None:
    evict, chunk = EvictTokens(alpha=alpha), ChunkLMHead(5)
    after, before = rewritten(cached, evict, chunk), rewritten(cached, chunk, evict)
    decision = {"token", "confidence", "margin", "entropy"}
    assert set(after.outputs) == set(before.outputs) == decision | {"kept", "reached", "score"}
    assert set(after.inputs) == set(before.inputs)
    mine, theirs = interpret(after, step.copy().inputs), interpret(before, step.copy().inputs)
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    carried = [[a.name for a in g.find("compact")[0].args[0]] for g in (after, before)]  # type: ignore[union-attr]
    assert len(carried[0]) == len(set(carried[0])) == len(carried[1])
    masked = step.inputs["candidate"][mine["kept"]]
    assert ((mine["token"] >= 0) == masked).all()
    assert (mine["token"] != MASK).all()


def test_every_value_has_the_row_set_of_its_place(evicted: Graph) -> None:
    (cut,) = evicted.find("keep_index")
    after = evicted.calls.index(cut)
    for i, node in enumerate(evicted.calls):
        if (rows := evicted.row_set(node)) is not None:
            assert rows == ("N" if i < after else "K"), node.name


# -- near misses and errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["captured", "packed"])
def test_without_a_cache_it_is_a_near_miss(request: pytest.FixtureRequest, stage: str) -> None:
    report = report_of(request.getfixturevalue(stage), EvictTokens(after=2))
    assert report.applied == []
    assert [(s.layer, s.reason) for s in report.skipped] == [
        (2, "this attention reads no cache, so evicted rows would be lost to it; run CacheKV first")
    ]


def test_a_layer_evicts_once(cached: Graph) -> None:
    once = rewritten(cached, EvictTokens(after=2))
    report = report_of(once, EvictTokens(after=2))
    assert report.applied == []
    assert [(s.layer, s.reason) for s in report.skipped] == [
        (2, "rows are evicted between the layer's keys and its attention already")
    ]
    with pytest.raises(PassError, match="applied nowhere"):
        rewritten(once, EvictTokens(after=2))


@pytest.mark.parametrize("stage", ["packed", "cached"])
def test_a_layer_that_does_not_exist(request: pytest.FixtureRequest, stage: str) -> None:
    with pytest.raises(InputError, match=r"EvictTokens: after=4 is not a layer of this model, which has 0\.\.3"):
        rewritten(request.getfixturevalue(stage), EvictTokens(after=4))


def test_a_delta_needs_the_cache_of_the_layer_before(packed: Graph) -> None:
    """Layer 1 reads a cache, layer 0 does not."""
    graph = packed.copy()
    (other,) = graph.find("packed_attention", 0)
    graph.replace(other, graph.call(aten.clone.default, (other.args[0],), before=other, by="Test"))
    graph.propagate()
    graph.sweep()
    cached = rewritten(graph, CacheKV())
    with pytest.raises(PassError, match=r"EvictTokens: layer 0 has no paged attention to take the importance from"):
        rewritten(cached, EvictTokens(after=1))
    assert ops_of(rewritten(cached, EvictTokens(after=1, signal="importance"))).count("dgraph.importance") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.999}, r"alpha must be at least 1 \(the paper uses 1\.2 to 1\.8; inf evicts nothing\), got 0\.999"),
        ({"alpha": -math.inf}, r"alpha must be at least 1 .*got -inf"),
        ({"alpha": math.nan}, r"alpha must be at least 1 .*got nan"),
        ({"alpha": "2"}, r"alpha must be at least 1 .*got 2"),
        ({"alpha": True}, r"alpha must be at least 1 .*got True"),
        ({"signal": "detla"}, r"signal must be one of 'delta', 'importance', got 'detla'"),
        ({"select": "best"}, r"select must be one of 'top', 'random', 'bottom', 'scripted', got 'best'"),
        ({"after": 0}, r"after must be a layer of at least 1 for signal='delta', got 0"),
        ({"after": -1, "signal": "importance"}, r"after must be a layer of at least 0 for signal='importance', got -1"),
        ({"after": 1.0}, r"after must be an integer, got 1\.0"),
        ({"after": True}, r"after must be an integer, got True"),
        ({"keep": -1}, r"keep must be 0 \(dynamic budget\) or a number of rows, got -1"),
        ({"keep": "4"}, r"keep must be an integer, got '4'"),
        ({"keep": 4, "select": "scripted"}, r"keep must be 0 with select='scripted': the script says how many, got 4"),
        ({"full_steps": -1}, r"full_steps must be at least 0 \(a block's first step evicts\), got -1"),
        ({"full_steps": True}, r"full_steps must be an integer, got True"),
        ({"pool": 2}, r"pool must be odd and at least 1, got 2"),
        ({"pool": -1}, r"pool must be odd and at least 1, got -1"),
        ({"pool": 3.0}, r"pool must be an integer, got 3\.0"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EvictTokens(**options)


def test_options_at_the_edge() -> None:
    for options in ({"alpha": 1}, {"alpha": math.inf}, {"pool": 1}, {"after": 0, "signal": "importance"}, {"keep": 1}):
        EvictTokens(**options)  # type: ignore[arg-type]


def test_the_scene_is_what_it_says(cached: Graph, step: Scene) -> None:
    assert step.inputs["candidate"].tolist() == [m for _, block, _ in BLOCKS for m in block]
    assert step.inputs["reached"].tolist() == [15, 12, -1, 29]
    assert WEIGHTS["model.norm.weight"].equal(cached.tensors["model.norm.weight"])


def test_scripted_selection_measures_all_the_same_and_takes_what_is_given(cached: Graph, step: Scene) -> None:
    """Scores of at least 0 replace the signal; alpha is 1, so `average` says how many rows are selected."""
    graph = rewritten(cached, EvictTokens(select="scripted", alpha=5.0, full_steps=1))
    assert "block_step" not in graph.inputs, "the script says what the first step keeps, too"
    assert len(graph.find("importance")) == 2
    assert graph.inputs["script"].shape == ("N",)
    mine = step.copy()
    delta = interpret(rewritten(cached, EvictTokens()), step.copy().inputs)["score"]
    script = torch.full((32,), torch.nan)
    script[::2] = -1.0
    script[5] = 0.0
    out = interpret(graph, {**mine.inputs, "script": script})
    assert torch.equal(out["score"], torch.where(torch.arange(32) == 5, 0.0, delta))
    masked = mine.inputs["candidate"]
    script = masked.float()
    for s in range(len(BLOCKS)):  # the last masked row of each block is not selected
        script[s * BLOCK + int(masked[s * BLOCK : (s + 1) * BLOCK].nonzero().max())] = 0.0
    counts = script.view(-1, BLOCK).sum(1)
    out = interpret(graph, {**step.copy().inputs, "script": script, "average": counts})
    assert set(out["kept"].tolist()) == set((~masked | (script > 0)).nonzero().flatten().tolist())


def test_importance_is_of_the_heads_of_all_ranks(captured: Graph, cached: Graph, step: Scene) -> None:
    """Scores and kept rows of two ranks are those of one process: the sum comes before the difference."""
    made = (PackRows(), CacheKV(), EvictTokens())
    graphs = [rewritten(captured, ShardTensorParallel(2, rank=rank), *made) for rank in range(2)]
    assert len(graphs[0].find("all_reduce", 0)) == len(graphs[0].find("all_reduce", 1)) == 3

    def run(rank: int) -> dict[str, torch.Tensor]:
        mine = step.copy().inputs
        for name in [name for name in mine if "_cache_" in name]:
            mine[name] = mine[name].chunk(2, dim=2)[rank].contiguous()
        return interpret(graphs[rank], mine)

    want = interpret(rewritten(cached, EvictTokens()), step.copy().inputs)
    first, second = ranks(2, run)
    for name in ("score", "kept", "reached"):
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], want[name], rtol=1e-4, atol=1e-5)
