"""A stage as instructions over registers, and the runners that run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from dgraph.lowering.instructions import AnyInstruction, Instruction, Registers
from dgraph.ops.per_stage import one_stage
from dgraph.ops.tuning import Choices


@dataclass(frozen=True)
class LoweredStage:
    """A stage as a runner takes it.

    Attributes:
        name: of the stage.
        bridge: instructions at its head that gather the rows that live on, from values over the rows of an earlier
            stage.
        instructions: the others. All sizes that they make, and those that the bridge makes, depend on the stage's
            bucket only.
        inputs: registers that bridge or instructions read and neither writes, weights left out, ascending.
        rowed: inputs of the program with a value for each row, all of them, for the first stage; none for the others.
            They are whole when a runner is called, and cut to the rows of the bucket when the stage has run.
        in_place: those of `inputs` that are written in place, or read from where such writes go (KV caches).
        sources: those of `inputs` that are only gathered from. Rows that no index names may hold anything there, and
            there may be any number of them.
        index: the register, among `inputs`, of the numbers of the rows that lived on at the cut before it; None for the
            first stage. It has room for every row of the stage before.
        ahead: inputs of the program that only later stages read; none but for the first stage. A runner that keeps
            copies of its inputs keeps some of these too, so that nothing is left to copy after a cut.
        outputs: registers that bridge or instructions write and that something outside reads, ascending.
        live: the register, among `outputs`, of the offsets per sequence of the rows that live on after it, of which the
            last is their number; None for the last stage.
        graph_rows: rows up to which a runner may record it as a CUDA graph; None for any number.
        choices: tilings that its launches take; None for the kernels' own.
    """

    name: str
    bridge: tuple[Instruction, ...]
    instructions: tuple[AnyInstruction, ...]
    inputs: tuple[int, ...]
    rowed: frozenset[int]
    in_place: frozenset[int]
    sources: frozenset[int]
    index: int | None
    ahead: tuple[int, ...]
    outputs: tuple[int, ...]
    live: int | None
    graph_rows: int | None
    choices: Choices | None = None

    @property
    def last(self) -> bool:
        """True if no stage runs after this one."""
        return self.live is None

    def tuned(self) -> AbstractContextManager[None]:
        """Context to enter while the stage's instructions run."""
        return nullcontext() if self.choices is None else self.choices.in_use()


Living = Callable[[], int]
"""Wait for the device, and give the number of rows that live on after a stage; not called after the last stage."""
Launch = Callable[[int], Living]
"""Run a stage, given its bucket, to which it cuts the register `index`."""


class Runner(Protocol):
    """Run one stage, reading and writing registers.

    It is called before the host reads the row count of the stage. So work that does not depend on the count is done
    while the device still runs the stage before.
    """

    def __call__(self, registers: Registers) -> Launch: ...


def cut_rows(registers: Registers, rowed: Iterable[int], rows: int) -> None:
    """Cut each of these registers to its first `rows` rows, or pad it with zeros to `rows` rows."""
    for register in rowed:
        value = registers[register]
        if len(value) < rows:
            registers[register] = torch.cat([value, value.new_zeros(rows - len(value), *value.shape[1:])])
        elif len(value) > rows:
            registers[register] = value[:rows]


def live_rows(registers: Registers, stage: LoweredStage) -> int:
    """Number of rows that live on after a stage that is not the last; reading it waits for the device."""
    return int(registers[stage.live][-1]) if stage.live is not None else 0


def run_in_order(stage: LoweredStage) -> Runner:
    """The plain runner: one instruction after the other."""

    def ready(registers: Registers) -> Launch:
        def run(rows: int) -> Living:
            cut_rows(registers, stage.rowed if stage.index is None else (stage.index,), rows)
            with one_stage(), stage.tuned():
                for instruction in (*stage.bridge, *stage.instructions):
                    instruction.run(registers)
            return partial(live_rows, registers, stage)

        return run

    return ready


@dataclass(frozen=True)
class Cut:
    """Point between two stages where the host reads how many rows live on.

    Attributes:
        instruction: lists them; the last instruction of the stage before it.
        index: register of their numbers, with room for every row of that stage.
        offsets: register of their offsets per sequence, of which the last is their number.
    """

    instruction: Instruction
    index: int
    offsets: int
