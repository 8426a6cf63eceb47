"""Values of a lowered program by node of its graph, as far as they exist between its instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.instructions import Instruction, instead, single
from dgraph.lowering.peephole import Fusion
from dgraph.lowering.program import ProgramResult
from dgraph.lowering.schedule import Call, Region
from dgraph.types.nodes import args_of

Note = Callable[[Node, Any], None]


def watch(program: LoweredProgram, inputs: Mapping[str, Tensor], rows: int) -> tuple[ProgramResult, dict[Node, Any]]:
    """Run a program on `rows` live rows, and keep the values that its instructions make.

    The instructions run one by one, without CUDA graphs. A region that runs op by op gives the value of every node. A
    compiled one gives those that something outside reads. Padding rows are cut off.

    Returns:
        The result, and the values by node; several results of a call are a tuple.
    """
    everything = [*single(each for stage in program.lowered for each in (*stage.bridge, *stage.instructions))]
    overwritten = any(isinstance(each.origin, Fusion) for each in everything)  # one may add to a value in its place
    pieces: dict[Node, list[Any]] = {}

    def note(node: Node, value: Any) -> None:
        copied = value.clone() if overwritten and isinstance(value, Tensor) else value
        pieces.setdefault(node, []).append(copied)

    cuts = {stage.live: lowered.cut for stage, lowered in zip(program.lowered, program.stages, strict=True)}

    def function_of(instruction: Instruction) -> Callable[..., Any]:
        if instruction.origin is None:  # it lists the rows that live on
            cut = cuts[instruction.targets[1][1]]
            assert cut is not None
            return partial(_noted_call, instruction.function, cut, note)
        if isinstance(instruction.origin, Region):
            return partial(_noted_region, instruction.function, instruction.origin, note)
        return partial(_noted_call, instruction.function, instruction.origin, note)

    with program.one_by_one(), instead(everything, function_of):
        result = program(inputs, rows)
    live = _Live(program, result)
    return result, {node: live.part(node.meta["val"], _whole(parts)) for node, parts in pieces.items()}


def _noted_call(function: Callable[..., Any], call: Call | Fusion, note: Note, *args: Any) -> Any:
    """Run a call, or a call that absorbs others, and note its results."""
    result = function(*args)
    note(call.node if isinstance(call, Call) else call.made, result)
    for part, node in call.results:
        if part is not None:
            note(node, result[part])
    return result


def _noted_region(function: Callable[..., Any], region: Region, note: Note, *args: Any) -> Any:
    """Run a region, and note every node where it runs op by op, else its outputs."""
    module = getattr(function, "__self__", None)
    if isinstance(module, GraphModule):
        return _Noting(module, region, note).run(*args)
    results = function(*args)
    for node, value in zip(region.outputs, results, strict=True):
        note(node, value)
    return results


class _Noting(torch.fx.Interpreter):
    """Run the module of a region node by node."""

    def __init__(self, module: GraphModule, region: Region, note: Note):
        super().__init__(module, garbage_collect_values=True)
        calls = (node for node in module.graph.nodes if node.op == "call_function")
        self._stands_for = dict(zip(calls, region.nodes, strict=True))
        self._note = note

    def run_node(self, n: Node) -> Any:
        """Run a node, and note its value under the node of the graph that it stands for."""
        value = super().run_node(n)
        if n in self._stands_for:
            self._note(self._stands_for[n], value)
        return value


def _whole(parts: Sequence[Any]) -> Any:
    """A value of which each chunk of rows made a part."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if isinstance(parts[0], Tensor) else tuple(map(_whole, zip(*parts, strict=True)))


class _Live:
    """Live rows of the values of a run."""

    def __init__(self, program: LoweredProgram, result: ProgramResult):
        self._graph = program.graph
        self._rows = {stage.rows: rows for stage, rows in zip(program.stages, result.rows, strict=True)}

    def _of(self, rows: str) -> int:
        """Number of rows of a set; if the device counts them, that of the set that they are listed from."""
        if rows not in self._rows:
            self._rows[rows] = self._of(str(self._graph.row_set(args_of(self._graph.cut_of(rows))[0])))
        return self._rows[rows]

    def part(self, type_: Any, value: Any) -> Any:
        """A value of that type without rows of padding."""
        if isinstance(value, (tuple, list)):
            return tuple(self.part(*each) for each in zip(type_, value, strict=True))
        rows = self._graph.symbols.row_set(type_)
        return value if rows is None else value[: self._of(rows)]
