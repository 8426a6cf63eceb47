"""Instructions over numbered registers, which a lowered program runs one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ops import Op

if TYPE_CHECKING:
    from dgraph.lowering.peephole import Fusion
    from dgraph.lowering.schedule import Call, Region

Observer = Callable[[Op, tuple[Any, ...], Any], None]
"""Called after an op, with the op, the arguments of the call and its result. Writes of the op are done by then."""


class Register(int):
    """Number of a register, as an argument that stands for the register's value."""


class WeightRegisters(list[Any]):
    """Argument that stands for a `QuantisedWeight`: its values, scales, zeros and block."""


class RowRegisters(list[Any]):
    """Argument that stands for a `QuantisedRows`: its values, scales and dtype."""


class Registers(list[Any]):
    """The values of one run, by register; None before a value is written and after it is freed.

    Attributes:
        fixed: the buffer, by register, of each value that is the first rows of a buffer which never moves.
    """

    def __init__(self, values: Iterable[Any] = ()):
        super().__init__(values)
        self.fixed: dict[int, Tensor] = {}


class Instruction:
    """One function over registers: it reads some, writes some, and frees those without further readers.

    Args:
        function: the function that is called.
        args: its arguments, in which a `Register` stands for the value there.
        targets: destinations of the results: (part of the result, register); part None is the result itself.
        op: the op of the call; None for a region, and for calls that run as one.
        origin: the region or call that it was lowered from; None if no node of the graph stands for it.
    """

    __slots__ = ("args", "frees", "function", "op", "origin", "targets")

    def __init__(
        self,
        function: Callable[..., Any],
        args: list[Any],
        targets: tuple[tuple[int | None, int], ...],
        op: Op | None = None,
        origin: Region | Call | Fusion | None = None,
    ):
        self.function, self.args, self.targets, self.op, self.origin = function, args, targets, op, origin
        self.frees: tuple[int, ...] = ()

    def run(self, registers: list[Any]) -> None:
        """Call the function and store its results."""
        result = self.function(*(_fill(a, registers) for a in self.args))
        for part, register in self.targets:
            registers[register] = result if part is None else result[part]
        for register in self.frees:
            registers[register] = None

    def reads(self) -> set[int]:
        """Registers among the arguments."""
        return set(_registers_in(self.args))

    def writes(self) -> set[int]:
        """Registers of the results."""
        return {register for _, register in self.targets}


class RowChunks:
    """Several instructions as one, run a chunk of rows at a time where there are many.

    Values between the instructions exist for one chunk only. Values that are read outside are made once at full size
    and filled chunk by chunk.

    Args:
        members: the instructions in order; each acts on every row alone.
        rowed: registers from outside whose first dimension is the rows.
        counts: registers from outside whose last entry is the number of rows that are live.
        outputs: registers of results that something outside reads; the rows are their first dimension.
        limit: rows of a chunk at most.
    """

    __slots__ = ("counts", "frees", "limit", "members", "outputs", "rowed")

    def __init__(
        self,
        members: Sequence[Instruction],
        rowed: Sequence[int],
        counts: Sequence[int],
        outputs: Sequence[int],
        limit: int,
    ):
        self.members, self.limit = tuple(members), limit
        self.rowed, self.counts, self.outputs = tuple(rowed), tuple(counts), tuple(outputs)
        self.frees: tuple[int, ...] = ()
        own = self._written() - set(outputs)
        last = {register: member for member in self.members for register in (member.reads() | member.writes()) & own}
        for member in self.members:
            member.frees = tuple(sorted(register for register, reader in last.items() if reader is member))

    def run(self, registers: list[Any]) -> None:
        """Run the instructions: as they are up to `limit` rows, above it in as few chunks as may be, of one size."""
        rows = len(registers[self.rowed[0]])
        if rows <= self.limit:
            for member in self.members:
                member.run(registers)
        else:
            size = -(-rows // -(-rows // self.limit))
            for begin in range(0, rows, size):
                self._run_chunk(registers, begin, min(begin + size, rows), rows)
        for register in self.frees:
            registers[register] = None

    def _run_chunk(self, registers: list[Any], begin: int, end: int, rows: int) -> None:
        own = list(registers)
        for register in self.rowed:
            own[register] = registers[register][begin:end]
        for register in self.counts:
            own[register] = (registers[register][-1:] - begin).clamp(min=0)
        for member in self.members:
            member.run(own)
        for register in self.outputs:
            part: Tensor = own[register]
            if begin == 0:
                registers[register] = part.new_empty((rows, *part.shape[1:]))
            registers[register][begin:end].copy_(part)

    def reads(self) -> set[int]:
        """Registers from outside."""
        return set().union(*(member.reads() for member in self.members)) - self._written()

    def writes(self) -> set[int]:
        """Registers that something outside reads."""
        return set(self.outputs)

    def _written(self) -> set[int]:
        return set().union(*(member.writes() for member in self.members))


AnyInstruction = Instruction | RowChunks


def single(instructions: Iterable[AnyInstruction]) -> Iterator[Instruction]:
    """The instructions one by one, those within chunks included."""
    for instruction in instructions:
        yield from instruction.members if isinstance(instruction, RowChunks) else (instruction,)


def calls_of(instructions: Iterable[AnyInstruction]) -> Iterator[Instruction]:
    """The instructions that call an op, those within chunks included."""
    return (instruction for instruction in single(instructions) if instruction.op is not None)


@contextmanager
def instead(
    instructions: Iterable[Instruction], function_of: Callable[[Instruction], Callable[..., Any]]
) -> Iterator[None]:
    """Context in which each instruction calls `function_of(instruction)` in place of its own function."""
    plain = {instruction: instruction.function for instruction in instructions}
    for instruction in plain:
        instruction.function = function_of(instruction)
    try:
        yield
    finally:
        for instruction, function in plain.items():
            instruction.function = function


def observed(instruction: Instruction, observer: Observer) -> Callable[..., Any]:
    """Wrap the function of an instruction that calls an op, so that an observer sees its calls."""
    function, op = instruction.function, instruction.op
    assert op is not None

    def call(*args: Any) -> Any:
        result = function(*args)
        observer(op, args, result)
        return result

    return call


def read_by(instructions: Iterable[AnyInstruction]) -> set[int]:
    """Registers that any of the instructions reads."""
    return {register for instruction in instructions for register in instruction.reads()}


def written_by(instructions: Iterable[AnyInstruction]) -> set[int]:
    """Registers that any of the instructions writes."""
    return {register for instruction in instructions for register in instruction.writes()}


def _fill(arg: Any, registers: list[Any]) -> Any:
    if isinstance(arg, Register):
        return registers[arg]
    if isinstance(arg, WeightRegisters):
        values, scales, zeros, block = (_fill(a, registers) for a in arg)
        return QuantisedWeight(values, scales, zeros, block)
    if isinstance(arg, RowRegisters):
        values, scales, dtype = (_fill(a, registers) for a in arg)
        return QuantisedRows(values, scales, dtype)
    return [_fill(a, registers) for a in arg] if isinstance(arg, list) else arg


def _registers_in(args: Iterable[Any]) -> Iterable[int]:
    for arg in args:
        if isinstance(arg, Register):
            yield arg
        elif isinstance(arg, list):
            yield from _registers_in(arg)
