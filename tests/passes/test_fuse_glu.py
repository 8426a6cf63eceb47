"""FuseGLU: gated units over a count become one call with the same values; every reason to leave one alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from dgraph.compiler.phases import lowering_passes, rewrite
from dgraph.errors import PassError, UnknownName
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import schedule
from dgraph.ops import OPS
from dgraph.passes import (
    PASSES,
    CacheKV,
    CountRows,
    EvictTokens,
    FuseGLU,
    FuseProjections,
    GateFFN,
    QuantisedOperands,
    QuantizeWeights,
    ReuseRows,
    run_passes,
)
from dgraph.passes.base import pass_from_json
from dgraph.passes.fuse_glu import OPERANDS
from dgraph.testing import models
from dgraph.text.writer import dump
from tests.amounts import first_cases
from tests.golden_files import check_golden
from tests.oracle.dyllm import Method
from tests.passes.scene import check_kept_rows
from tests.passes.sparse_step import FAMILIES, check_against_oracle, check_lossless, family_of
from tests.tiny import Hand, interpret, ops_of, report_of, rewritten

aten = torch.ops.aten
LAYERS = 4


def gated_of(name: str, tau: float = 0.7) -> Graph:
    return rewritten(family_of(name).cached, FuseProjections(), GateFFN(tau))


# -- where it fires ----------------------------------------------------------------------------------------------


@first_cases(4, "name", sorted(FAMILIES, key=lambda name: name not in ("llada2", "nemotron", "sdar", "sdar_moe")))
def test_it_fires_once_per_gated_unit(name: str) -> None:
    """Experts have units of their own, within their op; so of SDAR-MoE only the dense layers have one."""
    before = gated_of(name)
    units = [n.meta["layer"] for n in before.calls if n.target is aten.silu.default]
    layers = [x for x in range(before.spec.layers) if name != "sdar_moe" or not before.find("experts", x)]
    assert units == layers != []
    report = report_of(before, FuseGLU())
    assert report.skipped == []
    assert [a.layer for a in report.applied] == units
    assert {a.what.rpartition(".")[2] for a in report.applied} == {"gate_proj+up_proj"}
    graph = rewritten(before, FuseGLU())
    assert [n.meta["layer"] for n in graph.find("rows_glu")] == units
    assert not {"silu", "mul"} & {name for layer in layers for name in ops_of(graph, layer)}
    # The split goes too: four calls and two parts become one.
    assert len(before.calls) - len(graph.calls) == 5 * len(layers)
    for node in graph.find("rows_glu"):
        assert (node.meta["by"], graph.row_set(node)) == ("FuseGLU", "N")
        assert node.meta["role"].endswith("gate_proj+up_proj")
        assert node.args[0].meta["val"].shape[1] == graph.spec.hidden  # type: ignore[union-attr]
    assert (graph.inputs, graph.outputs, graph.tensors) == (before.inputs, before.outputs, before.tensors)


@pytest.mark.parametrize("after", [1, 3])
def test_it_fires_after_an_eviction_that_is_counted(packed: Graph, after: int) -> None:
    before = rewritten(packed, FuseProjections(), CacheKV(), EvictTokens(after=after), CountRows())
    report = report_of(before, FuseGLU())
    assert [a.layer for a in report.applied] == list(range(after, LAYERS))
    graph = rewritten(before, FuseGLU())
    assert {graph.row_set(n) for n in graph.find("rows_glu")} == {"K"}
    assert [ops_of(graph, layer).count("silu") for layer in range(LAYERS)] == [1] * after + [0] * (LAYERS - after)


def test_it_fires_after_rows_that_are_reused() -> None:
    before = rewritten(family_of("llada").cached, FuseProjections(), ReuseRows(0.25))
    report = report_of(before, FuseGLU())
    assert [a.layer for a in report.applied] == list(range(1, before.spec.layers)), "the first layer runs on all rows"


def test_nothing_is_left_between_the_two_products() -> None:
    """The activation was a region of its own in every layer."""
    steps = [len(schedule(g)[0].steps) for g in (gated_of("llada"), rewritten(gated_of("llada"), FuseGLU()))]
    assert steps[0] - steps[1] == family_of("llada").cached.spec.layers


# -- the same values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", ["llada", "dream", "sdar"])
def test_after_gated_layers_it_is_the_method_in_plain_pytorch(name: str, padding: int) -> None:
    graph = rewritten(gated_of(name), FuseGLU())
    counts = check_against_oracle(family_of(name), graph, Method(0.7, partial=False), padding)
    assert 0 < counts[2] < counts[0]


@pytest.mark.parametrize("name", ["llada", "sdar", "llada2"])
def test_with_tau_above_one_it_is_the_dense_program(name: str) -> None:
    dense = rewritten(family_of(name).cached, FuseProjections())
    check_lossless(dense, rewritten(dense, GateFFN(1.01), FuseGLU()), exactly=True)


def test_kept_rows_have_the_values_of_the_program_without_it(packed: Graph) -> None:
    check_kept_rows(packed, FuseGLU())


# -- near misses and errors --------------------------------------------------------------------------------------


Tail = Callable[[Hand, Node, Node, Node], Node]


def unit(tail: Tail, sizes: tuple[int, ...] = (12, 12), dim: int = 1, bias: bool = False) -> Graph:
    """A product over a count, split, and whatever `tail` makes of it and the parts."""
    hand = Hand()
    x, count = hand.input("x", "N", 8), hand.input("count", 1, dtype=torch.int32)
    hand.layer = 0
    weight, offset = hand.weight("layers.0.p.weight", sum(sizes), 8), None
    if bias:
        offset = hand.weight("layers.0.p.bias", sum(sizes))
    linear = hand.call(OPS["rows_linear"], x, weight, offset, count)
    split = hand.call(aten.split_with_sizes.default, linear, list(sizes), dim)
    first, second = hand.graph.parts(split, 2, "")
    return hand.returns(y=tail(hand, linear, first, second))


def silu(hand: Hand, x: Node) -> Node:
    return hand.call(aten.silu.default, x)


def mul(hand: Hand, x: Node, y: Any) -> Node:
    return hand.call(aten.mul.Tensor, x, y)


def multiplied(hand: Hand, linear: Node, first: Node, second: Node) -> Node:
    return mul(hand, silu(hand, first), second)


def turned(hand: Hand, linear: Node, first: Node, second: Node) -> Node:
    return mul(hand, second, silu(hand, first))


def swapped(hand: Hand, linear: Node, first: Node, second: Node) -> Node:
    return mul(hand, silu(hand, second), first)


def both(hand: Hand, linear: Node, first: Node, second: Node) -> Node:
    return mul(hand, silu(hand, first), silu(hand, second))


def squared(hand: Hand, linear: Node, first: Node, second: Node) -> Node:
    gate = silu(hand, first)
    return mul(hand, gate, gate)


def ungated(hand: Hand, linear: Node, first: Node, second: Node) -> Node:
    return mul(hand, hand.call(aten.relu.default, first), second)


def whole(hand: Hand, linear: Node, first: Node, second: Node) -> Node:
    return mul(hand, multiplied(hand, linear, first, second), hand.call(aten.sum.dim_IntList, linear, [1], True))


def beside(which: str) -> Tail:
    """A unit of which something else reads one value."""

    def tail(hand: Hand, linear: Node, first: Node, second: Node) -> Node:
        gate = silu(hand, first)
        out = mul(hand, gate, second)
        if which == "split":
            (again,) = hand.graph.parts(first.args[0], 1, "")  # type: ignore[arg-type]
            return mul(hand, out, again)
        return mul(hand, out, hand.call(aten.neg.default, {"gate": first, "silu": gate, "up": second}[which]))

    return tail


@pytest.mark.parametrize("tail", [multiplied, turned])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dim", [1, -1])
def test_a_plain_unit_is_fused(tail: Tail, bias: bool, dim: int) -> None:
    graph = unit(tail, bias=bias, dim=dim)
    fused = rewritten(graph, FuseGLU())
    assert ops_of(fused) == ["dgraph.rows_glu"]
    inputs = {"x": torch.randn(6, 8), "count": torch.tensor([4], dtype=torch.int32)}
    got, want = interpret(fused, inputs)["y"], interpret(graph, inputs)["y"]
    assert torch.equal(got[:4], want[:4])
    assert got[4:].isnan().all()


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (swapped, "silu is of the second half; the columns of the gate must be the first"),
        (both, "silu is of the second half; the columns of the gate must be the first"),
        (squared, "silu of the first half is not multiplied by the second half"),
        (whole, "sum reads its result too, so it must stay"),
        (beside("split"), "getitem reads the split too, so it must stay"),
        (beside("gate"), "neg reads the gate too, so it must stay"),
        (beside("silu"), "neg reads silu of the gate too, so it must stay"),
        (beside("up"), "neg reads the second half too, so it must stay"),
    ],
)
def test_a_unit_that_is_another_or_is_read_elsewhere_is_a_near_miss(tail: Tail, reason: str) -> None:
    graph = unit(tail)
    before = ops_of(graph)
    report = report_of(graph, FuseGLU())
    assert report.applied == []
    assert [(s.layer, s.reason) for s in report.skipped] == [(0, reason)]
    assert ops_of(graph) == before


def test_columns_that_are_not_two_halves_are_a_near_miss() -> None:
    def gate(hand: Hand, linear: Node, first: Node, second: Node) -> Node:
        return silu(hand, first)

    for sizes in ((12, 8), (8, 8, 8)):
        report = report_of(unit(gate, sizes), FuseGLU())
        (skipped,) = report.skipped
        want = f"it is split into {list(sizes)} along dimension 1, not into gate columns and as many up columns"
        assert skipped.reason == want


def test_rows_that_are_split_are_a_near_miss() -> None:
    hand = Hand()
    count = hand.input("count", 1, dtype=torch.int32)
    x = hand.weight("x", 8, 8)
    linear = hand.call(OPS["rows_linear"], x, hand.weight("w", 6, 8), None, count)
    first, second = hand.graph.parts(hand.call(aten.split_with_sizes.default, linear, [4, 4]), 2, "")
    report = report_of(hand.returns(y=multiplied(hand, linear, first, second)), FuseGLU())
    assert [s.reason for s in report.skipped] == [
        "it is split into [4, 4] along dimension 0, not into gate columns and as many up columns"
    ]


def test_gate_and_up_that_are_two_products_are_a_near_miss() -> None:
    graph = rewritten(family_of("llada").cached, GateFFN())
    report = report_of(graph, FuseGLU())
    assert [s.reason for s in report.skipped] == [
        "its result is a gate alone; run FuseProjections before it, which makes one product of gate and up"
    ] * graph.spec.layers
    with pytest.raises(PassError, match=r"applied nowhere(.|\n)*near miss at layer 0(.|\n)*run FuseProjections"):
        rewritten(graph, FuseGLU())


def test_products_without_a_gate_are_none() -> None:
    """Of queries, keys and values, say; and linear layers whose rows the host knows."""
    dense = rewritten(family_of("llada").cached, FuseProjections())
    for graph in (unit(ungated), dense, rewritten(gated_of("llada"), FuseGLU())):
        report = report_of(graph, FuseGLU())
        assert (report.applied, report.skipped) == ([], [])


# -- rows that the host counts -------------------------------------------------------------------------------------


def packed_unit(read: str, dtype: torch.dtype = torch.float32, cu_rows: bool = True) -> Graph:
    """silu(gate) * up of rounded rows, gate and up by one weight in int8; or something near it."""
    hand = Hand()
    x = hand.input("x", "N", 8, dtype=dtype)
    counts = hand.input("cu_rows" if cu_rows else "counts", "b+1", dtype=torch.int32)
    plain = read in ("a weight as it is", "rows and a weight as they are")
    weight = hand.weight("w", 12, 8, dtype=dtype) if plain else hand.stored(12, 8, dtype)
    rounded = read not in ("rows as they are", "rows and a weight as they are")
    rows = hand.call(OPS["round_rows"].overload, x, "int8") if rounded else x
    both = hand.call(aten.linear.default, rows, weight)
    gate, up = hand.graph.parts(hand.call(aten.split_with_sizes.default, both, [6, 6], 1), 2, "")
    made = hand.call(aten.mul.Tensor, hand.call(aten.silu.default, gate), up)
    return hand.returns(logits=made, counts=counts, **({"gate": gate} if read == "the gate" else {}))


@pytest.mark.parametrize(
    ("read", "dtype", "packed"),
    [
        ("alone", torch.float32, "quantised"),
        ("the gate", torch.float32, None),
        ("a weight as it is", torch.float32, None),
        ("rows as they are", torch.float32, None),
        ("rows and a weight as they are", torch.float32, None),
        ("rows and a weight as they are", torch.bfloat16, "16-bit"),
        ("rows and a weight as they are", torch.float16, "16-bit"),
        ("rows as they are", torch.bfloat16, "16-bit"),
    ],
    ids=str,
)
def test_a_unit_of_packed_rows_is_fused_by_its_operands(read: str, dtype: torch.dtype, packed: str | None) -> None:
    graph, optional = packed_unit(read, dtype), frozenset({"QuantisedOperands", "FuseGLU"})
    given = {"x": torch.randn(5, 8).to(dtype), "cu_rows": torch.tensor([0, 2, 4], dtype=torch.int32)}
    want = interpret(graph, given)["logits"]
    for operands in ((), *((name,) for name in OPERANDS), OPERANDS):
        made, fused = graph.copy(), packed in operands
        *_, report = run_passes(made, [QuantisedOperands(), FuseGLU(operands)], optional)
        assert (len(made.find("rows_glu")), len(report.applied)) == (fused, fused)
        assert len(report.skipped) == (operands != () and not fused)
        got = interpret(made, given)["logits"]
        torch.testing.assert_close(got[:4], want[:4])
        assert got[4].isnan().all() == fused, "a row that belongs to no sequence"


def test_a_unit_of_other_operands_is_a_near_miss() -> None:
    for operands in ((name,) for name in OPERANDS):
        (skipped,) = report_of(packed_unit("rows and a weight as they are"), FuseGLU(operands)).skipped
        assert skipped.reason == f"its rows and weight are not {operands[0]} operands"
    (skipped,) = report_of(packed_unit("the gate"), FuseGLU(OPERANDS)).skipped
    assert skipped.reason == "output reads the gate too, so it must stay"


def test_rows_without_offsets_are_a_near_miss() -> None:
    graph = packed_unit("rows and a weight as they are", torch.bfloat16, cu_rows=False)
    (skipped,) = report_of(graph, FuseGLU(OPERANDS)).skipped
    assert skipped.reason == "its rows are not packed; run PackRows before it"


def test_operands_of_no_kind_are_refused() -> None:
    with pytest.raises(UnknownName, match=r"kind of operands '16bit'.*Did you mean '16-bit'"):
        FuseGLU(("16bit",))


@pytest.mark.parametrize(
    ("family", "recipe"), [("llada", "fast_dllm"), ("llada", "dense"), ("sdar", "dense"), ("sdar", "focus")]
)
def test_a_gpu_multiplies_gate_and_up_in_one_call(family: str, recipe: str) -> None:
    """Each layer's that the recipe does not count itself; tokens are the same."""
    (tiny,) = models(None, family)
    made = tiny.quantised(QuantizeWeights("int8", activations=True)).optimized(recipe)
    counted = len(made.graph().find("rows_glu"))
    phase = rewrite(made.captured, made.recipe, lowering_passes((8, 9)))["step"]
    assert len(phase.graph.find("rows_glu")) == tiny.model.spec.layers
    assert [r.name for r in phase.reports][-2:] == ["QuantisedOperands", "FuseGLU"]
    assert len(phase.reports[-1].applied) == tiny.model.spec.layers - counted > 0
    want = made.generate(input_ids=[[5, 9, 4, 7]], max_new_tokens=16)
    made._session.programs["step"] = LoweredProgram(phase.graph, RegionCompiler("eager"), Buckets(), fused=True)
    assert made.generate(input_ids=[[5, 9, 4, 7]], max_new_tokens=16).token_ids == want.token_ids


def test_it_reads_back_from_json() -> None:
    for step in (FuseGLU(), FuseGLU(OPERANDS)):
        assert pass_from_json(json.loads(json.dumps(step.to_json())), PASSES) == step


# -- dump --------------------------------------------------------------------------------------------------------


def test_the_dump_of_a_step() -> None:
    passes = (FuseProjections(), GateFFN(), FuseGLU())
    check_golden("qwen3_glu_step.txt", dump(rewritten(family_of("sdar").cached, *passes)))
