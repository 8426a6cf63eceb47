"""Steps over numbered slots, which a lowered program runs one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dgraph.families.quantised import QuantisedRows, QuantisedWeight
from dgraph.ops import Op

if TYPE_CHECKING:
    from dgraph.lowering.fused import Fused
    from dgraph.lowering.schedule import Call, Region

Observer = Callable[[Op, tuple[Any, ...], Any], None]
"""Called after an op, with the op, the arguments of the call and its result. Writes of the op are done by then."""


class Slot(int):
    """Number of a slot, as an argument that stands for the slot's value."""


class StoredSlots(list[Any]):
    """Argument that stands for a `QuantisedWeight`: its values, scales, zeros and block."""


class RowSlots(list[Any]):
    """Argument that stands for a `QuantisedRows`: its values, scales and dtype."""


class Slots(list[Any]):
    """The values of one run, by slot; None before a value is written and after it is freed.

    Attributes:
        fixed: the buffer, by slot, of each value that is the first rows of a buffer which never moves.
    """

    def __init__(self, values: Iterable[Any] = ()):
        super().__init__(values)
        self.fixed: dict[int, Tensor] = {}


class Step:
    """One function over slots: it reads some, writes some, and frees those without further readers.

    Args:
        function: the function that is called.
        args: its arguments, in which a `Slot` stands for the value there.
        targets: destinations of the results: (part of the result, slot); part None is the result itself.
        op: the op of the call; None for a region, and for a call that takes another along.
        origin: the region or call that it was lowered from; None if no node of the graph stands for it.
    """

    __slots__ = ("args", "frees", "function", "op", "origin", "targets")

    def __init__(
        self,
        function: Callable[..., Any],
        args: list[Any],
        targets: tuple[tuple[int | None, int], ...],
        op: Op | None = None,
        origin: Region | Call | Fused | None = None,
    ):
        self.function, self.args, self.targets, self.op, self.origin = function, args, targets, op, origin
        self.frees: tuple[int, ...] = ()

    def run(self, slots: list[Any]) -> None:
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


class RowChunks:
    """Several steps as one, run a chunk of rows at a time where there are many.

    Values between the steps exist for one chunk only. Values that are read outside are made once at full size and
    filled chunk by chunk.

    Args:
        members: the steps in order; each acts on every row alone.
        rowed: slots from outside whose first dimension is the rows.
        counts: slots from outside whose last entry is the number of rows that are live.
        outputs: slots of results that something outside reads; the rows are their first dimension.
        limit: rows of a chunk at most.
    """

    __slots__ = ("counts", "frees", "limit", "members", "outputs", "rowed")

    def __init__(
        self,
        members: Sequence[Step],
        rowed: Sequence[int],
        counts: Sequence[int],
        outputs: Sequence[int],
        limit: int,
    ):
        self.members, self.limit = tuple(members), limit
        self.rowed, self.counts, self.outputs = tuple(rowed), tuple(counts), tuple(outputs)
        self.frees: tuple[int, ...] = ()
        own = self._written() - set(outputs)
        last = {slot: member for member in self.members for slot in (member.reads() | member.writes()) & own}
        for member in self.members:
            member.frees = tuple(sorted(slot for slot, reader in last.items() if reader is member))

    def run(self, slots: list[Any]) -> None:
        """Run the steps: as they are up to `limit` rows, above it in as few chunks as may be, of one size."""
        rows = len(slots[self.rowed[0]])
        if rows <= self.limit:
            for member in self.members:
                member.run(slots)
        else:
            size = -(-rows // -(-rows // self.limit))
            for begin in range(0, rows, size):
                self._run_chunk(slots, begin, min(begin + size, rows), rows)
        for slot in self.frees:
            slots[slot] = None

    def _run_chunk(self, slots: list[Any], begin: int, end: int, rows: int) -> None:
        own = list(slots)
        for slot in self.rowed:
            own[slot] = slots[slot][begin:end]
        for slot in self.counts:
            own[slot] = (slots[slot][-1:] - begin).clamp(min=0)
        for member in self.members:
            member.run(own)
        for slot in self.outputs:
            part: Tensor = own[slot]
            if begin == 0:
                slots[slot] = part.new_empty((rows, *part.shape[1:]))
            slots[slot][begin:end].copy_(part)

    def reads(self) -> set[int]:
        """Slots from outside."""
        return set().union(*(member.reads() for member in self.members)) - self._written()

    def writes(self) -> set[int]:
        """Slots that something outside reads."""
        return set(self.outputs)

    def _written(self) -> set[int]:
        return set().union(*(member.writes() for member in self.members))


AnyStep = Step | RowChunks


def single(steps: Iterable[AnyStep]) -> Iterator[Step]:
    """The steps one by one, those within chunks included."""
    for step in steps:
        yield from step.members if isinstance(step, RowChunks) else (step,)


def calls_of(steps: Iterable[AnyStep]) -> Iterator[Step]:
    """The steps that call an op, those within chunks included."""
    return (step for step in single(steps) if step.op is not None)


@contextmanager
def instead(steps: Iterable[Step], function_of: Callable[[Step], Callable[..., Any]]) -> Iterator[None]:
    """Context in which each step calls `function_of(step)` in place of its own function."""
    plain = {step: step.function for step in steps}
    for step in plain:
        step.function = function_of(step)
    try:
        yield
    finally:
        for step, function in plain.items():
            step.function = function


def observed(step: Step, observer: Observer) -> Callable[..., Any]:
    """Wrap the function of a step that calls an op, so that an observer sees its calls."""
    function, op = step.function, step.op
    assert op is not None

    def call(*args: Any) -> Any:
        result = function(*args)
        observer(op, args, result)
        return result

    return call


def read_by(steps: Iterable[AnyStep]) -> set[int]:
    """Slots that any of the steps reads."""
    return {slot for step in steps for slot in step.reads()}


def written_by(steps: Iterable[AnyStep]) -> set[int]:
    """Slots that any of the steps writes."""
    return {slot for step in steps for slot in step.writes()}


def _fill(arg: Any, slots: list[Any]) -> Any:
    if isinstance(arg, Slot):
        return slots[arg]
    if isinstance(arg, StoredSlots):
        values, scales, zeros, block = (_fill(a, slots) for a in arg)
        return QuantisedWeight(values, scales, zeros, block)
    if isinstance(arg, RowSlots):
        values, scales, dtype = (_fill(a, slots) for a in arg)
        return QuantisedRows(values, scales, dtype)
    return [_fill(a, slots) for a in arg] if isinstance(arg, list) else arg


def _slots_in(args: Iterable[Any]) -> Iterable[int]:
    for arg in args:
        if isinstance(arg, Slot):
            yield arg
        elif isinstance(arg, list):
            yield from _slots_in(arg)
