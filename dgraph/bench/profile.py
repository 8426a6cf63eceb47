"""GPU time of a few steps, from the profiler: by group of kernels, by stage, and idle."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

KERNELS: dict[str, frozenset[str]] = {
    "attention": frozenset(
        {"_attend", "_attend_in_eight_bits", "_attend_in_roles", "_exact", "_mixed", "_attend_kept", "_attend_rows"}
        | {"_add_up_rows"}
    ),
    "focus": frozenset({"_list_members", "_receive", "_add_heads", "_select", "_list_kept", "_gather"}),
    "salience": frozenset(
        {"_drift", "_update", "_read", "_write_feature", "_merge", "_describe", "_divide", "_decide"}
        | {"_compare", "_least", "_sum_rows", "_rank_rows"}
    ),
    "selection": frozenset(
        {"_find", "_weigh", "_vote", "_mean", "_score", "_outline", "_rank", "_own", "_copy"}
        | {"share", "divide", "count_joint", "list_best"}
    ),
    "kv write": frozenset({"_write"}),
    "LM head": frozenset({"_list_rows", "_gather_rows", "_reduce", "_combine", "_weigh_ids", "_finish"}),
    "norms": frozenset({"_norm_rows", "_rotate_rows", "_quantise_live_rows"}),
    "GEMM": frozenset(
        {"_multiply", "_multiply_in_roles", "_multiply_stored", "_multiply_stored_in_roles", "_multiply_numbers"}
        | {"_multiply_group", "_multiply_group_numbers", "_multiply_rows_of_groups", "_multiply_units_of_groups"}
        | {"_dequantise"}
    ),
    "routing": frozenset(
        {"_route", "_share_experts", "_order_slots", "_spread_rows", "_gate_rows", "_gate_and_round_rows", "_sum_slots"}
    ),
}
"""dgraph's own kernels by group."""

SUMS = "_add_up"
"""Kernel that adds up the parts of the attention, selection or product that ran before it."""

CUT = "_list_kept"
"""The kernel after which the next stage begins."""

PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("over ranks", re.compile(r"nccl|all_reduce_kernel")),
    ("attention", re.compile(r"flash|fmha|attention", re.IGNORECASE)),
    ("GEMM", re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas", re.IGNORECASE)),
    ("regions", re.compile(r"^triton_")),
    ("copies", re.compile(r"^mem(cpy|set)", re.IGNORECASE)),
)
"""Patterns of other kernels' names by group; a kernel that matches none is the transition between steps, "state"."""

SYNCHRONISING = frozenset({"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"})


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy on the device; times in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Spent:
    """Time of a step that the kernels of one name take.

    Attributes:
        name: the kernels' name.
        group: their group; if they are in several, the one that took longest.
        calls: calls per step.
        ms: milliseconds per step, of all calls together.
    """

    name: str
    group: str
    calls: float
    ms: float


@dataclass(frozen=True)
class Profile:
    """Profile of a few steps on a GPU.

    Attributes:
        steps: number of steps.
        kernels: time per kernel name, the longest first.
        groups: milliseconds per step by group of kernels; "idle" is the rest of the time.
        stages: milliseconds per step by stage of the program, and "state" between two steps; empty if a step's end
            cannot be recognised.
        host_reads: copies from the device to the host per step.
        waits: calls per step in which the host waited for the device.
        launches: kernels per step.
    """

    steps: int
    kernels: tuple[Spent, ...]
    groups: dict[str, float]
    stages: dict[str, float]
    host_reads: float
    waits: float
    launches: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "steps": self.steps,
            "ms_by_group": self.groups,
            "ms_by_stage": self.stages,
            "host_reads_per_step": self.host_reads,
            "waits_per_step": self.waits,
            "kernels_per_step": self.launches,
            "kernels": [asdict(spent) for spent in self.kernels],
        }


class StepProfiler:
    """Progress callback that profiles steps `skip` .. `skip + steps - 1` of a generation and then ends it.

    It ends the generation by raising `Enough`: the session gives its pages back as after any error.
    """

    def __init__(self, skip: int, steps: int):
        from torch.profiler import ProfilerActivity, profile

        self.skip, self.steps = skip, steps
        self.profiler = profile(activities=[ProfilerActivity.CUDA])
        self._calls = 0
        self._running = False

    def __call__(self, progress: Any) -> None:
        """Start or end the profile. Called before every step, when the one before is over."""
        if self._calls == self.skip:
            torch.cuda.synchronize()
            self.profiler.start()
            self._running = True
        self._calls += 1
        if self._running and self._calls > self.skip + self.steps:
            self.stop()
            raise Enough

    def stop(self) -> None:
        """End the profile, if it runs."""
        if self._running:
            torch.cuda.synchronize()
            self.profiler.stop()
            self._running = False

    def result(self, stages: Sequence[str]) -> Profile:
        """The profile of the steps that ran. stages: names of the program's stages."""
        kernels, waits, reads = [], 0, 0
        for event in self.profiler.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels.append(Kernel(event.name, event.time_range.start, event.time_range.end))
                reads += "dtoh" in event.name.lower()
            else:
                waits += event.name in SYNCHRONISING
        steps = max(1, min(self.steps, self._calls - 1 - self.skip))
        # The profiler's own two synchronisations are not the program's.
        return summarise(kernels, steps, stages, reads, max(0, waits - 2))


class Enough(Exception):
    """Raised by the callback to end a generation when all steps are profiled."""


def profiled(generate: Callable[[StepProfiler], Any], total: int, steps: int, stages: Sequence[str]) -> Profile:
    """Profile steps in the middle of a generation, half of its steps at most.

    Args:
        generate: runs the generation with a progress callback.
        total: steps of the generation.
        steps: steps to profile.
        stages: names of the step program's stages.
    """
    count = min(steps, max(1, total // 2))
    profiler = StepProfiler((total - count) // 2, count)
    try:
        generate(profiler)
    except Enough:
        pass
    finally:
        profiler.stop()
    return profiler.result(stages)


def summarise(kernels: Sequence[Kernel], steps: int, stages: Sequence[str], reads: int, waits: int) -> Profile:
    """A profile from device events in any order."""
    ordered = sorted(kernels, key=lambda k: k.start)
    labels = groups_of([k.name for k in ordered])
    groups: dict[str, float] = {}
    by_name: dict[str, dict[str, list[float]]] = {}
    for kernel, label in zip(ordered, labels, strict=True):
        took = kernel.end - kernel.start
        groups[label] = groups.get(label, 0.0) + took
        by_name.setdefault(kernel.name, {}).setdefault(label, []).append(took)
    groups["idle"] = idle(ordered)
    by_stage: dict[str, float] = {}
    for kernel, stage in zip(ordered, stages_of([k.name for k in ordered], labels, stages), strict=False):
        by_stage[stage] = by_stage.get(stage, 0.0) + (kernel.end - kernel.start)
    scale = 1e-3 / steps
    spent = [
        Spent(
            name,
            max(found, key=lambda label: sum(found[label])),
            sum(map(len, found.values())) / steps,
            scale * sum(map(sum, found.values())),
        )
        for name, found in by_name.items()
    ]
    return Profile(
        steps,
        tuple(sorted(spent, key=lambda one: -one.ms)),
        {name: scale * us for name, us in sorted(groups.items(), key=lambda item: -item[1])},
        {name: scale * us for name, us in by_stage.items()},
        reads / steps,
        waits / steps,
        len(ordered) / steps,
    )


def groups_of(names: Sequence[str]) -> list[str]:
    """The group of each kernel, in the order in which they ran.

    Products right before the LM head's reduction belong to the LM head.
    """
    labels = [_group(name) for name in names]
    for i, name in enumerate(names):
        if name == SUMS:
            before = labels[i - 1] if i else ""
            labels[i] = before if before in ("GEMM", "selection") else "attention"
    head = False
    for i in reversed(range(len(labels))):
        if labels[i] == "LM head":
            head = True
        elif head and labels[i] == "GEMM":
            labels[i] = "LM head"
        else:
            head = False
    return labels


def _group(name: str) -> str:
    for group, known in KERNELS.items():
        if name in known:
            return group
    return next((group for group, pattern in PATTERNS if pattern.search(name)), "state")


def stages_of(names: Sequence[str], labels: Sequence[str], stages: Sequence[str]) -> list[str]:
    """The stage of each kernel.

    A step begins with the first kernel that does not belong to the transition, and ends with the LM head. The cut
    between stages is the kernel that lists rows. The result is empty for programs without dgraph's LM head, as their
    end cannot be recognised.
    """
    if "LM head" not in labels:
        return []
    found, current = [], ""
    for i, (name, label) in enumerate(zip(names, labels, strict=True)):
        if not current and label not in ("state", "copies"):
            current = stages[0]
        found.append(current or "state")
        if name == CUT and len(stages) > 1:
            current = stages[1]
        if label == "LM head" and "LM head" not in labels[i + 1 : i + 3]:
            current = ""
    return found


def idle(ordered: Sequence[Kernel]) -> float:
    """Microseconds between the first start and the last end in which no kernel ran."""
    total, reached = 0.0, ordered[0].start if ordered else 0.0
    for kernel in ordered:
        total += max(0.0, kernel.start - reached)
        reached = max(reached, kernel.end)
    return total
