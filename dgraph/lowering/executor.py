"""Lowered programs: the steps of each stage, run over numbered slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import LoweringError
from dgraph.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.program import ProgramResult
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.schedule import Call, Region, schedule
from dgraph.nodes import args_of
from dgraph.ops import op_of


class Slot(int):
    """The number of a slot, as it stands for a value among arguments."""


Slots = list[Any]
"""The values of one run, by slot; None where there is none yet or no longer."""


class Step:
    """One function over slots: reads some, writes some, and frees those that nobody reads any more."""

    __slots__ = ("args", "frees", "function", "targets")

    def __init__(self, function: Callable[..., Any], args: list[Any], targets: tuple[tuple[int | None, int], ...]):
        self.function, self.args, self.targets = function, args, targets
        self.frees: tuple[int, ...] = ()

    def run(self, slots: Slots) -> None:
        """Call the function and store its results."""
        result = self.function(*(_fill(a, slots) for a in self.args))
        for part, slot in self.targets:
            slots[slot] = result if part is None else result[part]
        for slot in self.frees:
            slots[slot] = None

    def reads(self) -> set[int]:
        """Slots among the arguments."""
        return set(_slots_in(self.args))

    def writes(self) -> set[int]:
        """Slots of the results."""
        return {slot for _, slot in self.targets}


def _fill(arg: Any, slots: Slots) -> Any:
    if isinstance(arg, Slot):
        return slots[arg]
    return [_fill(a, slots) for a in arg] if isinstance(arg, list) else arg


def _slots_in(args: Iterable[Any]) -> Iterable[int]:
    for arg in args:
        if isinstance(arg, Slot):
            yield arg
        elif isinstance(arg, list):
            yield from _slots_in(arg)


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
    """

    name: str
    bridge: tuple[Step, ...]
    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    in_place: frozenset[int]
    outputs: tuple[int, ...]
    last: bool


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
    """

    def __init__(
        self,
        graph: Graph,
        compiler: RegionCompiler,
        buckets: Buckets,
        runner: Callable[[StagePlan], Runner] = run_steps,
    ):
        self.graph, self.buckets = graph, buckets
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
        caches = {slot for slot, spec in self._inputs.values() if spec.shape[0] == "pages"}
        plans = []
        for i, (stage, mine) in enumerate(zip(self.stages, steps, strict=True)):
            bridge = []
            for step, origin in zip(mine, stage.steps, strict=True):
                if not (isinstance(origin, Call) and (op := op_of(origin.node.target)) and op.name == "compact"):
                    break
                bridge.append(step)
            body = mine[len(bridge) :]
            written = set().union(*(s.writes() for s in body)) if body else set()
            read = set().union(*(s.reads() for s in body)) if body else set()
            outside = {slot for later in steps[i + 1 :] for s in later for slot in s.reads()}
            outside |= {slot for cut in self._cuts[i:] if cut is not None for slot in cut.reads()}
            results = set(self._outputs.values())
            plans.append(
                StagePlan(
                    stage.name,
                    tuple(bridge),
                    tuple(body),
                    tuple(sorted(read - written - weights)),
                    frozenset(read & caches),
                    tuple(sorted(written & (outside | results))),
                    stage.cut is None,
                )
            )
        return tuple(plans)

    def _plan_frees(self) -> None:
        """Free each slot behind its last reader; weights, inputs and outputs stay."""
        keep = set(self._outputs.values()) | set(range(len(self._template)))
        last: dict[int, Step] = {}
        for plan, cut in zip(self.plans, self._cuts, strict=True):
            for step in (*plan.bridge, *plan.steps):
                last.update(dict.fromkeys(step.reads() | step.writes(), step))
            if cut is not None:  # a cut's own arguments are read by the host
                keep |= cut.reads()
        frees: dict[Step, list[int]] = {}
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
