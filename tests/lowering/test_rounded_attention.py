"""Attention that rounds what it gives: where that may be, that programs give the same, and what they allocate."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.compiler.phases import lowering_passes, rewrite
from dgraph.engine.memory.dummy_step import DummyStep
from dgraph.engine.memory.measure import measure
from dgraph.errors import InputError
from dgraph.families.quantised import ROW_KINDS, quantised_rows
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.footprint import footprint
from dgraph.lowering.peephole import Attend, Fusion, attentions_of
from dgraph.lowering.schedule import Call, Region, schedule
from dgraph.ops import OPS
from dgraph.ops.registry import Op
from dgraph.passes import QuantizeWeights
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import FixedSteps
from dgraph.testing import TinyModel, models
from tests.amounts import every_value
from tests.lowering.test_executor import lower
from tests.tiny import Hand, interpret

aten = torch.ops.aten


@functools.cache
def model(family: str, kind: str) -> TinyModel:
    """A model of four layers whose linear layers take rows in 8 bits."""
    (tiny,) = models(None, family)
    return tiny.quantised(QuantizeWeights(kind, activations=True))


def phases_on_gpu(made: CompiledModel) -> dict[str, Graph]:
    """The phases of a model as a GPU runs them."""
    phases = rewrite(made.captured, made.recipe, lowering_passes((8, 9)))
    return {name: phase.graph for name, phase in phases.items()}


# -- where ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize(
    ("family", "recipe", "options", "op", "rotated", "layers"),
    [
        # The last layer's rows are the masked ones, which are gathered from what attention gives, and counted.
        ("llada", "dense", {}, "paged_attention", True, [0, 1, 2]),
        ("llada2", "dense", {}, "paged_attention", False, [0, 1, 2, 3]),
        ("llada2", "focus", {}, "paged_attention", False, [0, 1, 2, 3]),
        ("llada", "dllm_serve", {}, "sparse_attention", False, [0, 1, 2, 3]),
        ("llada", "dyllm", {}, "partial_attention", False, []),
    ],
)
def test_layers_whose_attention_rounds(
    family: str, recipe: str, options: dict[str, Any], op: str, rotated: bool, layers: list[int], kind: str
) -> None:
    graph = phases_on_gpu(model(family, kind).optimized(recipe, **options))["step"]
    assert graph.find(op)
    steps = [step for stage in schedule(graph, fused=True) for step in stage.steps]
    found = [step for step in steps if isinstance(step, Fusion) and isinstance(step.function, Attend)]
    assert [step.made.meta["layer"] for step in found] == layers
    assert all(step.function == Attend(OPS[op], rotated, kind) for step in found)
    left = [node for step in steps if isinstance(step, Region) for node in step.nodes]
    regions = [node for node in left if node.target is OPS["quantise_rows"].overload]
    assert not {node.meta["layer"] for node in regions if node.args[0].target is aten.reshape.default} & set(layers)
    assert {node for step in found for node in step.nodes}.isdisjoint(left)


def test_a_cpu_rounds_in_the_region_after() -> None:
    graph = model("llada", "int8").optimized("dense").graph("step")
    assert all(isinstance(step, (Region, Call)) for stage in schedule(graph) for step in stage.steps)


def attending(change: str = "", dtype: torch.dtype = torch.float32) -> Graph:
    """Rows that attend to a cache and are rounded, and what of it may be otherwise."""
    hand = Hand()
    q, *caches = (hand.input(name, *shape, dtype=dtype) for name, shape in SHAPES.items())
    table, cu_rows = hand.input("table", 1, 3, dtype=torch.int32), hand.input("cu_rows", 2, dtype=torch.int32)
    limit, where = hand.input("limit", "N", dtype=torch.int32), hand.input("where", "N", dtype=torch.int64)
    more: dict[str, Node] = {}
    heads = hand.call(OPS["paged_attention"].overload, q, *caches, table, cu_rows, limit, 0.5)
    if change == "heads read":
        more["heads"] = hand.call(aten.neg.default, heads)
    if change == "heads returned":
        more["heads"] = heads
    if change == "between":
        heads = hand.call(aten.neg.default, heads)
    rows = hand.call(aten.reshape.default, heads, [-1, 4 if change == "halves of rows" else 8])
    if change == "rows read":
        more["rows"] = hand.call(aten.neg.default, rows)
    if change == "keys written":
        hand.call(OPS["kv_write"].overload, q, q, *caches, where, table, cu_rows)
    if change == "cut":
        keep = hand.call(aten.gt.Scalar, limit, 3)
        kept = hand.call(OPS["keep_index"].overload, keep, cu_rows, 3)
        more["kept"] = hand.call(operator.getitem, kept, 0)
    rounded = hand.call(OPS["quantise_rows"].overload, rows, "int8")
    values, scales = (hand.call(operator.getitem, rounded, part) for part in range(2))
    return hand.returns(values=values, scales=scales, **more)


SHAPES: dict[str, tuple[int | str, ...]] = {"q": ("N", 2, 4), "k": (3, 4, 2, 4), "v": (3, 4, 2, 4)}


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: [5 if size == "N" else int(size) for size in shape] for name, shape in SHAPES.items()}
    return {
        **{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        "table": torch.tensor([[2, 0, 1]], dtype=torch.int32),
        "cu_rows": torch.tensor([0, 5], dtype=torch.int32),
        "limit": torch.tensor([12, 7, 1, 0, 9], dtype=torch.int32),
        "where": torch.arange(5),
    }


def test_it_gives_numbers_and_scales() -> None:
    graph = attending()
    (step,) = attentions_of(graph).values()
    assert step.function == Attend(OPS["paged_attention"], kind="int8")
    assert [part for part, _ in step.results] == [0, 1]
    want = interpret(graph, inputs())
    found = lower(graph, fused=True)(inputs(), 5).outputs
    assert want["values"].dtype == torch.int8
    for name, value in want.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "change", ["heads read", "heads returned", "between", "halves of rows", "rows read", "keys written"]
)
def test_not_where_something_comes_between(change: str) -> None:
    graph = attending(change)
    assert not attentions_of(graph)
    want = interpret(graph, inputs())
    found = lower(graph, fused=True)(inputs(), 5).outputs
    for name, value in want.items():
        assert torch.equal(found[name], value), name


def test_not_in_float64_which_no_kernel_takes() -> None:
    assert not attentions_of(attending(dtype=torch.float64))


def test_not_where_the_program_is_cut_between() -> None:
    assert not attentions_of(attending("cut"))


def test_an_op_without_a_kernel_cannot_say_so() -> None:
    op = OPS["rope"]
    with pytest.raises(InputError, match="op rope: rounds is said of its kernel, and it has none"):
        Op(op.name, op.overload, op.reference, op.samples, op.contract, rounds=True)


# -- what it gives -------------------------------------------------------------------------------------------------


@every_value(
    ("kind", ROW_KINDS), ("family, recipe", [("llada", "dense"), ("llada2", "focus"), ("dream", "dllm_serve")])
)
def test_a_generation_is_the_same(family: str, recipe: str, kind: str) -> None:
    made = model(family, kind).optimized(recipe)
    found = []
    plain = {name: phase.graph for name, phase in made.phases.items()}
    for fused, graphs in ((False, plain), (True, phases_on_gpu(made))):
        programs = {name: lower(graph, fused=fused) for name, graph in graphs.items()}
        session = BlockSession(made.spec, programs, plan=made.recipe.plan, kv=made.recipe.kv)
        prompts = [[1, 2, 3, 4, 5], [7, 8]]
        found.append(session.generate(prompts, max_new_tokens=24, block_length=8, policy=FixedSteps(4)))
    assert found[0].token_ids == found[1].token_ids


def test_footprints_count_what_attention_gives_and_what_it_rounds() -> None:
    made = model("llada", "int8").optimized("dense")
    program = LoweredProgram(phases_on_gpu(made)["step"], made.compiler, Buckets(), fused=True)
    step = DummyStep(256, 32, 96, made.page_size)  # attention takes more than the int32 sums of products
    seen = measure(program, step)
    assert seen is not None
    assert footprint(program, step.sizes).peak == pytest.approx(seen.peak, rel=0.05)


def test_explained_by_all_that_runs_as_one() -> None:
    from dgraph.text.explain import _calls

    (stage,) = schedule(phases_on_gpu(model("llada", "fp8").optimized("dense"))["step"], fused=True)
    assert _calls(stage)["dgraph.rope + dgraph.paged_attention + dgraph.quantise_rows"] == 3


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_off_a_gpu_it_is_the_composition(kind: str) -> None:
    args = OPS["paged_attention"].samples(torch.Generator().manual_seed(0))
    for sample in args:
        values, scales = Attend(OPS["paged_attention"], kind=kind)(*sample.args)
        want = quantised_rows(OPS["paged_attention"].reference(*sample.args).flatten(1), kind)
        assert torch.equal(values.float(), want[0].float())
        assert torch.equal(scales, want[1])
