"""Stages as CUDA graphs: one graph per bucket, recorded when the bucket is first met, or ahead (a warm-up).

A graph replays fixed addresses. So a stage's inputs are copied into buffers before each replay, and its outputs into
others at the end of it. KV caches are the exception: they are read and written in place and belong to the key. All
buckets of a stage use the same buffers. All graphs of a model use the same memory for intermediate values. That is safe
since stages run one after another, and a stage's output buffers are read before the next step. The first stage's inputs
are copied whole, before the host has read their row count. Only the replay is left to do then.

A cache that has grown is another tensor, so graphs that read the old one are never replayed again: `GraphPool.keep`
drops them. Its address may be that of the old one, since memory is handed out in pieces of 2 MiB. A kernel that was
recorded with the old number of pages finds zeros in the pages after them. So a cache is identified by its address and
its size (`place_of`). A pool that is full drops a graph that was not replayed for long.

After a cut the host has just read how many rows live on, and the device waits for it. So the stage before posts that
number in the midst of its graph, before outputs are copied, and the stage after the cut copies nothing. Its graph reads
the buffers of the stages before, whose addresses belong to the key, and begins with the gathers of the living rows.
The gathers take whole buffers, since the bucket of the stage before, and thus the number of filled rows, is no part of
the key. The rows that an index names are always filled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dgraph.errors import warn
from dgraph.lowering.instructions import AnyInstruction, Registers, read_by, written_by
from dgraph.lowering.stage import Launch, Living, LoweredStage, Runner, cut_rows, live_rows, run_in_order
from dgraph.ops import counters
from dgraph.private.torch import copy_all
from dgraph.runtime.graphs.pinned import Mapped

GRAPH_ROWS = 2048
"""Rows of prompts that are forwarded by a graph, at most.

With a graph, an H200 takes 5.1 ms instead of 17.6 for 64 rows of an 8B model. From 1,024 rows on it is busy for longer
than the host takes to launch, so a graph only frees the host. A graph of 2,048 rows holds 96 MiB more
(benchmarks/results/serving.md).
"""
Place = tuple[int, int]
"""Address of a tensor's memory, and its number of elements."""
IDLE = 16
"""A full pool drops a graph that was not replayed in the last IDLE * limit runs: recording costs as much as many."""


def place_of(value: Tensor) -> Place:
    """Address and size of a tensor, which identify it for a recorded graph."""
    return value.data_ptr(), value.numel()  # a shape takes the host longer, and every step asks for each cache


class Replay(Protocol):
    """A recorded CUDA graph."""

    def replay(self) -> None:
        """Run the recorded launches on the present contents of the buffers."""
        ...


@dataclass
class _Recorded:
    """One bucket of a stage.

    Attributes:
        graph: the recorded CUDA graph.
        copied: inputs that are copied before a replay, by register: the first rows of their buffers.
        outputs: outputs by register: the first rows of their buffers.
        buffers: whole buffers of all inputs and outputs that do not lie in place, by register.
        version: version of the buffers after recording.
        ran: True if recording also ran it.
        held: its entry in the pool.
    """

    graph: Replay
    copied: dict[int, Tensor]
    outputs: dict[int, Tensor]
    buffers: dict[int, Tensor]
    version: int
    ran: bool
    held: Held


@dataclass(eq=False)
class Held:
    """A graph that the pool counts.

    Attributes:
        places: places of the tensors that it reads or writes in place, outside of its buffers.
        forget: removes it from where its owner keeps it.
        used: number of the run that replayed it last.
    """

    places: frozenset[Place]
    forget: Callable[[], object]
    used: int


@dataclass
class GraphPool:
    """Records stages of one model as CUDA graphs; shared by its phases.

    Attributes:
        limit: graphs kept at a time. A full pool drops the least recently used if it has been idle (see `IDLE`); else
            a further bucket runs op by op, with a `DgraphWarning` the first time.
        recorded: names and row counts of all graphs that were recorded, in order, dropped ones among them.
        bytes: device memory that graphs took: buffers, and intermediate values.
        refused: names and row counts of buckets that did not fit or have too many rows, with the reason; each once.
        preparing: True in a warm-up: last stages, whose outputs are not needed then, are recorded but not replayed.
        recorder: makes a graph from a function without arguments, which it runs once; set in tests without a device.
    """

    limit: int = 256
    recorded: list[tuple[str, int]] = field(default_factory=list)
    refused: list[tuple[str, int, str]] = field(default_factory=list)
    bytes: int = 0
    preparing: bool = False
    recorder: Callable[[Callable[[], object]], Replay] | None = None
    _pool: Any = None
    _stream: Any = None
    _anchor: Any = None
    _held: OrderedDict[Held, None] = field(default_factory=OrderedDict)  # the least recently used first
    _runs: int = 0
    _places: dict[str, Place] = field(default_factory=dict)

    @property
    def live(self) -> int:
        """Graphs that can be replayed."""
        return len(self._held)

    def keep(self, caches: Mapping[str, Tensor]) -> None:
        """Set the present caches by name; graphs that read a replaced one are dropped."""
        now = {name: place_of(cache) for name, cache in caches.items()}
        gone = {place for name, place in self._places.items() if now.get(name, place) != place}
        self._places |= now
        if gone:
            for held in [held for held in self._held if held.places & gone]:
                self.let_go(held)

    def hold(self, name: str, rows: int, places: Iterable[Place], forget: Callable[[], object]) -> Held:
        """Count a graph that was recorded; see `Held`."""
        held = Held(frozenset(places), forget, self._runs)
        self._held[held] = None
        self.recorded.append((name, rows))
        return held

    def use(self, held: Held) -> None:
        """Note that a graph is replayed."""
        self._runs += 1
        held.used = self._runs
        self._held.move_to_end(held)

    def let_go(self, held: Held) -> None:
        """Drop a graph, and the reference that its owner holds."""
        if held in self._held:
            del self._held[held]
            held.forget()

    def has_room(self, name: str, rows: int) -> bool:
        """Make room for one more graph, by dropping the least recently used if it is idle, and report success.

        Without room, the bucket is noted as refused; see `limit`.
        """
        self._runs += 1
        if len(self._held) < self.limit:
            return True
        if self._held:
            oldest = next(iter(self._held))
            if self._runs - oldest.used > IDLE * self.limit:
                self.let_go(oldest)
                return True
        reason = f"limit of {self.limit} graphs"
        if self.limit and all(why != reason for _, _, why in self.refused):
            warn(
                f"{self.limit} CUDA graphs are in use, the most that are kept: {name!r} on {rows} rows runs op by op, "
                f"and so will others, which takes longer. Use fewer buckets (buckets='hybrid', or a list), or set "
                f"graph_pool.limit."
            )
        self.refuse(name, rows, reason)
        return False

    def refuse(self, name: str, rows: int, reason: str) -> None:
        """Note, once, why a bucket has no graph."""
        if (name, rows, reason) not in self.refused:
            self.refused.append((name, rows, reason))

    def runner(self, stage: LoweredStage) -> Runner:
        """A runner that replays graphs where it can; pass it to `LoweredProgram`."""
        return _GraphStage(stage, self)

    def record(self, function: Callable[[], object], warm: bool) -> Replay:
        """Record a function's launches; its result is dropped.

        warm: run it first. Libraries allocate workspaces and set themselves up in their first call, which must not be
        part of a graph.
        """
        if self.recorder is not None:
            return self.recorder(function)
        if self._pool is None:
            self._open()
        side = self._stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if warm:
                function()
            before = torch.cuda.memory_reserved()
            graph = self._recorded(function)
        torch.cuda.current_stream().wait_stream(side)
        self.bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph

    def _open(self) -> None:
        """Begin the memory that the graphs share.

        The allocator drops it with the last graph in it, and refuses to record into it from then on. So it holds a
        graph of its own, in case all others are dropped or fail.
        """
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._anchor = self._recorded(lambda: torch.zeros(1, device="cuda"))

    def _recorded(self, function: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a kernel that this bucket is the first to need may be loaded meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        try:
            with counters.shared():
                function()
        finally:
            graph.capture_end()
        return graph


class _Buffers:
    """One buffer per register, of which a bucket uses the first rows.

    Attributes:
        version: increases whenever a buffer is made.
    """

    def __init__(self, pool: GraphPool, spare: bool) -> None:
        self._pool, self._spare, self.version = pool, spare, 0
        self._held: dict[int, Tensor] = {}

    def like(self, register: int, value: Tensor, rows: int = 0) -> Tensor:
        """A buffer with room for the value, and for at least `rows` rows.

        One that is too small is replaced; earlier graphs keep theirs. If later stages read it (`spare`), the new one
        has at least twice the rows, since their graphs are recorded again with it.
        """
        found = self.known(register, value, rows)
        if found is None:
            held = self._held.get(register)
            rows = max(rows, len(value), 2 * len(held) if held is not None and self._spare else 0)
            found = self._held[register] = value.new_empty((rows, *value.shape[1:]))
            self.version += 1
            self._pool.bytes += found.numel() * found.element_size()
        return found

    def known(self, register: int, value: Tensor, rows: int = 0) -> Tensor | None:
        """The existing buffer if it has room for the value, and for `rows` rows; else None."""
        held = self._held.get(register)
        fits = held is not None and held.shape[1:] == value.shape[1:] and len(held) >= max(rows, len(value))
        return held if fits else None


@dataclass(frozen=True)
class _Sent:
    """Inputs that were copied into buffers before the bucket was known.

    Attributes:
        buffers: whole buffers, by register.
        rows: fewest rows of any input with a row dimension; None if nothing was sent.
        version: version of the buffers if all inputs were sent, else None.
    """

    buffers: Mapping[int, Tensor] = field(default_factory=dict)
    rows: int | None = None
    version: int | None = None


_Graphs = dict[int, _Recorded | None]
"""Graphs by bucket; None for a bucket that could not be recorded."""
_Known = tuple[tuple[Place, ...], _Graphs | None, _Graphs | None]
"""Places of the caches that the instructions read; graphs with the bridge; graphs without."""


class _GraphStage:
    """Runs a stage by replaying the graph of its bucket."""

    def __init__(self, stage: LoweredStage, pool: GraphPool):
        self.stage, self.pool = stage, pool
        self._plain = run_in_order(stage)
        self._everything: tuple[AnyInstruction, ...] = (*stage.bridge, *stage.instructions)
        # Inputs of the instructions if the bridge runs before their graph: those in place, and the rest.
        known = {*stage.inputs, *written_by(stage.bridge)} & read_by(stage.instructions)
        read = (*sorted(known), *stage.ahead)
        self._placed, self._given = ([s for s in read if (s in stage.in_place) is there] for there in (True, False))
        self._whole = [register for register in self._given if register not in stage.rowed]
        self._rowed = [register for register in self._given if register in stage.rowed]
        self._unread = stage.rowed.difference(self._given)
        self._alone: dict[Hashable, _Graphs] = {}
        self._bridged: dict[Hashable, _Graphs] = {}
        self._buffers = _Buffers(pool, spare=not stage.last)
        self._index = () if stage.index is None else (stage.index,)
        self._live: Mapped | None = None
        self._sent = _Sent()
        self._warm = False

    def __call__(self, registers: Registers) -> Launch:
        """Make the function that runs the stage on a bucket; a bucket without a graph runs instruction by instruction.

        A bucket has no graph if it cannot be recorded, or has too many rows. The device waits while the function runs,
        so all that does not depend on the bucket is found here.
        """
        places = tuple(place_of(registers[register]) for register in self._placed)
        bridged = self._graphs_of_bridge(registers)
        alone = None if self.stage.bridge else self._graphs_alone(registers, places)
        sent = self._send_ahead(registers)
        return partial(self._launch, registers, bridged or alone or {}, sent, (places, bridged, alone))

    def _launch(self, registers: Registers, graphs: _Graphs, sent: _Sent, known: _Known, rows: int) -> Living:
        """Replay the graph at once if there is one and nothing to send, since the device waits; else see `_run`."""
        found = graphs.get(rows)
        if found is None or self.pool.preparing:
            return self._run(registers, known, sent, rows)
        if found.copied and (sent is not self._sent or sent.version != found.version or rows > (sent.rows or 0)):
            return self._run(registers, known, sent, rows)
        found.graph.replay()
        return self._replayed(found, registers, rows)

    def _send_ahead(self, registers: Registers) -> _Sent:
        """Copy the inputs of a first stage, whole, into the existing buffers."""
        self._sent = _Sent()
        if self.stage.rowed:
            known = ((register, self._buffers.known(register, registers[register])) for register in self._given)
            sent = {register: buffer for register, buffer in known if buffer is not None}
            values = [registers[register] for register in sent]
            copy_all([buffer[: len(value)] for buffer, value in zip(sent.values(), values, strict=True)], values)
            rows = min((len(registers[register]) for register in self._rowed), default=None)
            self._sent = _Sent(sent, rows, self._buffers.version if len(sent) == len(self._given) else None)
        return self._sent

    def _send(
        self, copied: Mapping[int, Tensor], buffers: Mapping[int, Tensor], registers: Registers, rows: int, sent: _Sent
    ) -> None:
        """Copy inputs into a bucket's part of the buffers, unless they were sent ahead into these.

        Rows of the bucket beyond those of an input are zeroed.
        """
        missing = [register for register in copied if buffers[register] is not sent.buffers.get(register)]
        if missing:
            counts = [min(len(copied[register]), len(registers[register])) for register in missing]
            pairs = [
                (copied[register][:n], registers[register][:n]) for register, n in zip(missing, counts, strict=True)
            ]
            copy_all([target for target, _ in pairs], [source for _, source in pairs])
        if sent.rows is None or rows > sent.rows:
            for register in self._rowed:
                if register in copied and len(registers[register]) < rows:
                    copied[register][len(registers[register]) :].zero_()

    def _graphs_alone(self, registers: Registers, places: tuple[Place, ...]) -> _Graphs:
        """Graphs by bucket without the bridge, for caches in these places and inputs of these shapes."""
        return self._alone.setdefault((*places, *(registers[register].shape for register in self._whole)), {})

    def _graphs_of_bridge(self, registers: Registers) -> _Graphs | None:
        """Graphs by bucket with the bridge, which read the buffers of the stages before.

        None without a bridge, or if an input lies outside of these buffers.
        """
        stage = self.stage
        if not stage.bridge:
            return None
        key: list[Hashable] = []
        for register in stage.inputs:
            if register in stage.in_place:
                key.append(place_of(registers[register]))
                continue
            buffer = registers.fixed.get(register)
            if buffer is None:
                return None
            key.append(buffer.data_ptr())
            if register not in stage.sources and register != stage.index:
                key.append(registers[register].shape)
        return self._bridged.setdefault(tuple(key), {})

    def _run(self, registers: Registers, known: _Known, sent: _Sent, rows: int) -> Living:
        places, bridged, alone = known
        if sent is not self._sent:
            sent = _Sent()  # the buffers have been overwritten since
        stage = self.stage
        if stage.graph_rows is not None and rows > stage.graph_rows:
            self.pool.refuse(stage.name, rows, f"more than {stage.graph_rows} rows")
            return self._plain(registers)(rows)
        if bridged is not None:
            return self._replay(bridged, registers, rows, True, sent)
        cut_rows(registers, self._index, rows)
        with stage.tuned():
            for gather in stage.bridge:
                gather.run(registers)
        return self._replay(
            self._graphs_alone(registers, places) if alone is None else alone, registers, rows, False, sent
        )

    def _replay(self, graphs: _Graphs, registers: Registers, rows: int, bridged: bool, sent: _Sent) -> Living:
        """Run a graph, with or without the bridge; record it first if it does not exist."""
        found = graphs.get(rows)
        fresh = found is None and rows not in graphs
        if fresh and self.pool.has_room(self.stage.name, rows):
            found = graphs[rows] = self._record(registers, rows, bridged, partial(graphs.pop, rows))
        if found is None:
            cut_rows(registers, (*self.stage.rowed, *self._index), rows)
            with self.stage.tuned():
                for instruction in self._everything if bridged else self.stage.instructions:
                    instruction.run(registers)
            return partial(live_rows, registers, self.stage)
        # A step that compares rows with their cached values must not run twice: it would compare them with themselves.
        if not (self.pool.preparing and self.stage.last) and not (fresh and found.ran):
            self._send(found.copied, found.buffers, registers, rows, sent)
            found.graph.replay()
        return self._replayed(found, registers, rows)

    def _replayed(self, found: _Recorded, registers: Registers, rows: int) -> Living:
        """Update registers after a graph has been launched; return the function that reads how many rows live on."""
        self.pool.use(found.held)
        for values in (found.copied, found.outputs):
            for register, value in values.items():
                registers[register] = value
        cut_rows(registers, (*self._unread, *self._index), rows)
        registers.fixed.update(found.buffers)
        return self._living

    def _living(self) -> int:
        """Number of rows that live on after the last replayed graph."""
        return int(self._live.read()[0]) if self._live is not None else 0

    def _record(self, registers: Registers, rows: int, bridged: bool, forget: Callable[[], object]) -> _Recorded | None:
        stage = self.stage
        instructions = self._everything if bridged else stage.instructions
        written = written_by(instructions)
        cut_rows(registers, self._index, rows)
        given = list(registers)
        copied: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        buffers: dict[int, Tensor] = {}
        try:
            if bridged:
                buffers = {
                    register: registers.fixed[register] for register in stage.inputs if register not in stage.in_place
                }
                for register in stage.sources - stage.in_place:
                    given[register] = buffers[register]
            else:
                for register in self._given:
                    count = rows if register in stage.rowed else len(registers[register])
                    buffers[register] = self._buffers.like(register, registers[register], count)
                    given[register] = copied[register] = buffers[register][:count]
                self._send(copied, buffers, registers, rows, _Sent())

            def run() -> None:
                own = list(given)
                with stage.tuned():
                    for instruction in instructions:
                        instruction.run(own)
                if stage.live is not None:  # the rest of the graph runs while the host prepares the next
                    count = own[stage.live][-1:]
                    if self._live is None:
                        self._live = Mapped(count.shape, count.dtype, count.device)
                    copy_all([self._live.tensor], [count])
                    self._live.post()
                # Copied out of the shared memory, into which another stage's replay may write before they are read.
                made = {register: own[register] for register in stage.outputs if register in written}
                for register, value in made.items():
                    if register not in outputs:
                        buffers[register] = self._buffers.like(register, value)
                        outputs[register] = buffers[register][: len(value)]
                copy_all([outputs[register] for register in made], list(made.values()))

            graph = self.pool.record(run, warm=not self._warm)
        except torch.OutOfMemoryError as error:
            self.pool.refuse(stage.name, rows, str(error).partition("\n")[0])
            return None
        ran = self.pool.recorder is not None or not self._warm
        self._warm = True
        held = self.pool.hold(
            stage.name, rows, map(place_of, (registers[register] for register in stage.in_place)), forget
        )
        return _Recorded(graph, copied, outputs, buffers, self._buffers.version, ran, held)
