"""A step of a batch before its launch, and after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from dgraph.lowering.program import Program, ProgramResult
from dgraph.runtime.state.base import DecodeState
from dgraph.runtime.state.packed_rows import StepRows


@dataclass(frozen=True)
class Flight:
    """A launched step. All fields but its number are copies for an observer, if there is one."""

    number: int
    before: DecodeState | None = None
    rows: StepRows | None = None
    said: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """A program with its inputs, and the function that runs it on them; see `Program.bound`."""

    program: Program
    inputs: dict[str, Tensor]
    run: Callable[[int], ProgramResult]
