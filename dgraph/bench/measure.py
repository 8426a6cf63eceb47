"""Measurement of one arm: build, warm-up, timed runs, row counts, and on a GPU a profile."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dgraph.api import CompiledModel, optimize
from dgraph.bench.arms import Arm
from dgraph.bench.floor import Device, Floor, StepCount, Work, floor_of, work_of
from dgraph.bench.load import Load
from dgraph.bench.profile import Profile, profiled
from dgraph.bench.record import evicts
from dgraph.engine.memory.profile import kv_cost_of
from dgraph.families import Model
from dgraph.runtime.results import Progress
from dgraph.runtime.stats import GenerationStats, StepRecord

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Memory:
    """Bytes on the device.

    Attributes:
        weights: weights of the model, stacked ones once.
        kv: keys, values and other cached tensors of the prompts and their new tokens, in whole pages.
        peak: most that was allocated at a time; None on a CPU.
        reserved: most that the allocator held, graphs included; None on a CPU.
    """

    weights: int
    kv: int
    peak: int | None
    reserved: int | None

    @property
    def other(self) -> int | None:
        """Reserved bytes beside weights and KV: activations, logits, state and graphs; None on a CPU."""
        return None if self.reserved is None else max(0, self.reserved - self.weights - self.kv)

    def to_json(self) -> dict[str, int | None]:
        """Plain values."""
        return {
            "weights": self.weights,
            "kv": self.kv,
            "peak": self.peak,
            "reserved": self.reserved,
            "other": self.other,
        }


@dataclass(frozen=True)
class Measured:
    """Measurements of one arm.

    Attributes:
        label: label of the arm.
        steps: steps of the decode loop, per run.
        step: seconds per step, the median over runs of a run's mean, without the prefill.
        median: seconds of the median step over all runs: one without a refresh, if fewer than half of them have one.
        spread: time of the slowest run over that of the fastest.
        stats: statistics of the last run.
        counts: row counts of each step.
        committed: tokens committed per step, over all sequences.
        built: seconds to capture, rewrite and compile.
        graphs: number of recorded CUDA graphs of stages; None if stages are not replayed as graphs.
        floor: seconds per step that the products and attention alone take.
        memory: bytes on the device.
        profile: profile of a few steps; None on a CPU.
    """

    label: str
    steps: int
    step: float
    median: float
    spread: float
    stats: GenerationStats
    counts: tuple[StepCount, ...]
    committed: tuple[int, ...]
    built: float
    graphs: int | None
    floor: Floor
    memory: Memory
    profile: Profile | None

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens per second of the decode loop."""
        return self.stats.decoded / (self.step * self.steps)

    @property
    def ratio(self) -> float:
        """Measured time over the floor."""
        return self.step / self.floor.total

    def stage_ms(self) -> dict[str, float]:
        """Milliseconds per step by stage as the host measured them, without the prefill."""
        return {name: 1e3 * s / self.steps for name, s in self.stats.seconds.items() if name != "prefill"}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "label": self.label,
            "steps": self.steps,
            "ms_per_step": 1e3 * self.step,
            "ms_of_median_step": 1e3 * self.median,
            "spread": self.spread,
            "tokens_per_second": self.tokens_per_second,
            "rows_per_token": self.stats.rows_per_token,
            "host_ms_by_stage": self.stage_ms(),
            "floor_ms": self.floor.to_json(),
            "ratio": self.ratio,
            "graphs": self.graphs,
            "build_seconds": self.built,
            "memory": self.memory.to_json(),
            "rows": [list(c.rows) for c in self.counts],
            "head_rows": [c.head for c in self.counts],
            "committed": list(self.committed),
            "padded": dict(self.stats.padded),
            "profile": None if self.profile is None else self.profile.to_json(),
        }


@dataclass
class Counter:
    """Observer that counts the rows of each step.

    Attributes:
        evicts: True if the step program evicts rows.
        masked: True if its last layer runs on masked rows alone.
        windows: windows of its layers in positions; 0 for all positions.
        hides: True if kept rows see no position after the last kept one.
        counts: row counts of each step.
        committed: tokens committed per step, over all sequences.
    """

    evicts: bool
    masked: bool = False
    windows: frozenset[int] = frozenset({0})
    hides: bool = False
    counts: list[StepCount] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, optimized: CompiledModel, work: Work) -> Counter:
        """Make an observer for a program whose steps do that work."""
        return cls(evicts(optimized), work.masked, work.windows, work.hides)

    def __call__(self, record: StepRecord) -> None:
        """Count one step."""
        limit, found = record.limit.long(), [(torch.ones_like(record.candidate), record.limit.long())]
        if self.hides:
            last = _largest(record.sequence[record.kept], record.positions[record.kept] + 1)
            limit = torch.minimum(limit, last[record.sequence])
        if self.evicts:
            found.append((record.kept, limit))
        head = record.candidate & found[-1][0]
        if self.masked:
            found.append((head, limit))
        rows = [int(live.sum()) for live, _ in found]
        keys = [{window: self._keys(record, live, seen, window) for window in self.windows} for live, seen in found]
        self.counts.append(StepCount(tuple(rows), tuple(keys), int(head.sum())))
        self.committed.append(int(record.committed.sum()))

    @staticmethod
    def _keys(record: StepRecord, live: Tensor, limit: Tensor, window: int) -> int:
        """Positions that attention of the live rows reads.

        A sequence is read up to its largest limit. With a window it is read from the first position that one of its
        rows sees; without one, from the beginning.
        """
        sequence, end = record.sequence[live], limit[live]
        if not window:
            return int(_largest(sequence, end).sum())
        assert record.origin is not None, "rows that see a window say where they begin"
        before = (record.origin[live].long() - window + 1).clamp(min=0)
        # The least of them is the limit less the largest distance to it.
        return int(_largest(sequence, _largest(sequence, end)[sequence] - before).sum())


def _largest(sequence: Tensor, value: Tensor) -> Tensor:
    """i64[S], the largest value of each sequence; 0 for a sequence without rows."""
    size = int(sequence.max()) + 1 if len(sequence) else 0
    return torch.zeros(size, dtype=torch.int64).scatter_reduce_(0, sequence, value.long(), "amax")


@dataclass
class Clock:
    """Progress callback that records when each step began; the first call is after the prefill."""

    times: list[float] = field(default_factory=list)
    tell: Callable[[Progress], None] | None = None

    def __call__(self, progress: Progress) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())
        if self.tell is not None:
            self.tell(progress)

    @property
    def steps(self) -> int:
        """The number of steps that are over; at least 1."""
        return max(1, len(self.times) - 1)

    @property
    def seconds(self) -> float:
        """Seconds of all steps together."""
        return self.times[-1] - self.times[0]

    @property
    def each(self) -> list[float]:
        """Seconds of each step."""
        return [after - before for before, after in pairwise(self.times)] or [0.0]


@dataclass(frozen=True)
class Bench:
    """Settings of a measurement, and the function that measures an arm; see the options of `dgraph bench`."""

    model: Model
    load: Load
    device: Device
    backend: str = "inductor"
    buckets: str | Sequence[int] | None = None
    repeat: int = 3
    profile_steps: int = 8
    mesh: DeviceMesh | None = None
    weights: str | None = None

    def __call__(self, arm: Arm, tell: Callable[[str], None] | None = None) -> Measured:
        """Measure one arm.

        Args:
            arm: the arm to run.
            tell: called with a text for each thing that is done.

        Raises:
            DgraphError: an arm that cannot be built or run.
        """
        tell = tell or (lambda what: None)
        on_gpu = self.device.device.type == "cuda"
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device.device)
        begin = time.perf_counter()
        optimized = optimize(
            self.model,
            arm.recipe,
            backend=self.backend,
            buckets=self.buckets,
            graphs=arm.graphs,
            progress=tell,
            mesh=self.mesh,
            weights=self.weights,
        )
        built = time.perf_counter() - begin
        if optimized.transitions is not None:
            optimized.transitions.often = 0  # compile at once, as a long run would
        tell("warming up")
        self._generate(optimized)  # compiles, and captures every bucket that it meets
        runs = []
        for run in range(self.repeat):
            tell(f"run {run + 1} of {self.repeat}")
            clock = Clock()
            stats = self._generate(optimized, progress=clock)
            runs.append(clock)
        memory = self._memory(optimized)
        tell("counting rows")
        work = work_of(optimized.graph("step"))
        counter = Counter.of(optimized, work)
        self._generate(optimized, observer=counter)
        profile = self._profile(optimized, runs[-1].steps, tell) if on_gpu else None
        tell("floor")
        times = [clock.seconds / clock.steps for clock in runs]
        return Measured(
            arm.label,
            runs[-1].steps,
            statistics.median(times),
            statistics.median(each for clock in runs for each in clock.each),
            max(times) / min(times),
            stats,
            tuple(counter.counts),
            tuple(counter.committed),
            built,
            len(optimized.graph_pool.recorded) if optimized.graph_pool is not None else None,
            floor_of(work, counter.counts, self.device),
            memory,
            profile,
        )

    def _generate(self, optimized: CompiledModel, **extra: Any) -> GenerationStats:
        return optimized.generate(decoding=self.load.decoding, input_ids=self.load.prompts, **extra).stats

    def _profile(self, optimized: CompiledModel, steps: int, tell: Callable[[str], None]) -> Profile | None:
        tell("profiling")
        stages = optimized.programs["step"].stage_names
        return profiled(lambda each: self._generate(optimized, progress=each), steps, self.profile_steps, stages)

    def _memory(self, optimized: CompiledModel) -> Memory:
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for phase in optimized.phases.values()
            for t in phase.graph.tensors.values()
        }
        cost = kv_cost_of(optimized)
        kv = sum(cost.sequence(len(p) + self.load.tokens, self.load.tokens) for p in self.load.prompts)
        peak = reserved = None
        if self.device.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device.device)
            reserved = torch.cuda.max_memory_reserved(self.device.device)
        return Memory(sum(storages.values()), kv, peak, reserved)
