"""Runs of graphs op by op, and the first node at which two of them part."""

from __future__ import annotations

import pytest
import torch

from dgraph.errors import InputError
from dgraph.ir.graph import Graph
from dgraph.numerics import State, first_parting, run, small_steps
from dgraph.numerics.parting import aligned, check_tolerance, difference, distance, in_one_dtype
from dgraph.passes import CacheKV, EvictTokens, FuseProjections, PackRows
from dgraph.passes.base import Pass
from dgraph.testing import models
from dgraph.types.nodes import op_name
from tests.numerics.wrong import Scale, gate_of
from tests.tiny import interpret, rewritten


def first_step(graph: Graph) -> dict[str, torch.Tensor]:
    step = small_steps(graph.spec)[0]
    inputs = State().inputs(graph, step)
    assert inputs is not None
    return inputs


def parted(graph: Graph, step: Pass, tolerance: float | None = 0.0) -> str:
    after = rewritten(graph, step)
    runs = (run(each, first_step(each), keep=True) for each in (graph, after))
    return str(first_parting(*runs, tolerance))


def test_a_run_gives_what_the_interpreter_gives(cached: Graph) -> None:
    made = run(cached, first_step(cached))
    want = interpret(cached, first_step(cached))
    for name, node in cached.results().items():
        assert torch.equal(made.values[node], want[name]), name
    assert len(made.values) == len(cached.outputs), "all else was freed"


def test_a_run_keeps_what_depends_on_inputs(packed: Graph) -> None:
    made = run(packed, first_step(packed), keep=True)
    assert set(packed.calls) <= set(made.values)
    assert not set(packed.weight_nodes().values()) & set(made.values)


def test_two_runs_of_one_graph_do_not_part(packed: Graph) -> None:
    a, b = (run(packed, first_step(packed), keep=True) for _ in range(2))
    assert first_parting(a, b) is None


def test_the_first_node_that_parts_is_named(packed: Graph) -> None:
    after = rewritten(packed, Scale(2.0))
    runs = [run(each, first_step(each), keep=True) for each in (packed, after)]
    found = first_parting(*runs)
    assert found is not None
    (scaled,) = found.reads
    assert found.layer == 2
    assert op_name(found.node.target) == "mul"
    assert scaled.args == (gate_of(after, 2), 2.0)
    assert found.difference.scale > 0


def test_parting_within_a_tolerance_is_none(packed: Graph) -> None:
    assert parted(packed, Scale(1 + 1e-6), tolerance=1e-4) == "None"
    assert parted(packed, FuseProjections(), tolerance=None) == "None"
    assert parted(packed, Scale(1.1), tolerance=None).startswith("layer 2 (mlp), node ")


def test_a_padded_batch_and_packed_rows_are_compared(captured: Graph) -> None:
    assert parted(captured, PackRows()) == "None"


def test_rows_that_are_left_out_are_not_compared(cached: Graph) -> None:
    """Eviction as published: rows of the last block leave after layer 1."""
    after = rewritten(cached, EvictTokens(keep=1))
    runs = [run(each, first_step(each), keep=True) for each in (cached, after)]
    kept = runs[1].numbers(after.result("logits"))
    assert kept is not None
    assert 0 < len(kept) < len(first_step(cached)["positions"])
    assert torch.equal(kept, runs[1].values[after.result("kept")])
    found = first_parting(*runs, tolerance=None)
    assert found is None or (found.layer or 0) >= 1


def test_rows_that_are_listed_within_their_row_set_have_numbers() -> None:
    """A gate lists the rows that it runs: they move to the front, and padding follows."""
    (llada,) = models(None, "llada")
    graph = llada.optimized("dyllm").graph()
    made, state = None, State()
    for step in small_steps(graph.spec):
        inputs = state.inputs(graph, step)
        assert inputs is not None
        made = run(graph, inputs, keep=True)
        state.take(graph, {name: made.values[node] for name, node in graph.results().items()})
    assert made is not None
    listed = [node for node in graph.find("rows_linear") if graph.row_set(node) == "N"]
    assert listed
    for node in listed:
        numbers, count = made.numbers(node), made.orders.of[node]
        assert numbers is not None
        live = numbers[numbers >= 0]
        assert torch.equal(live, live.unique()), "ascending, each once"
        assert "listed by" in count
    assert made.numbers(graph.find("linear", 0)[0]) is None, "all rows in their order"


def test_values_are_aligned_by_the_numbers_of_their_rows() -> None:
    a, b = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([31.0, 11.0, 0.0])
    got = aligned(a, b, None, torch.tensor([2, 0, -1]))
    assert [value.tolist() for value in got] == [[10.0, 30.0], [11.0, 31.0]]
    assert aligned(a, b, None, None) == (a, b)


def test_a_difference_says_how_far() -> None:
    a = torch.tensor([1.0, torch.nan, -torch.inf, 4.0])
    assert difference((a, a.clone()), 0.0) is None
    found = difference((a, a + torch.tensor([0.0, 0.0, 0.0, 0.5])), 0.0)
    assert str(found) == "1 of 4 elements differ, by up to 0.5, of magnitudes up to 4"
    assert difference((a, a + torch.tensor([0.0, 0.0, 0.0, 3e-5])), None) is None
    assert difference((a, a[:3]), None) is not None
    ids = torch.tensor([3, 4])
    assert str(difference((ids, ids + 1), None)) == "2 of 2 elements differ, by up to 1"
    gone = difference((a, torch.tensor([1.0, 2.0, -torch.inf, 4.0])), None)
    assert gone is not None
    assert gone.most == torch.inf


def test_a_distance_has_a_share_and_a_cosine() -> None:
    a = torch.tensor([3.0, 4.0])
    found = distance((a, torch.tensor([4.0, 4.0])), 0.0)
    assert (found.most, found.scale, found.share, found.parts) == (1.0, 4.0, 0.25, True)
    assert found.cosine == pytest.approx(28 / (5 * 32**0.5))
    assert distance((a, a), 0.0).cosine == 1.0
    assert not distance((a, a + 0.01), None, {torch.bfloat16}).parts
    assert distance((a * 1e-3, a * 2e-3), None, {torch.bfloat16}).parts
    assert not distance((a * 1e-3, a * 2e-3), None, {torch.bfloat16}, least=1.0).parts
    coarse = in_one_dtype((a, a.bfloat16()))
    assert {value.dtype for value in coarse} == {torch.bfloat16}
    with pytest.raises(InputError, match="tolerance must be a share"):
        check_tolerance(-1.0)


def test_the_steps_go_on_from_each_other(packed: Graph) -> None:
    first, second, last = small_steps(packed.spec)
    cached = rewritten(packed, CacheKV())
    state = State()
    for step in (first, second, last):
        inputs = state.inputs(cached, step)
        assert inputs is not None
        state.take(cached, {})
    assert inputs["k_cache_0"] is state.kept["k_cache_0"]
    assert [len(step.values["input_ids"]) for step in (first, second, last)] == [32, 32, 16]
    decoded = first.values["masked"] & ~second.values["masked"]
    assert torch.equal(decoded, first.values["masked"] & second.values["changed"])
    assert decoded.any()
    assert State().inputs(packed, last) is None, "without a cache it needs all rows"
