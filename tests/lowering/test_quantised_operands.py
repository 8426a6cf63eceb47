"""Operands that products read quantised: which dequantisations are never computed, and programs that give the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ir.graph import Graph
from dgraph.ir.quantised_operands import executing_op, inputs_of, is_fused_operand, readers_of
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.footprint import footprint
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import Call, Region, schedule
from dgraph.ops import OPS
from dgraph.passes import QuantisedOperands, QuantizeWeights
from dgraph.testing import models
from dgraph.types.nodes import op_name, viewed
from tests.tiny import Hand, interpret, rewritten

aten = torch.ops.aten
DEQUANTISE = "dgraph.dequantise"


def one_product(hand: Hand, x: Node, weight: Node) -> Node:
    return hand.call(aten.linear.default, x, weight)


def two_products(hand: Hand, x: Node, weight: Node) -> Node:
    return hand.call(aten.add.Tensor, one_product(hand, x, weight), one_product(hand, x, weight))


def also_a_sum(hand: Hand, x: Node, weight: Node) -> Node:
    return hand.call(aten.add.Tensor, one_product(hand, x, weight), hand.call(aten.sum.default, weight))


def as_both(hand: Hand, x: Node, weight: Node) -> Node:
    return hand.call(aten.linear.default, weight, weight)


def as_rows(hand: Hand, x: Node, weight: Node) -> Node:
    return hand.call(aten.linear.default, weight, hand.weight("v", 4, 8))


CASES: list[tuple[Callable[..., Node], bool]] = [
    (one_product, True),
    (two_products, True),
    (also_a_sum, False),
    (as_both, False),
    (as_rows, False),
]


def built(read: Callable[..., Node]) -> tuple[Graph, Node]:
    hand = Hand()
    x = hand.input("x", "N", 8)
    weight = hand.stored(6, 8)
    return hand.returns(logits=read(hand, x, weight)), weight


@pytest.mark.parametrize(("read", "taken"), CASES)
def test_a_weight_is_a_fused_operand_of_products_alone(read: Callable[..., Node], taken: bool) -> None:
    graph, weight = built(read)
    assert is_fused_operand(weight) is taken
    linear = next(node for node in graph.calls if node.target is aten.linear.default)
    assert (executing_op(linear) is OPS["linear"]) is taken
    calls = [step for stage in schedule(graph) for step in stage.steps if isinstance(step, Call)]
    assert {call.op.name for call in calls} == ({"linear"} if taken else set())
    if taken:
        assert [node.name for node in inputs_of(linear.all_input_nodes)] == ["x", "w6_weight", "w6_weight_scale"]
        assert set(readers_of(weight.all_input_nodes[0])) == set(weight.users)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("read", [read for read, _ in CASES if read in (two_products, also_a_sum)])
def test_it_computes_the_same_taken_or_not(read: Callable[..., Node], backend: str) -> None:
    graph, _ = built(read)
    x = torch.randn((5, 8), generator=torch.Generator().manual_seed(1))
    want = interpret(graph, {"x": x})["logits"]
    got = LoweredProgram(graph, RegionCompiler(backend), Buckets())({"x": x}, 5).outputs["logits"]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_every_product_of_a_step_takes_what_is_stored() -> None:
    (tiny,) = models(None, "sdar_moe")
    made = tiny.quantised(QuantizeWeights("int4", (1, 8), lm_head=True)).optimized("focus")
    seen: dict[str, list[Any]] = {}
    program = made.programs["step"]
    assert all(map(is_fused_operand, program.graph.find("dequantise")))
    with program.observed(lambda op, args, _: seen.setdefault(op.name, []).append(args)):
        made.generate(input_ids=[[1, 2, 3]], max_new_tokens=8, threshold=0.3)
    for name in {op.name for op in OPS.values() if op.stored} & set(seen):
        values = [value for args in seen[name] for value in OPS[name].values(OPS[name].stored, args)]
        assert values
        # Routers are not quantised.
        assert any(isinstance(value, QuantisedWeight) for value in values), name
    assert {"linear", "experts", "lm_head"} <= set(seen)


def test_no_dequantised_weight_lies_in_memory() -> None:
    (tiny,) = models(None, "sdar")
    peaks = []
    for made in (tiny.optimized("dense"), tiny.quantised(QuantizeWeights("int8")).optimized("dense")):
        program = made.programs["step"]
        peaks.append(footprint(program, {"N": 8, "b": 1, "P": 4, "pages": 8, "page": made.page_size}).peak)
        steps = [step for stage in program.stages for step in stage.steps]
        assert not [node for step in steps for node in getattr(step, "nodes", ()) if op_name(node.target) == DEQUANTISE]
    largest = max(tensor.nbytes for tensor in tiny.graph.tensors.values())
    assert peaks[1] < peaks[0] + largest / 2


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_rounding_fuses_into_what_makes_the_rows(backend: str) -> None:
    hand = Hand()
    made = hand.call(aten.silu.default, hand.input("x", "N", 8))
    rows = hand.call(OPS["round_rows"].overload, made, "int8")
    graph = hand.returns(logits=hand.call(aten.linear.default, rows, hand.stored(6, 8)))
    program = LoweredProgram(rewritten(graph, QuantisedOperands()), RegionCompiler(backend), Buckets())
    (stage,) = program.stages
    assert [[op_name(n.target) for n in step.nodes] for step in stage.steps if isinstance(step, Region)] == [
        ["silu", "dgraph.quantise_rows", "getitem", "getitem"]
    ]
    seen: list[Any] = []
    x = torch.randn((5, 8), generator=torch.Generator().manual_seed(1))
    with program.observed(lambda op, args, _: seen.append((op.name, type(args[0]), type(args[1])))):
        got = program({"x": x}, 5).outputs["logits"]
    assert seen == [("linear", QuantisedRows, QuantisedWeight)]
    torch.testing.assert_close(got, interpret(graph, {"x": x})["logits"], rtol=1e-5, atol=1e-5)


def test_less_lies_in_memory_by_rounded_rows() -> None:
    (tiny,) = models(None, "sdar")
    sizes = {"N": 64, "b": 8, "P": 4, "pages": 32, "page": tiny.optimized("dense").page_size}
    steps = QuantizeWeights("int8"), QuantizeWeights("int8", activations=True)
    found = [footprint(tiny.quantised(step).optimized("dense").programs["step"], sizes) for step in steps]
    assert found[1].groups["projections"] < found[0].groups["projections"]


def test_rounding_is_a_part_of_the_norm_or_the_activation_that_makes_the_rows() -> None:
    """Of the four roundings of a layer; the one of what attention gives is the first of a region. Masked rows, on which
    the last layer ends, are counted on the device, and so is its activation.
    """
    (tiny,) = models(None, "llada")
    program = tiny.quantised(QuantizeWeights("fp8", activations=True)).optimized("dense").programs["step"]
    (stage,) = program.stages
    last, found = tiny.model.spec.layers - 1, Counter[str]()
    for step in stage.steps:
        for node in step.nodes if isinstance(step, Region) else ():
            if op_name(node.target) == "dgraph.quantise_rows" and node.meta["layer"] < last:
                made = viewed(node.all_input_nodes[0])
                found[op_name(made.target) if made in step.nodes else "a call"] += 1
    assert found == {"dgraph.rms_norm": 2 * last, "mul": last, "a call": last}
