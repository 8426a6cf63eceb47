"""Measure on dummy steps how much a program allocates and how long it takes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dgraph.engine.memory.dummy_step import DummyStep
from dgraph.lowering.executor import LoweredProgram
from dgraph.private.torch import StorageWatch

RUNS = 5
"""Timed runs of a step, of which the median counts, after as many as it takes to compile and record it."""


@dataclass(frozen=True)
class Measured:
    """Measurement of one dummy step.

    Attributes:
        peak: bytes that it allocates beside weights, inputs and caches, most at a time.
        kept: bytes that libraries allocated in their first call and hold from then on.
    """

    peak: int
    kept: int


def can_measure(program: LoweredProgram) -> bool:
    """True if allocations can be seen: on a GPU by torch's allocator; elsewhere where nothing is compiled."""
    return program.graph.device.type == "cuda" or program.backend == "eager"


def measure(program: LoweredProgram, step: DummyStep) -> Measured | None:
    """Run a dummy step twice, without CUDA graphs, and measure the second run's allocations; None if they are hidden.

    Unused memory of torch's allocator is given back before, so that a budget that fits is not refused, and after.
    """
    device = program.graph.device
    if not can_measure(program):
        return None
    inputs = step.inputs(program.inputs.values(), device)
    with program.one_by_one():
        if device.type != "cuda":
            program(inputs, step.rows)
            watch = StorageWatch()
            with watch:
                program(inputs, step.rows)
            return Measured(watch.peak, 0)
        give_back(device)
        with torch.cuda.device(device):
            before = _allocated(device)
            program(inputs, step.rows)
            held = _allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            program(inputs, step.rows)
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device) - held
    del inputs
    give_back(device)
    return Measured(peak, max(0, held - before))


def seconds(program: LoweredProgram, step: DummyStep) -> float:
    """Seconds of a warm dummy step as the decode loop would run it: the median of `RUNS` runs."""
    device = program.graph.device
    inputs = step.inputs(program.inputs.values(), device)
    synchronise: Callable[[], object] = (
        (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    )
    times = []
    for run in range(RUNS + 2):
        synchronise()
        began = time.perf_counter()
        program(inputs, step.rows)
        synchronise()
        if run > 1:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def give_back(device: torch.device) -> None:
    """Free reference cycles, such as the CUDA graphs of a dropped program, and the allocator's unused memory."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _allocated(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
