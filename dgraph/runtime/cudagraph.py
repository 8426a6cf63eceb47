"""Stages as CUDA graphs: one graph per bucket, captured when the bucket is first met.

A graph replays fixed addresses. So a stage's inputs are copied into buffers of its own before each replay, except the
KV caches, which are written in place and belong to the key. Graphs of a model share one memory pool: a replay may
overwrite what another graph left there, which is sound because stages run one after another and whatever outlives a
stage is copied out of the pool first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dgraph.lowering.executor import Runner, Slots, StagePlan
from dgraph.torch_private import copy_all

WARM_UP_RUNS = 2
"""Runs in front of a capture: libraries allocate workspaces and kernels are loaded on first use."""


class Replay(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run what was captured, on what the buffers hold now."""
        ...


@dataclass
class _Captured:
    """One bucket of a stage: the graph, its input buffers and its outputs by slot."""

    graph: Replay
    buffers: dict[int, Tensor]
    outputs: dict[int, Tensor]


@dataclass
class GraphPool:
    """Captures stages of one model; shared by its phases.

    Attributes:
        limit: graphs kept at most; a bucket beyond it runs step by step.
        captured: names and row counts of what was captured, in order.
        bytes: device memory that captures took: input buffers and what the graphs keep for their intermediates.
        refused: the same for buckets that did not fit, with the reason.
        capture: makes a graph from a function without arguments; replaced in tests, where there is no device.
    """

    limit: int = 128
    captured: list[tuple[str, int]] = field(default_factory=list)
    refused: list[tuple[str, int, str]] = field(default_factory=list)
    bytes: int = 0
    capture: Callable[[Callable[[], None]], Replay] | None = None
    _pool: Any = None

    def runner(self, plan: StagePlan) -> Runner:
        """A runner that replays graphs where it can; pass it to `LoweredProgram`."""
        return _GraphStage(plan, self)

    def record(self, function: Callable[[], None]) -> Replay:
        """Capture a function's launches."""
        if self.capture is not None:
            return self.capture(function)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # as entering a capture does; else what that frees would hide what the capture takes
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        self.bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph


class _GraphStage:
    """Runs a stage by replaying the graph of its bucket."""

    def __init__(self, plan: StagePlan, pool: GraphPool):
        self.plan, self.pool = plan, pool
        self._captured: dict[Hashable, _Captured | None] = {}

    def __call__(self, slots: Slots, rows: int) -> None:
        """Run the stage; a bucket that cannot be captured runs step by step."""
        for step in self.plan.bridge:
            step.run(slots)
        key = tuple(slots[s].data_ptr() if s in self.plan.in_place else tuple(slots[s].shape) for s in self.plan.inputs)
        if key not in self._captured:
            self._captured[key] = self._capture(slots, rows)
        found = self._captured[key]
        if found is None:
            for step in self.plan.steps:
                step.run(slots)
            return
        copy_all(list(found.buffers.values()), [slots[slot] for slot in found.buffers])
        found.graph.replay()
        # The pool's memory is the next replay's: what the bridge or the cut reads is read before that, and what
        # outlives the stages behind is copied.
        for slot, value in found.outputs.items():
            slots[slot] = value.clone() if slot in self.plan.outlives else value

    def _capture(self, slots: Slots, rows: int) -> _Captured | None:
        if len(self.pool.captured) >= self.pool.limit:
            self.pool.refused.append((self.plan.name, rows, f"limit of {self.pool.limit} graphs"))
            return None
        buffers = {s: slots[s].clone() for s in self.plan.inputs if s not in self.plan.in_place}
        outputs: dict[int, Tensor] = {}

        def run() -> None:
            own = list(slots)
            for slot, buffer in buffers.items():
                own[slot] = buffer
            for step in self.plan.steps:
                step.run(own)
            outputs.update({s: own[s] for s in self.plan.outputs})

        try:
            graph = self.pool.record(run)
        except torch.OutOfMemoryError as error:
            self.pool.refused.append((self.plan.name, rows, str(error).partition("\n")[0]))
            return None
        self.pool.captured.append((self.plan.name, rows))
        return _Captured(graph, buffers, outputs)
