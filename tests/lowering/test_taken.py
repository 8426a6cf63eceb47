"""Weights that products take as they are stored: which are taken, which are dequantised, and what is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from dgraph.families.quantised import Format, QuantisedRows, QuantisedWeight, quantise
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.footprint import footprint
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import Call, Region, schedule
from dgraph.lowering.taken import as_taken, inputs_of, is_taken, readers_of, run_by
from dgraph.ops import OPS
from dgraph.passes import QuantizeWeights
from dgraph.testing import models
from dgraph.types.nodes import args_of, op_name, viewed
from tests.tiny import Hand, interpret

aten = torch.ops.aten
DEQUANTISE = "dgraph.dequantise"


def stored(hand: Hand, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Node:
    """A weight in int8, dequantised."""
    whole = torch.randn((rows, columns), generator=torch.Generator().manual_seed(rows))
    found = quantise(whole, Format("int8"))
    values = hand.graph.add_weight(f"w{rows}.weight", found.values)
    scales = hand.graph.add_weight(f"w{rows}.weight_scale", found.scales)
    return hand.call(OPS["dequantise"].overload, values, scales, None, [1, -1], dtype)


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
    weight = stored(hand, 6, 8)
    return hand.returns(logits=read(hand, x, weight)), weight


@pytest.mark.parametrize(("read", "taken"), CASES)
def test_a_weight_is_taken_by_products_alone(read: Callable[..., Node], taken: bool) -> None:
    graph, weight = built(read)
    assert is_taken(weight) is taken
    linear = next(node for node in graph.calls if node.target is aten.linear.default)
    assert (run_by(linear) is OPS["linear"]) is taken
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
    assert all(map(is_taken, program.graph.find("dequantise")))
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


# -- rows ------------------------------------------------------------------------------------------------------------


def by_rows(read: str) -> Graph:
    """silu(x), rounded, by a weight in int8; and what else of it may be read."""
    hand = Hand()
    x = hand.input("x", "N", 8)
    weight = stored(hand, 6, 8)
    rows = hand.call(OPS["round_rows"].overload, hand.call(aten.silu.default, x), "fp8" if read == "fp8" else "int8")
    made = hand.call(aten.linear.default, rows, hand.weight("w", 6, 8) if read == "plain" else weight)
    if read == "a sum":
        made = hand.call(aten.add.Tensor, made, hand.call(aten.sum.dim_IntList, rows, [1], True))
    return hand.returns(logits=made)


@pytest.mark.parametrize("read", ["alone", "a sum", "plain", "fp8"])
def test_rows_are_taken_by_products_of_their_kind_alone(read: str) -> None:
    graph = by_rows(read)
    made = as_taken(graph)
    assert len(graph.find("round_rows")) == 1, "the graph itself stays"
    assert len(made.find("round_rows")) == (read != "alone")
    assert [is_taken(node) for node in made.find("dequantise_rows")] == [True] * (read == "alone")


def test_rows_are_rounded_where_they_are_gathered() -> None:
    hand = Hand()
    x, index = hand.input("x", "N", 8), hand.input("index", "K", dtype=torch.int64)
    rows = hand.call(OPS["round_rows"].overload, x, "int8")
    (some,) = hand.graph.parts(hand.call(OPS["compact"].overload, [rows], index), 1, "")
    weights = stored(hand, 6, 8), stored(hand, 4, 8)
    results = (hand.call(aten.linear.default, value, w) for value, w in zip((rows, some), weights, strict=True))
    graph = hand.returns(**dict(zip(("all", "some"), results, strict=True)))
    made = as_taken(graph)
    assert [is_taken(node) for node in made.find("dequantise_rows")] == [True, True]
    given = {"x": torch.randn((5, 8), generator=torch.Generator().manual_seed(1)), "index": torch.tensor([3, 0])}
    for name, value in interpret(graph, given).items():
        torch.testing.assert_close(interpret(made, given)[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_rounding_fuses_into_what_makes_the_rows(backend: str) -> None:
    graph = by_rows("alone")
    program = LoweredProgram(graph, RegionCompiler(backend), Buckets())
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


@pytest.mark.parametrize("recipe", ["focus", "dyllm", "dllm_serve", "maskkv"])
def test_every_product_of_a_recipe_takes_rounded_rows(recipe: str) -> None:
    (tiny,) = models(None, "sdar" if recipe != "focus" else "sdar_moe")
    made = tiny.quantised(QuantizeWeights("int8", activations=True, lm_head=True)).optimized(recipe)
    for phase, program in made.programs.items():
        rounded = program.graph.find("dequantise_rows")
        assert rounded, phase
        assert all(map(is_taken, rounded))
        assert program.graph.find("round_rows") == []


def test_less_lies_in_memory_by_rounded_rows() -> None:
    (tiny,) = models(None, "sdar")
    sizes = {"N": 64, "b": 8, "P": 4, "pages": 32, "page": tiny.optimized("dense").page_size}
    steps = QuantizeWeights("int8"), QuantizeWeights("int8", activations=True)
    peaks = [footprint(tiny.quantised(step).optimized("dense").programs["step"], sizes).peak for step in steps]
    assert peaks[1] <= peaks[0]


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


def gated_unit(read: str, dtype: torch.dtype = torch.float32) -> Graph:
    """silu(gate) * up of rounded rows, gate and up by one weight in int8; or something near it."""
    hand = Hand()
    x, counts = hand.input("x", "N", 8, dtype=dtype), hand.input("cu_rows", "b+1", dtype=torch.int32)
    plain = read in ("a weight as it is", "rows and a weight as they are")
    weight = hand.weight("w", 12, 8, dtype=dtype) if plain else stored(hand, 12, 8, dtype)
    rounded = read not in ("rows as they are", "rows and a weight as they are")
    rows = hand.call(OPS["round_rows"].overload, x, "int8") if rounded else x
    both = hand.call(aten.linear.default, rows, weight)
    gate, up = hand.graph.parts(hand.call(aten.split_with_sizes.default, both, [6, 6], 1), 2, "")
    made = hand.call(aten.mul.Tensor, hand.call(aten.silu.default, gate), up)
    results = {"logits": made, "counts": counts} | ({"gate": gate} if read == "the gate" else {})
    return hand.returns(**results)


@pytest.mark.parametrize(
    ("read", "dtype", "fused"),
    [
        ("alone", torch.float32, True),
        ("the gate", torch.float32, False),
        ("a weight as it is", torch.float32, False),
        ("rows as they are", torch.float32, False),
        ("rows and a weight as they are", torch.float32, False),
        ("rows and a weight as they are", torch.bfloat16, True),
        ("rows and a weight as they are", torch.float16, True),
        ("rows as they are", torch.bfloat16, True),
    ],
    ids=str,
)
def test_gate_and_up_are_one_call_of_rounded_rows_and_of_16_bits(read: str, dtype: torch.dtype, fused: bool) -> None:
    graph = gated_unit(read, dtype)
    assert as_taken(graph).find("rows_glu") == []
    made = as_taken(graph, on_gpu=True)
    assert len(made.find("rows_glu")) == fused
    given = {
        "x": torch.randn((5, 8), generator=torch.Generator().manual_seed(1)).to(dtype),
        "cu_rows": torch.tensor([0, 2, 4], dtype=torch.int32),
    }
    want, got = interpret(graph, given)["logits"], interpret(made, given)["logits"]
    torch.testing.assert_close(got[:4], want[:4])
    assert got[4].isnan().all() == fused, "a row that belongs to no sequence"


@pytest.mark.parametrize(
    ("family", "recipe"), [("llada", "fast_dllm"), ("llada", "dense"), ("sdar", "dense"), ("sdar", "focus")]
)
def test_a_gpu_multiplies_gate_and_up_in_one_call(family: str, recipe: str) -> None:
    """Each layer's that the recipe does not count itself; tokens are the same."""
    (tiny,) = models(None, family)
    made = tiny.quantised(QuantizeWeights("int8", activations=True)).optimized(recipe)
    graph = made.phases["step"].graph
    counted = len(graph.find("rows_glu"))
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets(), fused=True)
    assert len(program.graph.find("rows_glu")) == tiny.model.spec.layers
    assert counted < tiny.model.spec.layers
    want = made.generate(input_ids=[[5, 9, 4, 7]], max_new_tokens=16)
    made._session.programs["step"] = program
    assert made.generate(input_ids=[[5, 9, 4, 7]], max_new_tokens=16).token_ids == want.token_ids


@pytest.mark.parametrize(
    ("family", "recipe", "linear", "gated"),
    [("dream", "dyllm", 8, 4), ("llada", "dense", 3, 1), ("sdar", "focus", 0, 0)],
)
def test_a_gpu_rounds_no_more_rows_than_are_listed(family: str, recipe: str, linear: int, gated: int) -> None:
    """Where products count the rows that they take by a list; and so does a norm before that. Tokens are the same.

    Of four layers: salient rows of each (keys and values, feed-forward network); masked rows of the last; of an
    eviction that the host counts none.
    """
    (tiny,) = models(None, family)
    made = tiny.quantised(QuantizeWeights("fp8", activations=True)).optimized(recipe)
    graph = made.phases["step"].graph
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets(), fused=True)
    found = Counter[tuple[str, bool]]()
    for taken in program.graph.find("dequantise_rows"):
        rounded = args_of(args_of(taken)[0])[0]
        for reader in taken.users if op_name(rounded.target) == "dgraph.rows_quantise" else ():
            x, _, count = args_of(rounded)
            normed = op_name(x.target) == "dgraph.rows_norm"
            assert args_of(reader)[3] is count
            assert not normed or args_of(x)[3] is count
            found[op_name(reader.target), normed] += 1
    assert found == Counter({("dgraph.rows_linear", False): linear, ("dgraph.rows_glu", True): gated})
    want = made.generate(input_ids=[[5, 9, 4, 7]], max_new_tokens=16)
    made._session.programs["step"] = program
    assert made.generate(input_ids=[[5, 9, 4, 7]], max_new_tokens=16).token_ids == want.token_ids
