"""Stages as CUDA graphs: one graph per bucket, captured when the bucket is first met.

A graph replays fixed addresses. So a stage's inputs are copied into buffers in front of each replay, and its outputs
into others at the end of it, except for the KV caches, which are read and written in place and belong to the key. All
buckets of a stage use the same buffers, and all graphs of a model the same memory for what lies between: stages run one
after another, and what a stage leaves in its buffers is read before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dgraph.lowering.executor import Runner, StagePlan
from dgraph.lowering.steps import Slots
from dgraph.torch_private import copy_all


class Replay(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run what was captured, on what the buffers hold now."""
        ...


@dataclass
class _Captured:
    """One bucket of a stage: the graph, its input buffers, its outputs by slot, and whether capturing it ran it."""

    graph: Replay
    buffers: dict[int, Tensor]
    outputs: dict[int, Tensor]
    ran: bool


@dataclass
class GraphPool:
    """Captures stages of one model; shared by its phases.

    Attributes:
        limit: graphs kept at most; a bucket beyond it runs step by step.
        captured: names and row counts of what was captured, in order.
        bytes: device memory that graphs took: buffers, and what lies between them.
        refused: the same for buckets that did not fit or run in chunks of rows, with the reason.
        preparing: whether stages that nobody waits for are only captured, not run (a warm-up).
        capture: makes a graph from a function without arguments, which it runs once; set in tests, where there is no
            device.
    """

    limit: int = 256
    captured: list[tuple[str, int]] = field(default_factory=list)
    refused: list[tuple[str, int, str]] = field(default_factory=list)
    bytes: int = 0
    preparing: bool = False
    capture: Callable[[Callable[[], object]], Replay] | None = None
    _pool: Any = None
    _stream: Any = None

    def runner(self, plan: StagePlan) -> Runner:
        """A runner that replays graphs where it can; pass it to `LoweredProgram`."""
        return _GraphStage(plan, self)

    def record(self, function: Callable[[], object], warm: bool) -> Replay:
        """Capture a function's launches; what it returns is dropped.

        warm: run it first. Libraries allocate workspaces and set themselves up in their first call, which must not be
        part of a graph.
        """
        if self.capture is not None:
            return self.capture(function)
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        side = self._stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if warm:
                function()
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            # Relaxed: a kernel that this bucket is the first to need may be loaded meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        self.bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph


class _Buffers:
    """One buffer per slot, of which a bucket uses the first rows."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._held: dict[int, Tensor] = {}

    def like(self, slot: int, value: Tensor) -> Tensor:
        """A buffer of the value's shape. One that is too small is replaced; earlier graphs keep theirs."""
        held = self._held.get(slot)
        if held is None or held.shape[1:] != value.shape[1:] or len(held) < len(value):
            held = self._held[slot] = torch.empty_like(value, memory_format=torch.contiguous_format)
            self._pool.bytes += held.numel() * held.element_size()
        return held[: len(value)]


class _GraphStage:
    """Runs a stage by replaying the graph of its bucket."""

    def __init__(self, plan: StagePlan, pool: GraphPool):
        self.plan, self.pool = plan, pool
        self._captured: dict[Hashable, _Captured | None] = {}
        self._buffers = _Buffers(pool)
        self._warm = False
        self._in_chunks: set[int] = set()

    def __call__(self, slots: Slots, rows: int) -> None:
        """Run the stage; a bucket that cannot be captured, or is so large that it runs in chunks, runs step by step."""
        for gather in self.plan.bridge:
            gather.run(slots)
        if self.plan.chunk_rows is not None and rows > self.plan.chunk_rows:
            self._run_in_chunks(slots, rows, self.plan.chunk_rows)
            return
        key = tuple(slots[s].data_ptr() if s in self.plan.in_place else tuple(slots[s].shape) for s in self.plan.inputs)
        fresh = key not in self._captured
        if fresh:
            self._captured[key] = self._capture(slots, rows)
        found = self._captured[key]
        if found is None:
            for step in self.plan.steps:
                step.run(slots)
            return
        # A step that compares rows with what the caches hold of them must not run twice: it would compare with itself.
        if not (self.pool.preparing and self.plan.last) and not (fresh and found.ran):
            copy_all(list(found.buffers.values()), [slots[slot] for slot in found.buffers])
            found.graph.replay()
        for slot, value in found.outputs.items():
            slots[slot] = value

    def _run_in_chunks(self, slots: Slots, rows: int, most: int) -> None:
        # A graph would hold the memory of so many rows for good, and saves launches, which count for little here.
        if rows not in self._in_chunks:
            self._in_chunks.add(rows)
            self.pool.refused.append((self.plan.name, rows, f"more than {most} rows, which run in chunks"))
        for step in self.plan.steps:
            step.run(slots)

    def _capture(self, slots: Slots, rows: int) -> _Captured | None:
        if len(self.pool.captured) >= self.pool.limit:
            self.pool.refused.append((self.plan.name, rows, f"limit of {self.pool.limit} graphs"))
            return None
        outputs: dict[int, Tensor] = {}
        try:
            buffers = {s: self._buffers.like(s, slots[s]) for s in self.plan.inputs if s not in self.plan.in_place}
            copy_all(list(buffers.values()), [slots[slot] for slot in buffers])

            def run() -> None:
                own = list(slots)
                for slot, buffer in buffers.items():
                    own[slot] = buffer
                for step in self.plan.steps:
                    step.run(own)
                # Out of the shared memory, into which another stage's replay may write before they are read.
                made = {slot: own[slot] for slot in self.plan.outputs}
                outputs.update({slot: self._buffers.like(slot, value) for slot, value in made.items()})
                copy_all([outputs[slot] for slot in made], list(made.values()))

            graph = self.pool.record(run, warm=not self._warm)
        except torch.OutOfMemoryError as error:
            self.pool.refused.append((self.plan.name, rows, str(error).partition("\n")[0]))
            return None
        ran = self.pool.capture is not None or not self._warm
        self._warm = True
        self.pool.captured.append((self.plan.name, rows))
        return _Captured(graph, buffers, outputs, ran)
