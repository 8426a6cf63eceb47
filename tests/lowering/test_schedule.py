"""Scheduling: every call exactly once, in an order that respects what it reads, and nothing across a cut."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

import dgraph
from dgraph.errors import LoweringError
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler, region_text
from dgraph.lowering.schedule import Call, Region, Stage, schedule
from dgraph.ops import OPS, op_of
from dgraph.passes import CacheKV, ChunkLMHead, EvictTokens, FuseProjections, PackRows
from dgraph.recipes import RECIPES, build
from dgraph.types.nodes import op_name
from tests.tiny import Hand, interpret, rewritten

aten = torch.ops.aten
LAYERS = 4


@pytest.fixture(params=["dense step", "dense prefill", "focus step", "evicts late", "packed", "evicts twice"])
def graph(request: pytest.FixtureRequest, packed: Graph) -> Graph:
    if request.param == "packed":
        return packed
    if request.param == "evicts late":
        return rewritten(packed, CacheKV(), EvictTokens(after=3), ChunkLMHead())
    if request.param == "evicts twice":
        return two_cuts()
    recipe, phase = request.param.split()
    return request.getfixturevalue(recipe)[phase]


def two_cuts() -> Graph:
    """x over N, gathered to K, and gathered again."""
    hand = Hand()
    graph = hand.graph
    x, keep = hand.input("x", "N", 8), hand.input("keep", "N", dtype=torch.bool)
    cu_rows = hand.input("cu_rows", "b+1", dtype=torch.int32)
    for _ in range(2):
        x = hand.call(aten.relu.default, x)
        cut = graph.call(OPS["keep_index"], (keep, cu_rows, -1), before=graph.output, by="", rows=graph.new_row_set())
        index, cu_rows = graph.parts(cut, 2, "")
        x, keep = graph.parts(graph.call(OPS["compact"], ([x, keep], index), before=graph.output, by=""), 2, "")
    return hand.returns(x=hand.call(aten.neg.default, x), cu_rows=cu_rows)


def opaque(node: Node) -> bool:
    op = op_of(node.target)
    return op is not None and not op.inline


def part(node: Node) -> bool:
    return node.target is operator.getitem and opaque(node.args[0])  # type: ignore[arg-type]


def made_by(step: Region | Call) -> list[Node]:
    """Every call that a step accounts for."""
    return list(step.nodes) if isinstance(step, Region) else [step.node, *(n for i, n in step.results if i is not None)]


def read_by(step: Region | Call) -> list[Node]:
    return list(step.inputs) if isinstance(step, Region) else step.node.all_input_nodes


def run_order(stages: tuple[Stage, ...]) -> list[tuple[int, Region | Call]]:
    return [(i, s) for i, stage in enumerate(stages) for s in (*stage.steps, *([stage.cut] if stage.cut else []))]


def test_every_call_is_placed_exactly_once(graph: Graph) -> None:
    placed = [n for _, step in run_order(schedule(graph)) for n in made_by(step)]
    assert len(placed) == len(set(placed))
    assert set(placed) == set(graph.calls)
    for _, step in run_order(schedule(graph)):
        if isinstance(step, Region):
            assert not any(opaque(n) or part(n) for n in step.nodes)
        else:
            assert opaque(step.node)


def test_values_are_there_when_they_are_read(graph: Graph) -> None:
    there = {n for n in graph.nodes if n.op == "placeholder"}
    for _, step in run_order(schedule(graph)):
        assert set(read_by(step)) <= there
        there.update(step.outputs if isinstance(step, Region) else made_by(step))
    assert set(graph.results().values()) <= there


def test_a_region_says_what_it_reads_and_gives(graph: Graph) -> None:
    for _, step in run_order(schedule(graph)):
        if not isinstance(step, Region):
            continue
        inside = set(step.nodes)
        read = list(dict.fromkeys(a for n in step.nodes for a in n.all_input_nodes if a not in inside))
        assert list(step.inputs) == read
        assert list(step.outputs) == [n for n in step.nodes if any(u not in inside for u in n.users)]
        assert step.outputs
        order = {n: i for i, n in enumerate(graph.nodes)}
        assert sorted(step.nodes, key=order.__getitem__) == list(step.nodes)


def test_nothing_moves_across_a_cut(graph: Graph) -> None:
    stages = schedule(graph)
    order = {n: i for i, n in enumerate(graph.nodes)}
    cuts = [order[n] for n in graph.find("keep_index")]
    for i, step in run_order(stages):
        for node in made_by(step):
            earlier = sum(c < order[node] for c in cuts)
            if part(node) and node.args[0] in graph.find("keep_index"):
                earlier -= 1  # a cut's results come with it
            assert earlier == i, f"{node.name} is in stage {i}, but {earlier} cuts stand before it"


def test_a_stage_runs_on_one_row_set(graph: Graph) -> None:
    stages = schedule(graph)
    made = [n.meta["rows"] for n in graph.find("keep_index")]
    assert [s.rows for s in stages] == ["N", *made]
    assert [s.cut.node if s.cut else None for s in stages] == [*graph.find("keep_index"), None]
    for stage in stages:
        for step in stage.steps:
            if isinstance(step, Region):
                rows = {graph.row_set(n) for n in step.nodes}
                assert rows <= {stage.rows, None}


def test_caches_are_written_before_their_reads(graph: Graph) -> None:
    calls = [s.node for _, s in run_order(schedule(graph)) if isinstance(s, Call)]
    order = {n: i for i, n in enumerate(graph.nodes)}
    assert calls == sorted(calls, key=order.__getitem__), "opaque calls keep the order of the graph"


class Paged:
    """Rows over N and a cache of theirs; `write` and `take` append calls."""

    def __init__(self) -> None:
        self.hand = Hand()
        self.x = self.hand.input("x", "N", 4)
        self.index = self.hand.input("index", "N", dtype=torch.int64)
        self.slots = self.hand.input("slots", "N", dtype=torch.int64)
        self.cache = self.hand.input("cache", "pages", "page", 4)
        table = self.hand.input("page_table", "b", "P", dtype=torch.int32)
        self.where = (self.hand.input("positions", "N", dtype=torch.int64), table)
        self.where += (self.hand.input("cu_rows", "b+1", dtype=torch.int32),)

    def write(self, values: Node) -> Node:
        return self.hand.call(OPS["feature_write"], values, self.cache, *self.where)

    def take(self, slots: Node | None = None) -> Node:
        return self.hand.call(OPS["feature_take"], self.cache, slots or self.slots)

    def moved(self, values: Node) -> Node:
        (part,) = self.hand.graph.parts(self.hand.call(OPS["compact"], [values], self.index), 1, "")
        return part


def inputs_of_paged() -> dict[str, torch.Tensor]:
    """Three rows of two sequences, each on a page of its own; the slots are theirs, and one row has none."""
    return {
        "x": torch.arange(1.0, 13.0).view(3, 4),
        "index": torch.tensor([2, 0, 1]),
        "slots": torch.tensor([2, 1, -1]),
        "cache": torch.full((2, 2, 4), 100.0),
        "page_table": torch.tensor([[1], [0]], dtype=torch.int32),
        "positions": torch.tensor([0, 1, 1]),
        "cu_rows": torch.tensor([0, 2, 3], dtype=torch.int32),
    }


def read_last(p: Paged) -> dict[str, Node]:
    """Three reads, between which the cache is written, all of them used after the last."""
    before = p.take()
    p.write(p.x)
    between = p.take()
    p.write(p.hand.call(aten.mul.Tensor, p.x, 2.0))
    return {"before": before, "between": between, "after": p.take()}


def read_by_a_call_that_the_write_need_not_wait_for(p: Paged) -> dict[str, Node]:
    """The slots come from a call; the write after the read waits for nothing."""
    before = p.take(p.moved(p.slots))
    p.write(p.x)
    return {"before": p.hand.call(aten.neg.default, before), "after": p.take()}


def read_before_and_fused_late(p: Paged) -> dict[str, Node]:
    """What is made of a read is wanted after the write only; and so is what the slots are made of."""
    slots = p.hand.call(aten.sub.Tensor, p.hand.call(aten.add.Tensor, p.slots, 1), 1)
    old = p.hand.call(aten.mul.Tensor, p.take(slots), 3.0)
    p.write(p.x)
    p.write(p.hand.call(aten.neg.default, p.moved(p.take(slots))))
    return {"sum": p.hand.call(aten.add.Tensor, old, p.take(slots))}


def read_alone(p: Paged) -> dict[str, Node]:
    """Nothing but the cache tells the read to wait: neither its slots nor its reader come from a call."""
    p.write(p.moved(p.x))
    return {"after": p.hand.call(aten.neg.default, p.take())}


READS = [read_last, read_by_a_call_that_the_write_need_not_wait_for, read_before_and_fused_late, read_alone]


@pytest.mark.parametrize("reads", READS)
def test_a_compiled_read_stays_between_the_writes_of_its_cache(reads: Callable[[Paged], dict[str, Node]]) -> None:
    paged = Paged()
    graph = paged.hand.returns(**reads(paged))
    touching = [n for n in graph.calls if paged.cache in n.all_input_nodes]
    made = [n for _, step in run_order(schedule(graph)) for n in made_by(step) if n in touching]
    writes = graph.find("feature_write")

    def earlier(nodes: list[Node]) -> dict[Node, int]:
        return {n: sum(w in nodes[: nodes.index(n)] for w in writes) for n in nodes}

    assert earlier(made) == earlier(touching)
    mine, theirs = inputs_of_paged(), inputs_of_paged()
    got = LoweredProgram(graph, RegionCompiler("eager"), Buckets())(mine, 3).outputs
    for name, wanted in interpret(graph, theirs).items():
        assert torch.equal(got[name], wanted), name
    assert torch.equal(mine["cache"], theirs["cache"])


def test_a_value_that_every_layer_reads_is_computed_in_the_first_region(captured: Graph) -> None:
    phases = dgraph.rewrite(captured, build(RECIPES, "dyllm", captured.spec, {}))
    graph = phases["step"].graph
    regions = [s for _, s in run_order(schedule(graph)) if isinstance(s, Region)]
    (slots,) = graph.find("row_slots")
    assert slots in regions[0].nodes
    assert slots in regions[0].outputs
    takes = [r for r in regions if any(n in graph.find("feature_take") for n in r.nodes)]
    assert [slots in r.inputs for r in takes] == [True] * LAYERS
    found = [region_text(graph, r) for r in takes]
    assert len(set(found[:-1])) == 1, "all layers but the last are one text"
    for region in takes:
        names = [op_name(n.target) for n in region.nodes if op_name(n.target) != "unsqueeze"]
        assert names == ["dgraph.feature_take", "add", "dgraph.rms_norm"], "read, summed and normalised in one kernel"


def test_an_unread_read_goes_and_the_write_stays() -> None:
    paged = Paged()
    paged.write(paged.x)
    paged.take()
    graph = paged.hand.returns(y=paged.hand.call(aten.neg.default, paged.x))
    assert graph.sweep() == 1
    assert [len(graph.find(op)) for op in ("feature_take", "feature_write")] == [0, 1]


def test_a_value_is_computed_where_it_is_first_read(graph: Graph) -> None:
    """No region computes a value that only a later region of its stage reads."""
    stages = schedule(graph)
    for stage in stages:
        regions = [s for s in stage.steps if isinstance(s, Region)]
        for i, region in enumerate(regions):
            later = {a for r in regions[i + 1 :] for a in r.inputs}
            elsewhere = {a for s in stage.steps if isinstance(s, Call) for a in s.node.all_input_nodes}
            elsewhere |= {a for other in stages if other is not stage for s in other.steps for a in read_by(s)}
            elsewhere |= set(stage.cut.node.all_input_nodes) if stage.cut else set()
            elsewhere |= set(graph.results().values())
            inside = {a for n in region.nodes for a in n.all_input_nodes}
            for node in region.outputs:
                assert node not in later or node in elsewhere or node in inside, node.name


def test_stage_names(dense: dict[str, Graph], focus: dict[str, Graph]) -> None:
    def names(graph: Graph) -> list[str]:
        return [s.name for s in schedule(graph)]

    assert names(dense["step"]) == names(dense["prefill"]) == names(focus["prefill"]) == ["step"]
    assert names(focus["step"]) == ["prefix", "suffix"]
    assert names(two_cuts()) == ["prefix", "suffix", "suffix 2"]


def texts(graph: Graph) -> list[str]:
    return [region_text(graph, s) for _, s in run_order(schedule(graph)) if isinstance(s, Region)]


def test_all_layers_but_the_first_and_last_are_one_text(dense: dict[str, Graph], focus: dict[str, Graph]) -> None:
    first, *middle, last = texts(dense["step"])
    assert len(middle) == LAYERS - 1
    assert len(set(middle)) == 1
    assert len({first, middle[0], last}) == 3

    prefill = texts(dense["prefill"])
    assert prefill[:-1] == [first, *middle[:-1]]
    assert prefill[-1] not in {first, middle[0], last}, "the last layer ends with its keys and values"

    suffixed = texts(focus["step"])
    difference = [t for t in suffixed if t not in {first, middle[0], last}]
    assert len(difference) == 1
    assert "aten.sub.Tensor" in difference[0]
    assert [t for t in suffixed if t not in difference] == [first, *middle, last], "over N or over K: one text"
    assert texts(focus["prefill"]) == prefill
    assert len({*texts(dense["step"]), *prefill, *suffixed}) == 5


def test_a_layers_tables_are_derived_in_its_own_region(dense: dict[str, Graph]) -> None:
    for step in schedule(dense["step"])[0].steps:
        if isinstance(step, Region):
            derived = [n for n in step.nodes if n.target is aten.unsqueeze.default and n.meta["layer"] is not None]
            ropes = [n for n in step.nodes if op_of(n.target) is OPS["rope"]]
            assert {u for n in derived for u in n.users} == set(ropes)
            assert len(derived) == len(ropes)


def test_calls_name_their_results(focus: dict[str, Graph]) -> None:
    steps = [s for _, s in run_order(schedule(focus["step"])) if isinstance(s, Call)]
    results: dict[str, Any] = {s.node.target.name().split("::")[1]: [i for i, _ in s.results] for s in steps}  # type: ignore[union-attr]
    assert results["select_tokens"] == [0, 1, 2]
    assert results["keep_index"] == [0, 1]
    assert results["lm_head"] == [0, 1, 2, 3]
    assert results["kv_write"] == results["paged_attention"] == results["importance"] == [None]
    assert results["compact"] == list(range(len(results["compact"])))


def test_a_padded_batch_cannot_be_lowered(captured: Graph) -> None:
    with pytest.raises(LoweringError, match=r"layer 0 \(self_attn\), node attention\w*: .*put PackRows in the recipe"):
        schedule(captured)


def test_a_graph_of_one_region_and_an_empty_one() -> None:
    hand = Hand()
    x = hand.input("x", "N", 8)
    (stage,) = schedule(hand.returns(y=hand.call(aten.relu.default, x)))
    assert [type(s) for s in stage.steps] == [Region]
    (empty,) = schedule(Hand().graph)
    assert (empty.name, empty.steps, empty.rows, empty.cut) == ("step", (), "N", None)


def test_fused_and_unfused_graphs_differ_in_text(packed: Graph) -> None:
    plain, fused = rewritten(packed, CacheKV()), rewritten(packed, FuseProjections(), CacheKV())
    assert set(texts(plain)).isdisjoint(texts(fused)[:-1])
    assert PackRows().name == "PackRows"
