"""QuantisedOperands: rounded rows become numbers and scales, lookups read stored tables, with the same values."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.fx import Node

from dgraph.compiler.phases import HOPPER, lowerable, lowering_passes, rewrite
from dgraph.errors import PassError
from dgraph.ir.graph import Graph
from dgraph.ir.quantised_operands import is_fused_operand
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.ops import OPS
from dgraph.passes import PASSES, PackRows, QuantisedOperands, QuantizeWeights
from dgraph.passes.base import Effect, pass_from_json
from dgraph.recipes import Phase, Recipe
from dgraph.testing import TinyModel, models
from dgraph.text.writer import dump
from dgraph.types.nodes import args_of, op_name
from tests.golden_files import check_golden
from tests.oracle.eight_bits import linear_in
from tests.tiny import Hand, interpret, ops_of, report_of, rewritten

aten = torch.ops.aten
ROUND = OPS["round_rows"].overload


@functools.cache
def model(family: str, step: QuantizeWeights) -> TinyModel:
    (tiny,) = models(None, family)
    return tiny.quantised(step)


ROUNDED = QuantizeWeights("int8", activations=True)
ALL = QuantizeWeights("int8", activations=True, embeddings=True, lm_head=True)


# -- where it fires ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llada", "sdar", "sdar_moe", "dream"])
def test_it_fires_at_each_rounding_and_lookup(family: str) -> None:
    graph = rewritten(model(family, ALL).graph, PackRows())
    rounded, report = graph.find("round_rows"), report_of(graph, QuantisedOperands())
    assert Counter(a.what for a in report.applied) == {"rows as int8": len(rounded), "vectors of a stored table": 1}
    assert Counter(a.layer for a in report.applied) == Counter([None, *(node.meta["layer"] for node in rounded)])
    assert report.skipped == []
    made = rewritten(graph, QuantisedOperands())
    assert made.find("round_rows") == made.find("embedding") == []
    assert len(made.find("quantise_rows")) == len(made.find("dequantise_rows")) == len(rounded)
    assert all(map(is_fused_operand, made.find("dequantise_rows")))
    assert {node.meta["by"] for node in made.find("quantise_rows")} == {"QuantisedOperands"}


@pytest.mark.parametrize("recipe", ["focus", "dyllm", "dllm_serve", "maskkv"])
def test_every_product_of_a_recipe_takes_rounded_rows(recipe: str) -> None:
    family = "sdar" if recipe != "focus" else "sdar_moe"
    made = model(family, QuantizeWeights("int8", activations=True, lm_head=True)).optimized(recipe)
    for phase, program in made.programs.items():
        assert program.graph is made.phases[phase].graph, "lowered as it was verified"
        assert made.report[phase][-1].name == "QuantisedOperands"
        rounded = program.graph.find("dequantise_rows")
        assert rounded, phase
        assert all(map(is_fused_operand, rounded))
        assert program.graph.find("round_rows") == []


def test_without_quantised_weights_it_leaves_no_trace() -> None:
    (tiny,) = models(None, "sdar")
    phase = tiny.optimized("dense").phases["step"]
    assert "QuantisedOperands" not in [report.name for report in phase.reports]
    assert not any("QuantisedOperands" in step for step in phase.graph.history)
    with pytest.raises(PassError, match="applied nowhere"):
        rewritten(tiny.graph, QuantisedOperands())


# -- the same values -----------------------------------------------------------------------------------------------


def by_rows(kind: str = "int8") -> Graph:
    """silu(x), rounded, by a weight in int8."""
    hand = Hand()
    rows = hand.call(ROUND, hand.call(aten.silu.default, hand.input("x", "N", 8)), kind)
    return hand.returns(logits=hand.call(aten.linear.default, rows, hand.stored(6, 8, kind=kind)))


def numbers(rows: int = 5) -> torch.Tensor:
    return torch.randn((rows, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_it_is_a_product_of_rounded_rows_in_plain_pytorch(kind: str) -> None:
    made = rewritten(by_rows(kind), QuantisedOperands())
    assert ops_of(made).count("dgraph.quantise_rows") == 1
    whole = torch.randn((6, 8), generator=torch.Generator().manual_seed(6))
    want = linear_in(kind, but=lambda weight: False)(torch.nn.functional.silu(numbers()), whole)
    torch.testing.assert_close(interpret(made, {"x": numbers()})["logits"], want, rtol=1e-5, atol=1e-5)
    lowered = LoweredProgram(made, RegionCompiler("eager"), Buckets())({"x": numbers()}, 5).outputs["logits"]
    torch.testing.assert_close(lowered, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [ALL, QuantizeWeights("int4", embeddings=True, lm_head=True)], ids=["w8a8", "int4"])
@pytest.mark.parametrize("family", ["llada", "sdar_moe"])
def test_it_changes_no_bit(family: str, step: QuantizeWeights) -> None:
    graph = model(family, step).graph
    ids = torch.tensor([[5, 9, 4, 7, 1, 2, 3, 8], [1, 1, 2, 6, 0, 3, 9, 9]])
    given = {"input_ids": ids, "positions": torch.arange(8).repeat(2, 1)}
    want, got = interpret(graph, given), interpret(rewritten(graph, QuantisedOperands()), given)
    assert torch.equal(got["logits"], want["logits"])


def test_rows_are_rounded_where_they_are_gathered() -> None:
    hand = Hand()
    keep, x = hand.input("keep", "N", dtype=torch.bool), hand.input("x", "N", 8)
    cu_rows = hand.input("cu_rows", "b+1", dtype=torch.int32)
    rows = hand.call(ROUND, x, "int8")
    listed = hand.call(OPS["list_kept"].overload, keep, cu_rows)
    index, offsets = hand.graph.parts(listed, 2, "")
    (some,) = hand.graph.parts(hand.call(OPS["compact"].overload, [rows], index), 1, "")
    results = [hand.call(aten.linear.default, value, hand.stored(n, 8)) for n, value in ((6, rows), (4, some))]
    graph = hand.returns(all=results[0], some=results[1], index=index, offsets=offsets)
    report = report_of(graph, QuantisedOperands())
    assert sorted(a.what for a in report.applied) == ["rounding after a gather", "rows as int8", "rows as int8"]
    made = rewritten(graph, QuantisedOperands())
    assert [is_fused_operand(node) for node in made.find("dequantise_rows")] == [True, True]
    given = {"x": numbers(), "keep": torch.tensor([True, False, False, True, True]), "cu_rows": torch.tensor([0, 3, 5])}
    given["cu_rows"] = given["cu_rows"].int()
    want, got = interpret(graph, given), interpret(made, given)
    assert torch.equal(got["all"], want["all"])
    assert torch.equal(got["some"][:3], want["some"][:3])


# -- reasons to skip -----------------------------------------------------------------------------------------------


def another(hand: Hand, rows: Node) -> Node:
    return hand.call(aten.linear.default, rows, hand.stored(6, 8))


def a_sum(hand: Hand, rows: Node) -> Node:
    return hand.call(aten.add.Tensor, another(hand, rows), hand.call(aten.sum.dim_IntList, rows, [1], True))


def a_plain_weight(hand: Hand, rows: Node) -> Node:
    return hand.call(aten.linear.default, rows, hand.weight("w", 6, 8))


def another_kind(hand: Hand, rows: Node) -> Node:
    return hand.call(aten.linear.default, rows, hand.stored(6, 8, kind="fp8"))


def a_weight_that_is_read(hand: Hand, rows: Node) -> Node:
    made = another(hand, rows)
    return hand.call(aten.add.Tensor, made, hand.call(aten.sum.dim_IntList, args_of(made)[1], [1]))


def both_operands(hand: Hand, rows: Node) -> Node:
    return hand.call(aten.linear.default, rows, rows)


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (a_sum, "sum reads the rounded rows, and multiplies by none that are quantised"),
        (a_plain_weight, "linear multiplies the rounded rows by a weight that is not quantised"),
        (another_kind, "w6.weight is not stored as int8 with one scale for each of its rows"),
        (a_weight_that_is_read, "w6.weight is dequantised, since not only products read it"),
        (both_operands, "linear reads the rounded rows twice"),
    ],
)
def test_rows_that_products_cannot_take_are_near_misses(read: Any, reason: str) -> None:
    hand = Hand()
    rows = hand.call(ROUND, hand.weight("x", 5, 8), "int8")
    graph = hand.returns(logits=read(hand, rows))
    report = report_of(graph, QuantisedOperands())
    assert ([a.what for a in report.applied], [s.reason for s in report.skipped]) == ([], [reason])
    assert len(graph.find("round_rows")) == 1


def test_rows_that_are_returned_are_a_near_miss() -> None:
    hand = Hand()
    rows = hand.call(ROUND, hand.input("x", "N", 8), "int8")
    report = report_of(hand.returns(hidden=rows), QuantisedOperands())
    assert [s.reason for s in report.skipped] == [
        "output reads the rounded rows, and multiplies by none that are quantised"
    ]


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "recipe", "linear", "gated"),
    [("dream", "dyllm", 8, 4), ("llada", "dense", 3, 1), ("sdar", "focus", 0, 0)],
)
def test_no_more_rows_are_rounded_than_are_listed(family: str, recipe: str, linear: int, gated: int) -> None:
    """Products that count their rows by a list count those that are rounded, and normed, for them alone.

    Of four layers: salient rows of each (keys and values, feed-forward network); masked rows of the last; of an
    eviction that the host counts none.
    """
    made = model(family, QuantizeWeights("fp8", activations=True)).optimized(recipe)
    graph = rewrite(made.captured, made.recipe, lowering_passes((8, 9)))["step"].graph
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets(), fused=True)
    found = Counter[tuple[str, bool]]()
    for operand in graph.find("dequantise_rows"):
        rounded = args_of(args_of(operand)[0])[0]
        for reader in operand.users if op_name(rounded.target) == "dgraph.rows_quantise" else ():
            x, _, count = args_of(rounded)
            normed = op_name(x.target) == "dgraph.rows_norm"
            assert args_of(reader)[3] is count
            assert not normed or args_of(x)[3] is count
            found[op_name(reader.target), normed] += 1
    assert found == Counter({("dgraph.rows_linear", False): linear, ("dgraph.rows_glu", True): gated})
    want = made.generate(input_ids=[[5, 9, 4, 7]], max_new_tokens=16)
    made._session.programs["step"] = program
    assert made.generate(input_ids=[[5, 9, 4, 7]], max_new_tokens=16).token_ids == want.token_ids


def test_the_passes_of_a_device_follow_from_its_capability() -> None:
    assert [repr(step) for step in lowering_passes(None)] == ["QuantisedOperands(live_rows=False)"]
    assert [repr(step) for step in lowering_passes(HOPPER)] == [
        "QuantisedOperands(live_rows=True)", "FuseGLU(packed=('quantised', '16-bit'))",
    ]  # fmt: skip
    assert repr(lowering_passes((12, 0))[1]) == "FuseGLU(packed=('quantised',))"


def test_a_graph_of_no_recipe_is_prepared_likewise() -> None:
    graph = rewritten(model("sdar", ROUNDED).graph, PackRows())
    made = lowerable(graph)
    assert graph.find("round_rows")
    assert made.find("round_rows") == []
    assert made.history == (*graph.history, "QuantisedOperands(live_rows=False)")


def test_passes_after_those_of_a_recipe_are_the_callers_choice() -> None:
    graph, recipe = model("sdar", ROUNDED).graph, Recipe("made", 1, (Phase("step", (PackRows(),)),))
    plain = rewrite(graph, recipe, ())["step"]
    assert plain.graph.find("round_rows")
    assert [r.name for r in plain.reports] == ["PackRows"]
    assert rewrite(graph, recipe)["step"].after("PackRows") is plain.graph


# -- as a value, and as a dump -------------------------------------------------------------------------------------


def test_it_reads_back_from_json() -> None:
    step = QuantisedOperands(live_rows=True)
    assert pass_from_json(step.to_json(), PASSES) == step
    assert step.identity() == step
    assert step.effect is Effect.REASSOCIATES


def test_the_dump_of_a_step() -> None:
    graph = rewrite(model("llada", ALL).graph, model("llada", ALL).recipe("dense"))["step"].graph
    check_golden("llada_quantised_operands.txt", dump(graph))
