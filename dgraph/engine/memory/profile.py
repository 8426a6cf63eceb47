"""Profile of a device's memory, and the share that is left for keys and values (dLLM-Serve, sections 4.2, 4.3).

The peak of activations is predicted from the lowered programs (`dgraph.lowering.footprint`). One dummy step at the full
row budget, with the bound on logits in force, measures it. Activations, weights, CUDA graphs, memory of libraries, the
state of the sequences and a guard are taken off the device's memory; the rest is for keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dgraph.engine.memory.kv_cost import KVCost
from dgraph.engine.memory.peaks import Budget, Profiled, found_or_measured
from dgraph.errors import InputError
from dgraph.runtime.loop.step_inputs import declared

ROWS = {"cuda": 16384, "cpu": 1024}
"""Rows of a step at most, unless the caller says otherwise (dLLM-Serve, Table 3, has 16,384 on an L40S)."""
SHORTEST = 512
"""The first length that a report tells of; the others double, up to that of the longest sequence."""
CPU_MEMORY = 4 << 30
"""Bytes that a CPU is taken to have, unless the caller says otherwise."""
GUARD = 0.02
"""Share of a GPU's memory that stays free: the allocator rounds and fragments, and libraries need varying amounts."""


@dataclass(frozen=True)
class Profile:
    """Memory of a device by use, under a budget; everything in bytes, but for counts of rows.

    Attributes:
        model, recipe, device: names of the model, the recipe and the device that were profiled.
        rows: of a step at most: the bucket of the number that was asked for.
        logit_rows: rows whose logits exist at a time, at most.
        sequences: that the decode state has room for.
        positions: of the longest sequence.
        memory: of the device, less the memory in use outside this process's torch; or the limit that the caller gives.
        guard: of that, what stays free.
        weights: each storage once.
        libraries: bytes that libraries took in their first call and hold.
        graphs: bytes that CUDA graphs hold; before any is recorded, those that the graphs of a full step will hold.
        state: inputs of a step, and of each sequence between steps the ids of its longest canvas.
        predicted: activations at their peak, of the programs and as `footprint` says.
        measured: the same, as a dummy step showed; None where it cannot be seen (compiled code on a CPU).
        groups: predicted peaks while nodes of a group run; see `dgraph.lowering.footprint.GROUPS`.
        unbounded: the peak of the LM head if all rows had logits at a time.
        kv_cost: bytes of a sequence's keys and values.
        steps: (rows, rows of keys, seconds) of steps that were timed.
    """

    model: str
    recipe: str
    device: str
    rows: int
    logit_rows: int
    sequences: int
    positions: int
    memory: int
    guard: int
    weights: int
    libraries: int
    graphs: int
    state: int
    predicted: int
    measured: int | None
    groups: dict[str, int]
    unbounded: int
    kv_cost: KVCost
    steps: tuple[tuple[int, int, float], ...] = ()

    @property
    def activations(self) -> int:
        """Peak bytes of activations: the larger of the measured and the predicted peak."""
        return max(self.predicted, self.measured or 0)

    @property
    def without_bound(self) -> int:
        """Peak bytes of activations if all rows had logits at a time."""
        return max(self.activations, self.unbounded)

    @property
    def left(self) -> int:
        """Bytes left for keys and values; below 0 if the rest takes more than there is."""
        return self._left(self.activations)

    @property
    def kv(self) -> int:
        """Bytes for keys and values, at least 0."""
        return max(0, self.left)

    def _left(self, activations: int) -> int:
        taken = self.guard + self.weights + self.libraries + self.graphs + self.state + activations
        return self.memory - taken

    def pages(self, page_size: int) -> int:
        """Pages of `page_size` positions that fit, were there none for layers with a window.

        Raises:
            InputError: page_size below 1.
        """
        if page_size < 1:
            raise InputError(f"a page holds at least 1 position, got page_size={page_size}.")
        return self.kv // max(1, self.kv_cost.position * page_size)

    def fits(self, length: int, response: int = 256, bounded: bool = True) -> int:
        """Number of sequences of a length that fit.

        Args:
            length: positions, prompt and response together.
            response: positions of the response, or half of the length if that is less; it matters only where not all
                keys are kept.
            bounded: False: if all rows had logits at a time.

        Raises:
            InputError: length below 1, or response out of range.
        """
        each = self.kv_cost.sequence(length, min(response, max(1, length // 2)))
        left = self.kv if bounded else max(0, self._left(self.without_bound))
        return left // max(1, each)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that a report tells of, up to that of the longest sequence."""
        found = [SHORTEST]
        while found[-1] < self.positions:
            found.append(2 * found[-1])
        return (*found[:-1], self.positions)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the figures that follow from them."""
        return {
            **asdict(self),
            "kv_cost": self.kv_cost.to_json(),
            "steps": [list(step) for step in self.steps],
            "activations": self.activations,
            "kv": self.kv,
            "fits": {str(length): self.fits(length) for length in self.lengths},
            "fits_without_bound": {str(length): self.fits(length, bounded=False) for length in self.lengths},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Profile:
        """The profile that `to_json` described.

        Raises:
            InputError: a field is missing.
        """
        try:
            given = {name: value[name] for name in cls.__dataclass_fields__}
        except KeyError as error:
            raise InputError(f"this profile has no entry {error}; give what Profile.to_json wrote.") from None
        kv_cost, steps = KVCost.from_json(given["kv_cost"]), tuple(tuple(step) for step in given["steps"])
        return cls(**{**given, "kv_cost": kv_cost, "steps": steps})


def profile(
    optimized: Profiled,
    rows: int | None = None,
    logit_rows: int | None = None,
    memory: int | None = None,
    *,
    sequences: int | None = None,
    steps: bool = False,
    measured: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Profile the memory of a device when a model is served under a budget.

    Measurements are kept in the artifact cache, per model, recipe, device and budget.

    Args:
        optimized: the model under its recipe.
        rows: of a step, at most; None for `ROWS`. A bidirectional model refreshes a sequence in one step.
        logit_rows: rows whose logits exist at a time, at most; None for the recipe's.
        memory: bytes that may be used in all; None for the GPU's, or `CPU_MEMORY`.
        sequences: at a time, at most; None for as many as have a block each in a step.
        steps: also time steps of several row counts.
        measured: False to run no dummy step: figures that were not measured before are only predicted.
        progress: called with the name of each stage of the work, for display.

    Raises:
        InputError: a number out of range.
    """
    for name, value in (("rows", rows), ("logit_rows", logit_rows), ("memory", memory), ("sequences", sequences)):
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name} must be a number of at least 1, or None, got {value!r}.")
    if logit_rows is not None and logit_rows != optimized.recipe.logit_rows:
        optimized = optimized.with_logit_rows(logit_rows)
    device, spec = optimized.programs["step"].graph.device, optimized.spec
    budget = Budget.of(optimized, rows or ROWS.get(device.type, ROWS["cpu"]), sequences)
    peaks = found_or_measured(optimized, budget, steps, measured, progress or (lambda what: None))
    limit, guard = _limit(device, memory)
    return Profile(
        model=optimized.model.name,
        recipe=optimized.recipe.name,
        device=_name(device),
        rows=budget.rows,
        logit_rows=min(optimized.recipe.logit_rows or budget.rows, budget.rows),
        sequences=budget.sequences,
        positions=spec.max_positions,
        memory=limit,
        guard=guard,
        weights=weight_bytes(optimized),
        libraries=peaks.libraries,
        graphs=max(peaks.graphs, optimized.graph_pool.bytes if optimized.graph_pool is not None else 0),
        state=budget.input_bytes(optimized) + 8 * budget.sequences * spec.max_positions,
        predicted=peaks.predicted,
        measured=peaks.measured,
        groups=peaks.groups,
        unbounded=peaks.unbounded,
        kv_cost=kv_cost_of(optimized),
        steps=peaks.steps,
    )


def kv_cost_of(optimized: Profiled) -> KVCost:
    """Cost of everything that the programs of a model keep per position."""
    inputs = declared({name: program.inputs for name, program in optimized.programs.items()}).values()
    return KVCost.of(inputs, optimized.spec, optimized.page_size, optimized.recipe.kv)


def weight_bytes(optimized: Profiled) -> int:
    """Bytes of a model's weights, those that passes have stacked among them; each storage once."""
    held = [*optimized.model.module.parameters(), *optimized.model.module.buffers()]
    held += [tensor for program in optimized.programs.values() for tensor in program.graph.tensors.values()]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in held)}
    return sum(storages.values())


def _limit(device: torch.device, memory: int | None) -> tuple[int, int]:
    """Bytes that may be used, and bytes of them that stay free."""
    if device.type != "cuda":
        return memory or CPU_MEMORY, 0
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return memory or total - max(0, others), int(GUARD * total)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
