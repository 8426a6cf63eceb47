"""Lowered programs: the instructions of each stage, run over numbered registers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import InputError, LoweringError
from dgraph.ir.graph import Graph
from dgraph.ir.quantised_operands import arguments_of, is_fused_operand
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.chunks import CHUNK_ROWS, in_chunks
from dgraph.lowering.instructions import (
    AnyInstruction,
    Instruction,
    Observer,
    Register,
    Registers,
    RowChunks,
    RowRegisters,
    WeightRegisters,
    calls_of,
    instead,
    observed,
    read_by,
    written_by,
)
from dgraph.lowering.peephole import Fusion
from dgraph.lowering.program import ProgramResult
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import Call, Region, Stage, schedule
from dgraph.lowering.stage import Cut, Launch, LoweredStage, Runner, run_in_order
from dgraph.lowering.tuning import Tuning
from dgraph.ops import OPS, launcher, op_of
from dgraph.types.nodes import args_of
from dgraph.types.shapes import InputSpec


class LoweredProgram:
    """A phase, ready to run: see `dgraph.lowering.program.Program`.

    Args:
        graph: the phase's graph, verified and after `dgraph.compiler.phases.lowering_passes`; it is kept as it is.
        compiler: makes the region functions; share it among the phases of a model.
        buckets: rounds the row count of every stage.
        runner: makes the function that runs a stage.
        tuning: tilings of kernels that its launches take where they were chosen; None for the kernels' own.
        chunk_rows: most rows at a time of instructions that act row by row, so that the values between them stay small;
            None to run them on all rows. It changes no result, except as products of matrices round differently for
            another number of rows.
        fused: see `schedule`.
        graph_rows: on more rows no stage is recorded as a CUDA graph, nor is one whose instructions run in chunks; None
            for any number. A graph holds the memory of its rows for good, and saves launches, which count for little
            where there are many.
        name: of its only stage, if it has one; see `schedule`.

    Attributes:
        graph_rows: rows up to which its first stage may be recorded; None for any number.

    Raises:
        InputError: chunk_rows or graph_rows below 1.
    """

    def __init__(
        self,
        graph: Graph,
        compiler: RegionCompiler,
        buckets: Buckets,
        runner: Callable[[LoweredStage], Runner] = run_in_order,
        tuning: Tuning | None = None,
        chunk_rows: int | None = CHUNK_ROWS,
        fused: bool | None = None,
        graph_rows: int | None = None,
        name: str = "step",
    ):
        for what, rows in (("chunk_rows", chunk_rows), ("graph_rows", graph_rows)):
            if rows is not None and (type(rows) is not int or rows < 1):
                raise InputError(f"{what} must be a number of rows of at least 1, or None, got {rows!r}.")
        self.graph, self.buckets, self.tuning = graph, buckets, tuning
        self.stages = schedule(graph, fused, name)
        self._padded: dict[int, int] = {}
        self.backend = compiler.backend
        if tuning is not None:
            tuning.load(graph)
        self._numbers: dict[Node, Register] = {}
        self._count = 0
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self._template: list[Any] = [
            graph.tensors[n.meta["weight"]].detach() if "weight" in n.meta else None for n in placeholders
        ]
        for node in placeholders:
            self._number(node)
        self._inputs = {spec.name: (self._numbers[graph.input(spec.name)], spec) for spec in graph.inputs.values()}
        self._given = [(n, register, spec.dtype, spec.per == "row") for n, (register, spec) in self._inputs.items()]
        instructions: list[list[Instruction]] = []
        self._cuts: list[Cut | None] = []
        for stage in self.stages:
            instructions.append([self._lower(step, compiler) for step in stage.steps])
            self._cuts.append(None if stage.cut is None else self._lower_cut(stage.cut))
        self._outputs = {name: self._numbers[node] for name, node in graph.results().items()}
        self.lowered = self._lower_stages(instructions, chunk_rows, graph_rows)
        self.graph_rows = self.lowered[0].graph_rows
        self._place_frees()
        self._template += [None] * (self._count - len(self._template))
        self._runners = [runner(stage) for stage in self.lowered]

    @property
    def inputs(self) -> Mapping[str, InputSpec]:
        """The inputs that the program reads, by name."""
        return self.graph.inputs

    @property
    def output_names(self) -> frozenset[str]:
        """Names of the outputs that it gives."""
        return frozenset(self._outputs)

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of the stages, in order."""
        return tuple(s.name for s in self.stages)

    def bucket_sizes(self, rows: int) -> tuple[int, ...]:
        """Every row count that a stage is padded to for 1 to `rows` rows, ascending."""
        return self.buckets.up_to(rows)

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        """Run every stage; see `Program`.

        Raises:
            LoweringError: an input is missing, or is not of its declared dtype.
        """
        return self.bound(inputs)(rows)

    @torch.no_grad()
    def bound(self, inputs: Mapping[str, Tensor]) -> Callable[[int], ProgramResult]:
        """Run in two calls; see `Program`. The first raises what `__call__` does, but for numbers of rows."""
        registers, least = Registers(self._template), ("", math.inf)
        for name, register, dtype, by_row in self._given:
            value = inputs.get(name)
            if value is None:
                raise LoweringError(f"input {name!r} is missing; this program reads {', '.join(sorted(self._inputs))}.")
            if value.dtype != dtype:
                raise LoweringError(f"input {name!r} is {value.dtype}, expected {dtype}.")
            if by_row and len(value) < least[1]:
                least = name, len(value)
            registers[register] = value
        return partial(self._on, registers, least, self._runners[0](registers))

    def calls(self) -> tuple[Instruction, ...]:
        """The instructions that call an op, in order, those within chunks of rows included."""
        return tuple(calls_of(each for stage in self.lowered for each in (*stage.bridge, *stage.instructions)))

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Context in which `observer` sees every call of an op that the schedule left to itself.

            with program.observed(lambda op, args, result: print(op.name)):
                program(inputs, rows)

        The instructions run one by one meanwhile, without CUDA graphs. Not seen are ops that were compiled into a
        region, and a call that absorbs another (`dgraph.lowering.peephole`).
        """
        with self.one_by_one(), instead(self.calls(), lambda instruction: observed(instruction, observer)):
            yield

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Context in which the instructions run one by one, without CUDA graphs."""
        runners = self._runners
        self._runners = [run_in_order(stage) for stage in self.lowered]
        try:
            yield
        finally:
            self._runners = runners

    def on_stand_ins(self, inputs: Mapping[str, Tensor], weight: Callable[[Tensor], Tensor], rows: int) -> None:
        """Run the instructions on stand-ins for the inputs and for each weight; `rows` rows live on at every cut.

        Stand-ins have sizes alone, and the functions of the instructions must take them
        (`dgraph.lowering.instructions.instead`).
        """
        registers = Registers(None if value is None else weight(value) for value in self._template)
        for name, (register, _) in self._inputs.items():
            registers[register] = inputs[name]
        for stage in self.lowered:
            run_in_order(stage)(registers)(rows)

    def _on(self, registers: Registers, least: tuple[str, float], launch: Launch, rows: int) -> ProgramResult:
        """Run on `rows` live rows.

        least: name of the input with the fewest rows, and their number. No gradients are needed, and the callers have
        turned them off: doing so here would cost 10 us in which the device waits.
        """
        if least[1] < rows:
            raise LoweringError(f"input {least[0]!r} has {least[1]} rows, expected at least {rows}.")
        live, padded = rows, self._bucket(rows)
        if self.tuning is not None and self.tuning.is_open:
            self.tuning.prepare(self.graph, self._sizes(registers), padded)
        all_live, all_padded, seconds = [], [], []
        start = time.perf_counter()
        for i in range(len(self._runners)):
            living = launch(padded)
            all_live.append(live)
            all_padded.append(padded)
            if i + 1 < len(self._runners):
                launch = self._runners[i + 1](registers)
                live = living()  # the one host read: the next stage's bucket depends on it
                padded = self._bucket(live)
            now = time.perf_counter()
            seconds.append(now - start)
            start = now
        outputs = {name: registers[register] for name, register in self._outputs.items()}
        return ProgramResult(outputs, tuple(all_live), tuple(all_padded), tuple(seconds))

    def _bucket(self, rows: int) -> int:
        """The bucket of a row count, looked up where it was met before: the device waits for it."""
        return self._padded.get(rows) or self._padded.setdefault(rows, self.buckets(rows))

    def _sizes(self, registers: Registers) -> dict[str, int]:
        """Current sizes by symbol of the inputs' declared shapes; inputs with a value per row are left out."""
        others = ((register, spec) for register, spec in self._inputs.values() if spec.per != "row")
        sizes = (zip(spec.shape, registers[register].shape, strict=True) for register, spec in others)
        return {name: size for pairs in sizes for name, size in pairs if isinstance(name, str)}

    def _number(self, node: Node | None) -> Register:
        """Register of a node, a new one if it has none yet; for None, a new register of a value without a node."""
        if node is not None and node in self._numbers:
            return self._numbers[node]
        register = Register(self._count)
        self._count += 1
        if node is not None:
            self._numbers[node] = register
        return register

    def _lower(self, step: Region | Call | Fusion, compiler: RegionCompiler) -> Instruction:
        if isinstance(step, Fusion):
            args = [_numbered(a, self._numbers) for a in step.args]
            targets = tuple((part, self._number(n)) for part, n in step.results)
            return Instruction(step.function, args, targets, origin=step)
        if isinstance(step, Region):
            args = [self._numbers[n] for n in step.inputs]
            targets = tuple((i, self._number(n)) for i, n in enumerate(step.outputs))
            return Instruction(compiler.function(self.graph, step), args, targets, origin=step)
        op = step.op
        args = [_numbered(a, self._numbers) for a in arguments_of(step.node, op)]
        written = () if op.mutates and step.node.meta["val"] is None else step.results
        function = launcher(op, self.graph.device)
        return Instruction(function, args, tuple((part, self._number(n)) for part, n in written), op, step)

    def _lower_cut(self, call: Call) -> Cut:
        """Lower a cut. Rows are listed in the stage before, with room for all: nothing is launched after the read."""
        keep, cu_rows = (self._numbers[n] for n in args_of(call.node)[:2])
        parts = dict(call.results)
        index, offsets = self._number(parts.get(0)), self._number(parts.get(1))
        op = OPS["list_kept"]
        function = launcher(op, self.graph.device)
        return Cut(Instruction(function, [keep, cu_rows], ((0, index), (1, offsets)), op), index, offsets)

    def _lower_stages(
        self, instructions: list[list[Instruction]], chunk_rows: int | None, graph_rows: int | None
    ) -> tuple[LoweredStage, ...]:
        weights = {register for register, value in enumerate(self._template) if value is not None}
        caches = {register for register, spec in self._inputs.values() if spec.in_place}
        given = {register for register, _ in self._inputs.values()} - caches
        rowed = frozenset(register for register, spec in self._inputs.values() if spec.per == "row")
        lowered: list[LoweredStage] = []
        for i, (stage, mine, cut) in enumerate(zip(self.stages, instructions, self._cuts, strict=True)):
            later = {register for part in instructions[i + 1 :] for register in read_by(part)}
            later |= {register for c in self._cuts[i + 1 :] if c is not None for register in c.instruction.reads()}
            outside = later.union(self._outputs.values(), (cut.index, cut.offsets) if cut else ())
            length = _bridge_length(stage)
            bridge, own = tuple(mine[:length]), mine[length:]
            body: tuple[AnyInstruction, ...] = tuple(own)
            if chunk_rows is not None:
                read_outside = outside | (cut.instruction.reads() if cut else set())
                body = in_chunks(self.graph, stage.steps[length:], own, self._numbers, read_outside, chunk_rows)
            bounds = [graph_rows, chunk_rows if any(isinstance(each, RowChunks) for each in body) else None]
            body += (cut.instruction,) if cut else ()
            everything = (*bridge, *body)
            written, read = written_by(everything), read_by(everything)
            inputs = read - written - weights
            # A gather takes values and the numbers of rows.
            gathered = {register for gather in bridge for register in gather.args[0]}
            numbers = {gather.args[1] for gather in bridge}
            before = self._cuts[i - 1] if i else None
            lowered.append(
                LoweredStage(
                    name=stage.name,
                    bridge=bridge,
                    instructions=body,
                    inputs=tuple(sorted(inputs)),
                    rowed=frozenset() if before else rowed,
                    in_place=frozenset(inputs & caches),
                    sources=frozenset((gathered & inputs) - read_by(body) - numbers - caches),
                    index=before.index if before else None,
                    ahead=() if before else tuple(sorted((later & given) - inputs)),
                    outputs=tuple(sorted(written & outside)),
                    live=cut.offsets if cut else None,
                    graph_rows=min((rows for rows in bounds if rows is not None), default=None),
                    choices=None if self.tuning is None else self.tuning.choices,
                )
            )
        return tuple(lowered)

    def _place_frees(self) -> None:
        """Free each register after its last reader; weights, inputs, outputs and registers that the host reads stay."""
        keep = set(self._outputs.values()) | set(range(len(self._template)))
        for cut in self._cuts:
            keep.update((cut.index, cut.offsets) if cut else ())
        last: dict[int, AnyInstruction] = {}
        for stage in self.lowered:
            for instruction in (*stage.bridge, *stage.instructions):
                last.update(dict.fromkeys(instruction.reads() | instruction.writes(), instruction))
        frees: dict[AnyInstruction, list[int]] = {}
        for register, instruction in last.items():
            if register not in keep:
                frees.setdefault(instruction, []).append(register)
        for instruction, freed in frees.items():
            instruction.frees = tuple(freed)


def _bridge_length(stage: Stage) -> int:
    """Number of steps at the head of a stage that gather rows."""
    for i, step in enumerate(stage.steps):
        if not (isinstance(step, Call) and (op := op_of(step.node.target)) and op.name == "compact"):
            return i
    return len(stage.steps)


def _numbered(arg: Any, numbers: Mapping[Node, Register]) -> Any:
    if is_fused_operand(arg) and arg.target is OPS["dequantise_rows"].overload:
        return RowRegisters([_numbered(a, numbers) for a in args_of(arg)])
    if is_fused_operand(arg):
        values, scales, zeros, block, _ = args_of(arg)
        return WeightRegisters([*(_numbered(a, numbers) for a in (values, scales, zeros)), tuple(block)])
    if isinstance(arg, Node):
        return numbers[arg]
    if isinstance(arg, (list, tuple)):
        return [_numbered(a, numbers) for a in arg]
    return arg
