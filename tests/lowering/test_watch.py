"""Values of lowered programs by node are those that the references give."""

from __future__ import annotations

import pytest
import torch

from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.watch import watch
from dgraph.numerics import State, first_parting, run, small_steps
from dgraph.numerics.run import Run, fed_nodes
from dgraph.testing import models

LLADA, SDAR = models(None, "llada", "sdar")
GRAPHS = [
    ("focus", SDAR, {"full_steps": 0}),
    ("dyllm", LLADA, {}),
    ("focus", SDAR, {"count": "device", "full_steps": 0}),
]


@pytest.mark.parametrize(("recipe", "tiny", "options"), GRAPHS, ids=str)
@pytest.mark.parametrize("buckets", ["exact", [64]], ids=str)
def test_every_value_is_that_of_the_references(
    recipe: str, tiny: object, options: dict[str, object], buckets: object
) -> None:
    graph: Graph = tiny.optimized(recipe, **options).graph()  # type: ignore[attr-defined]
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets.of(buckets), chunk_rows=12)  # type: ignore[arg-type]
    states = State(), State()
    for step in small_steps(graph.spec):
        given = [state.inputs(graph, step) for state in states]
        assert given[0] is not None
        assert given[1] is not None
        plain = run(graph, given[0], keep=True)
        with torch.no_grad():
            _, values = watch(program, given[1], len(step.values["positions"]))
        watched = Run(graph, given[1], values)
        assert str(first_parting(plain, watched, None)) == "None"
        assert set(graph.results().values()) <= values.keys()
        assert len(fed_nodes(graph) & values.keys()) > len(graph.calls) * 0.8
        for node in graph.results().values():
            numbers = plain.numbers(node), watched.numbers(node)
            assert numbers[0] is None or torch.equal(*numbers)  # type: ignore[arg-type]
        for state, made in zip(states, (plain, watched), strict=True):
            state.take(graph, {name: made.values[node] for name, node in graph.results().items()})


def test_a_program_runs_as_before_after_it_was_watched() -> None:
    graph = SDAR.optimized("dense").graph()
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets())
    functions = [each.function for each in program.calls()]
    inputs = State().inputs(graph, small_steps(graph.spec)[0])
    assert inputs is not None
    result, values = watch(program, inputs, 32)
    assert [each.function for each in program.calls()] == functions
    again = program(inputs, 32)
    assert all(torch.equal(value, again.outputs[name]) for name, value in result.outputs.items())
    assert torch.equal(values[graph.result("confidence")], again.outputs["confidence"])
