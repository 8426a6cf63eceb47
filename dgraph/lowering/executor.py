"""Lowered programs: the steps of each stage, run over numbered slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import InputError, LoweringError
from dgraph.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.chunks import CHUNK_ROWS, in_chunks
from dgraph.lowering.program import ProgramResult
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import Call, Region, schedule
from dgraph.lowering.steps import AnyStep, RowChunks, Slot, Slots, Step
from dgraph.lowering.tuning import Tuning
from dgraph.nodes import args_of
from dgraph.ops import op_of

IN_PLACE = ("pages", "entries", "sequences")
"""First sizes of inputs that are written in place, or read from where such writes go."""


@dataclass(frozen=True)
class StagePlan:
    """What a runner needs to know of a stage.

    Attributes:
        name: of the stage.
        bridge: steps at its head that read values over the rows of the stage before (the gather of what lives on);
            their sizes depend on two buckets.
        steps: the others; their sizes depend on one bucket.
        inputs: slots that `steps` read and do not write, weights left out, ascending.
        in_place: those of `inputs` that are written in place, or read from where such writes go (KV caches).
        outputs: slots that `steps` write and that something outside reads, ascending.
        last: whether no stage runs behind this one.
        chunk_rows: above so many rows some steps run in chunks of rows; None if none does.
    """

    name: str
    bridge: tuple[Step, ...]
    steps: tuple[AnyStep, ...]
    inputs: tuple[int, ...]
    in_place: frozenset[int]
    outputs: tuple[int, ...]
    last: bool
    chunk_rows: int | None


class Runner(Protocol):
    """Runs one stage, reading and writing slots; `rows` is the bucket that it runs on."""

    def __call__(self, slots: Slots, rows: int) -> None: ...


def run_steps(plan: StagePlan) -> Runner:
    """The plain runner: one step after the other."""

    def run(slots: Slots, rows: int) -> None:
        for step in (*plan.bridge, *plan.steps):
            step.run(slots)

    return run


class LoweredProgram:
    """A phase, ready to run: see `dgraph.lowering.program.Program`.

    Args:
        graph: the phase's graph, verified; it is kept for dumps.
        compiler: makes the region functions; share it among the phases of a model.
        buckets: rounds the row count of every stage.
        runner: makes what runs a stage from its plan.
        tuning: plans of kernels that its launches take where they were chosen; None for the kernels' own.
        chunk_rows: steps that act row by row run on at most so many rows at a time, so that what lies between them
            stays small; None to run them on all rows. It changes no result, but for what a product of matrices makes
            of another number of rows.

    Raises:
        InputError: chunk_rows below 1.
    """

    def __init__(
        self,
        graph: Graph,
        compiler: RegionCompiler,
        buckets: Buckets,
        runner: Callable[[StagePlan], Runner] = run_steps,
        tuning: Tuning | None = None,
        chunk_rows: int | None = CHUNK_ROWS,
    ):
        if chunk_rows is not None and (type(chunk_rows) is not int or chunk_rows < 1):
            raise InputError(f"chunk_rows must be a number of rows of at least 1, or None, got {chunk_rows!r}.")
        self.graph, self.buckets, self.tuning, self.chunk_rows = graph, buckets, tuning, chunk_rows
        if tuning is not None:
            tuning.load(graph)
        self.stages = schedule(graph)
        self._numbers: dict[Node, Slot] = {}
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self._template: Slots = [
            graph.tensors[n.meta["weight"]].detach() if "weight" in n.meta else None for n in placeholders
        ]
        for node in placeholders:
            self._number(node)
        self._inputs = {spec.name: (self._numbers[graph.input(spec.name)], spec) for spec in graph.inputs.values()}
        steps: list[list[Step]] = []
        self._cuts: list[Step | None] = []
        for stage in self.stages:
            steps.append([self._lower(step, compiler) for step in stage.steps])
            self._cuts.append(None if stage.cut is None else self._lower(stage.cut, compiler))
        self._outputs = {name: self._numbers[node] for name, node in graph.results().items()}
        self.plans = self._plan(steps)
        self._plan_frees()
        self._template += [None] * (len(self._numbers) - len(self._template))
        self._runners = [runner(plan) for plan in self.plans]

    @property
    def input_names(self) -> frozenset[str]:
        """Names of the inputs that the program reads."""
        return frozenset(self._inputs)

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
        slots = list(self._template)
        live, padded = rows, self.buckets(rows)
        self._bind(inputs, slots, live, padded)
        if self.tuning is None:
            return self._run(slots, live, padded)
        if self.tuning.is_open:
            self.tuning.prepare(self.graph, self._sizes(slots), padded)
        with self.tuning.choices.in_use():
            return self._run(slots, live, padded)

    def _run(self, slots: Slots, live: int, padded: int) -> ProgramResult:
        all_live, all_padded, seconds = [], [], []
        for runner, cut in zip(self._runners, self._cuts, strict=True):
            start = time.perf_counter()
            runner(slots, padded)
            all_live.append(live)
            all_padded.append(padded)
            if cut is not None:
                keep, cu_rows, _ = cut.args
                live = int(slots[keep].sum())  # the one host read: the next stage's bucket depends on it
                padded = self.buckets(live)
                index = cut.function(slots[keep], slots[cu_rows], padded)
                for part, slot in cut.targets:
                    slots[slot] = index[part]
            seconds.append(time.perf_counter() - start)
        outputs = {name: slots[slot] for name, slot in self._outputs.items()}
        return ProgramResult(outputs, tuple(all_live), tuple(all_padded), tuple(seconds))

    def _sizes(self, slots: Slots) -> dict[str, int]:
        """The symbols in the declared sizes of the inputs, and what they are now."""
        sizes = (zip(spec.shape, slots[slot].shape, strict=True) for slot, spec in self._inputs.values())
        return {name: size for pairs in sizes for name, size in pairs if isinstance(name, str)}

    def _bind(self, inputs: Mapping[str, Tensor], slots: Slots, rows: int, padded: int) -> None:
        for name, (slot, spec) in self._inputs.items():
            if name not in inputs:
                raise LoweringError(f"input {name!r} is missing; this program reads {', '.join(sorted(self._inputs))}.")
            value = inputs[name]
            if value.dtype != spec.dtype:
                raise LoweringError(f"input {name!r} is {value.dtype}, expected {spec.dtype}.")
            if spec.shape[0] == "N":
                held = value.shape[0]
                if held < rows:
                    raise LoweringError(f"input {name!r} has {held} rows, expected at least {rows}.")
                if held < padded:
                    value = torch.cat([value, value.new_zeros(padded - held, *value.shape[1:])])
                value = value[:padded]
            slots[slot] = value

    def _number(self, node: Node) -> Slot:
        return self._numbers.setdefault(node, Slot(len(self._numbers)))

    def _lower(self, step: Region | Call, compiler: RegionCompiler) -> Step:
        if isinstance(step, Region):
            args = [self._numbers[n] for n in step.inputs]
            targets = tuple((i, self._number(n)) for i, n in enumerate(step.outputs))
            return Step(compiler.function(self.graph, step), args, targets)
        op = op_of(step.node.target)
        assert op is not None
        args = [_numbered(a, self._numbers) for a in args_of(step.node)]
        written = () if op.mutates and step.node.meta["val"] is None else step.results
        return Step(op.overload, args, tuple((part, self._number(n)) for part, n in written))

    def _plan(self, steps: list[list[Step]]) -> tuple[StagePlan, ...]:
        weights = {slot for slot, value in enumerate(self._template) if value is not None}
        caches = {slot for slot, spec in self._inputs.values() if spec.shape[0] in IN_PLACE}
        plans = []
        for i, (stage, mine) in enumerate(zip(self.stages, steps, strict=True)):
            bridge = []
            for step, origin in zip(mine, stage.steps, strict=True):
                if not (isinstance(origin, Call) and (op := op_of(origin.node.target)) and op.name == "compact"):
                    break
                bridge.append(step)
            outside = {slot for later in steps[i + 1 :] for s in later for slot in s.reads()}
            outside |= {slot for cut in self._cuts[i:] if cut is not None for slot in cut.reads()}
            outside |= set(self._outputs.values())
            body: tuple[AnyStep, ...] = tuple(mine[len(bridge) :])
            if self.chunk_rows is not None:
                origins, own = stage.steps[len(bridge) :], mine[len(bridge) :]
                body = in_chunks(self.graph, origins, own, self._numbers, outside, self.chunk_rows)
            written = set().union(*(s.writes() for s in body)) if body else set()
            read = set().union(*(s.reads() for s in body)) if body else set()
            plans.append(
                StagePlan(
                    stage.name,
                    tuple(bridge),
                    body,
                    tuple(sorted(read - written - weights)),
                    frozenset(read & caches),
                    tuple(sorted(written & outside)),
                    stage.cut is None,
                    self.chunk_rows if any(isinstance(s, RowChunks) for s in body) else None,
                )
            )
        return tuple(plans)

    def _plan_frees(self) -> None:
        """Free each slot behind its last reader; weights, inputs and outputs stay."""
        keep = set(self._outputs.values()) | set(range(len(self._template)))
        last: dict[int, AnyStep] = {}
        for plan, cut in zip(self.plans, self._cuts, strict=True):
            for step in (*plan.bridge, *plan.steps):
                last.update(dict.fromkeys(step.reads() | step.writes(), step))
            if cut is not None:  # a cut's own arguments are read by the host
                keep |= cut.reads()
        frees: dict[AnyStep, list[int]] = {}
        for slot, step in last.items():
            if slot not in keep:
                frees.setdefault(step, []).append(slot)
        for step, freed in frees.items():
            step.frees = tuple(freed)


def _numbered(arg: Any, numbers: Mapping[Node, Slot]) -> Any:
    if isinstance(arg, Node):
        return numbers[arg]
    if isinstance(arg, (list, tuple)):
        return [_numbered(a, numbers) for a in arg]
    return arg
