"""Ways in which lowering runs a graph, one stage of it after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.fx import Node

from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.instructions import Instruction, instead
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import Call, Region
from dgraph.lowering.stage import run_in_order
from dgraph.lowering.watch import watch
from dgraph.numerics.run import Run
from dgraph.runtime.graphs.pool import GraphPool


class Lowered:
    """A way to run graphs (`dgraph.numerics.small_runs.Way`): as lowered programs.

    Args:
        compiler: makes the regions.
        kernels: True if calls run by their kernels, and absorb others as on their device; False: by the references.
        pool: records stages as CUDA graphs; None runs them one instruction after the other.
    """

    def __init__(self, compiler: RegionCompiler, kernels: bool, pool: GraphPool | None = None):
        self._compiler, self._kernels, self._pool = compiler, kernels, pool
        self._programs: dict[Graph, LoweredProgram] = {}

    def __call__(self, graph: Graph, inputs: Mapping[str, Tensor], keep: bool = False) -> Run:
        """Run a graph; see `dgraph.numerics.run`. The values are those between instructions."""
        program = self.program(graph)
        rows = next(len(inputs[name]) for name, spec in graph.inputs.items() if spec.per == "row")
        if self._pool is None:
            with self._references(program):
                return Run(graph, inputs, watch(program, inputs, rows)[1])
        # Values within a recording do not outlive it, so they are those of a run without it, on caches of its own.
        caches = [name for name, spec in graph.inputs.items() if spec.in_place]
        before = {name: inputs[name].clone() for name in caches}
        values = watch(program, {**inputs, **before}, rows)[1]
        before = {name: inputs[name].clone() for name in caches}
        program(inputs, rows)  # a first call may run what it records
        for name in caches:
            inputs[name].copy_(before[name])
        outputs = program(inputs, rows).outputs
        for name, node in graph.results().items():
            known = values[node]
            values[node] = (outputs[name][: len(known)] if graph.row_set(node) else outputs[name]).clone()
        return Run(graph, inputs, values)

    def program(self, graph: Graph) -> LoweredProgram:
        """The lowered program of a graph, made on first use."""
        if graph not in self._programs:
            runner = run_in_order if self._pool is None else self._pool.runner
            buckets, fused = Buckets.default(graph.device), None if self._kernels else False
            self._programs[graph] = LoweredProgram(graph, self._compiler, buckets, runner, fused=fused)
        return self._programs[graph]

    def run_with(self, graph: Graph, node: Node) -> tuple[Node, ...]:
        """The nodes that run as one with a node: those of its region, or of its call."""
        for step in (step for stage in self.program(graph).stages for step in stage.steps):
            nodes = (step.node,) if isinstance(step, Call) else step.nodes
            if node in nodes or (not isinstance(step, Region) and node in {result for _, result in step.results}):
                return nodes
        return (node,)

    @contextmanager
    def _references(self, program: LoweredProgram) -> Iterator[None]:
        """Context in which calls run by the references of their ops, unless kernels are asked for."""

        def reference(instruction: Instruction) -> Callable[..., Any]:
            assert instruction.op is not None
            return instruction.op.reference

        with instead(() if self._kernels else program.calls(), reference):
            yield
