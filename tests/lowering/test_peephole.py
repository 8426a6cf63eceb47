"""What calls take along on a GPU: where that may be, and that programs give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.lowering.peephole import Attend, Fusion, add_product, attentions_of, fusions_of, sums_of
from dgraph.lowering.schedule import Call, Region, schedule
from dgraph.ops import OPS
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import FixedSteps
from tests.lowering.test_executor import ROWS, lower
from tests.passes.scene import Scene
from tests.recipes.bidirectional import Setup, prompts_for, setup_of
from tests.runtime.recorder import Recorder
from tests.tiny import Hand, interpret

aten = torch.ops.aten
WIDTH = 8
BOTH, OUT = [0, 0, 1, 1], [0, 1, 2]
RECIPES: list[tuple[str, dict[str, Any], list[int]]] = [
    ("dense", {}, BOTH),
    ("fast_dllm", {}, BOTH),
    ("dyllm", {"gate": False}, [*BOTH, 2, 2]),
    ("focus", {}, [0, 0, 1]),  # after the eviction, the stream is what was gathered of it
    ("dyllm", {}, OUT),
    ("dllm_cache", {}, [0, 0]),  # the other layers add what they reuse
    ("maskkv", {"pairs": 6}, [0, 0]),
]
"""With the layer of each sum in place of a step. A last layer on masked rows gathers its stream, too."""


@pytest.fixture(scope="module")
def llada() -> Setup:
    return setup_of("llada")


# -- where -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "options", "layers"), RECIPES)
def test_sums_of_a_step(llada: Setup, recipe: str, options: dict[str, Any], layers: list[int]) -> None:
    found = sums_of(llada.optimized(recipe, 16, **options).graph("step"))
    assert [total.meta["layer"] for total in found] == layers
    assert all(node is known.made for node, known in found.items())


@pytest.mark.parametrize(("recipe", "options", "layers"), RECIPES)
def test_nothing_reads_a_stream_after_its_sum(
    llada: Setup, recipe: str, options: dict[str, Any], layers: list[int]
) -> None:
    for phase in llada.optimized(recipe, 16, **options).phases.values():
        there = {n for n in phase.graph.nodes if n.op == "placeholder"}
        gone: set[Node] = set()
        for stage in schedule(phase.graph, fused=True):
            for step in (*stage.steps, *([stage.cut] if stage.cut else [])):
                read = set(step.node.all_input_nodes if isinstance(step, Call) else step.inputs)
                assert read <= there, "a value is there when it is read"
                assert not read & gone
                if isinstance(step, Fusion):
                    gone.update([step.args[0]] if step.function is add_product else [])
                    there.update(node for _, node in step.results)
                else:
                    there.update(step.outputs if isinstance(step, Region) else (n for _, n in step.results))


def test_a_cpu_fuses_the_sum_instead(dense: dict[str, Graph]) -> None:
    assert sums_of(dense["step"])
    assert all(isinstance(step, (Region, Call)) for stage in schedule(dense["step"]) for step in stage.steps)


def block(change: Callable[[Hand, Node, Node], dict[str, Node]]) -> Graph:
    """A stream and a layer that reads it; `change` adds the layer's result and says what is returned."""
    hand = Hand()
    h, w = hand.input("h", "N", WIDTH), hand.weight("w", WIDTH, WIDTH)
    stream = hand.call(aten.add.Tensor, h, h)
    return hand.returns(**change(hand, stream, hand.call(aten.linear.default, hand.call(aten.relu.default, stream), w)))


def plain(hand: Hand, stream: Node, result: Node) -> dict[str, Node]:
    return {"y": hand.call(aten.neg.default, hand.call(aten.add.Tensor, stream, result))}


def turned(hand: Hand, stream: Node, result: Node) -> dict[str, Node]:
    return {"y": hand.call(aten.neg.default, hand.call(aten.add.Tensor, result, stream))}


@pytest.mark.parametrize("change", [plain, turned])
def test_a_plain_sum_is_in_place(change: Callable[[Hand, Node, Node], dict[str, Node]]) -> None:
    graph = block(change)
    assert len(sums_of(graph)) == 1
    h = torch.randn(5, WIDTH)
    got = lower(graph, fused=True)({"h": h.clone()}, 5).outputs["y"]
    torch.testing.assert_close(got, interpret(graph, {"h": h})["y"])


def read_later(hand: Hand, stream: Node, result: Node) -> dict[str, Node]:
    total = hand.call(aten.add.Tensor, stream, result)
    return {"y": hand.call(aten.mul.Tensor, total, stream)}


def returned(hand: Hand, stream: Node, result: Node) -> dict[str, Node]:
    return plain(hand, stream, result) | {"stream": stream}


def viewed(hand: Hand, stream: Node, result: Node) -> dict[str, Node]:
    """The view is read before the sum and after it."""
    view = hand.call(aten.slice.Tensor, stream, 1, 0, 4)
    x = hand.call(aten.cat.default, [view, view], 1)
    inner = hand.call(aten.linear.default, x, hand.weight("v", WIDTH, WIDTH))
    total = hand.call(aten.add.Tensor, stream, inner)
    return {"y": hand.call(aten.neg.default, total), "view": view, "z": result}


def read_twice(hand: Hand, stream: Node, result: Node) -> dict[str, Node]:
    return plain(hand, stream, result) | {"result": result}


def scaled(hand: Hand, stream: Node, result: Node) -> dict[str, Node]:
    return {"y": hand.call(aten.neg.default, hand.call(aten.add.Tensor, stream, result, alpha=2))}


def from_outside(hand: Hand, stream: Node, result: Node) -> dict[str, Node]:
    """The caller's tensor is not overwritten."""
    return plain(hand, hand.graph.input("h"), result)


def rounded(hand: Hand, stream: Node, result: Node) -> dict[str, Node]:
    """A stream of another dtype cannot hold the sum."""
    stream = hand.call(aten.add.Tensor, hand.input("g", "N", WIDTH, dtype=torch.bfloat16), 1)
    return plain(hand, stream, result)


@pytest.mark.parametrize("change", [read_later, returned, viewed, read_twice, scaled, from_outside, rounded])
def test_not_where_the_stream_or_the_product_is_needed(change: Callable[[Hand, Node, Node], dict[str, Node]]) -> None:
    assert not sums_of(block(change))


def test_not_where_a_stream_is_wider_than_the_product() -> None:
    """Torch adds products to what is of their dtype."""
    hand = Hand()
    h, w = hand.input("h", "N", WIDTH), hand.weight("w", WIDTH, WIDTH, dtype=torch.bfloat16)
    stream = hand.call(aten.add.Tensor, h, h)
    x = hand.call(aten.to.dtype, hand.call(aten.relu.default, stream), torch.bfloat16)
    graph = hand.returns(**plain(hand, stream, hand.call(aten.linear.default, x, w)))
    assert not sums_of(graph)
    value = torch.randn(5, WIDTH)
    got = lower(graph, fused=True)({"h": value.clone()}, 5).outputs["y"]
    torch.testing.assert_close(got, interpret(graph, {"h": value})["y"])


@pytest.mark.parametrize("biased", [False, True])
def test_not_with_a_bias_nor_where_the_stream_is_multiplied_itself(biased: bool) -> None:
    hand = Hand()
    h, w = hand.input("h", "N", WIDTH), hand.weight("w", WIDTH, WIDTH)
    stream = hand.call(aten.add.Tensor, h, h)
    x = hand.call(aten.relu.default, stream) if biased else stream
    bias = [hand.weight("b", WIDTH)] if biased else []
    graph = hand.returns(**plain(hand, stream, hand.call(aten.linear.default, x, w, *bias)))
    assert not sums_of(graph)


@pytest.mark.parametrize(
    ("family", "recipe", "count"),
    [
        ("llada", "dense", 2),  # on masked rows, BoundRows has bounded the rotation of the last layer
        ("dream", "dense", 2),
        ("llada", "dyllm", 0),
        ("llada", "focus", 0),  # importance reads the queries of the other layers
    ],
)
def test_attention_rotates_what_a_linear_layer_gives(family: str, recipe: str, count: int) -> None:
    """DyLLM's partial attention does not; without its update it is the usual one."""
    setup = setup_of(family)
    graph = setup.optimized(recipe, 16).graph("step")
    assert len(attentions_of(graph)) == count
    if recipe == "dyllm":
        assert len(attentions_of(setup.optimized(recipe, 16, update=False).graph("step"))) == 2


def test_not_after_a_norm_of_heads(dense: dict[str, Graph]) -> None:
    """The norm is a pass over the queries anyway, and the rotation is part of it."""
    assert dense["step"].find("paged_attention")
    assert not attentions_of(dense["step"])


def test_not_where_something_else_reads_the_rotated_queries(llada: Setup) -> None:
    graph = llada.optimized("dense", 16).graph("step").copy()
    attention = graph.find("paged_attention")[0]
    turned = attention.args[0]
    assert attention in attentions_of(graph)
    graph.call(aten.neg.default, (turned,), before=attention.next, by="", like=attention)
    assert attention not in attentions_of(graph)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("recipe", ["dense", "focus", "fast_dllm", "dyllm"])
def test_a_generation_is_the_same(family: str, recipe: str) -> None:
    options = {"update": False} if recipe == "dyllm" else {}
    made = setup_of(family).optimized(recipe, 16, **options)
    found = []
    for fused in (False, True):
        programs = {name: lower(phase.graph, fused=fused) for name, phase in made.phases.items()}
        session = BlockSession(made.spec, programs, plan=made.recipe.plan)
        asked = {"max_new_tokens": 37, "block_length": 16, "policy": FixedSteps(8)}
        found.append(session.generate(prompts_for(16), **asked))
        taken = [s.function for stage in programs["step"].stages for s in stage.steps if isinstance(s, Fusion)]
        assert (add_product in taken) == fused
        # Of focus's three layers, importance reads the queries of two, and the last is on masked rows.
        assert (Attend(OPS["paged_attention"], rotated=True) in taken) == (fused and recipe != "focus")
        assert bool(fusions_of(made.phases["step"].graph))
    assert found[0].token_ids == found[1].token_ids


# -- what it gives -----------------------------------------------------------------------------------------------


def test_it_is_rounded_once() -> None:
    stream, x, w = (torch.randn(7, 7, dtype=torch.float64) for _ in range(3))
    want = stream + x @ w.t()
    held = stream.data_ptr()
    got = add_product(stream, x, w)
    torch.testing.assert_close(got, want)
    assert got.data_ptr() == held == stream.data_ptr()


@pytest.mark.parametrize("chunk_rows", [None, 5])
@pytest.mark.parametrize("phase", ["step", "prefill"])
@pytest.mark.parametrize("recipe", ["dense", "focus"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_program_gives_what_its_graph_does(
    request: pytest.FixtureRequest, step: Scene, recipe: str, phase: str, chunk_rows: int | None, graphs: bool
) -> None:
    graph: Graph = request.getfixturevalue(recipe)[phase]
    runner = {"runner": GraphPool(recorder=Recorder).runner} if graphs else {}
    program = lower(graph, fused=True, chunk_rows=chunk_rows, **runner)
    theirs = step.copy().inputs
    expected = interpret(graph, theirs)
    for _ in range(3):  # captured, then replayed: what is added up must not stay from run to run
        mine = step.copy().inputs
        found = program(mine, ROWS)
        for name, value in expected.items():
            torch.testing.assert_close(found.outputs[name], value, atol=1e-5, rtol=1e-4)
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=1e-4, equal_nan=True)
