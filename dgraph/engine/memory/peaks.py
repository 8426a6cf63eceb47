"""Memory and time of a recipe's programs at a budget: predicted, measured, and kept in the artifact cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from dgraph.cache.key import Key, profile_key
from dgraph.engine.memory.dummy_step import DummyStep
from dgraph.engine.memory.measure import give_back, measure, seconds
from dgraph.errors import InputError
from dgraph.lowering.contents import contents
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.footprint import GROUPS, HEAD, footprint, size_of
from dgraph.lowering.kernels import Kernels, kernel_modules
from dgraph.lowering.regions import RegionCompiler
from dgraph.ranks.groups import ranks_of
from dgraph.recipes import Recipe
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.spec import ModelSpec

LONGEST = 4096
"""Positions of a sequence of a dummy step, at most: longer ones allocate hardly more, and take longer."""
FILE = "peaks.json"


class Profiled(Protocol):
    """The profiled model under a recipe, as `dgraph.optimize` gives it."""

    model: Any
    spec: ModelSpec
    recipe: Recipe
    compiler: RegionCompiler
    kernels: Kernels
    graph_pool: GraphPool | None
    programs: dict[str, LoweredProgram]
    page_size: int

    def with_logit_rows(self, rows: int) -> Profiled:
        """The same model with another bound on the rows whose logits exist at a time."""
        ...


@dataclass(frozen=True)
class Peaks:
    """Bytes at a budget, all programs of a recipe considered; see `dgraph.engine.memory.profile.Profile`.

    Attributes:
        predicted: activations, most at a time.
        groups: the same while nodes of a group run.
        unbounded: the same of the LM head if all rows had logits at a time.
        graphs: bytes that CUDA graphs will hold, those of a full step among them; 0 without.
        measured, libraries: peak, and bytes that libraries hold, as dummy steps showed; `measured` has None where
            allocations are hidden.
        steps: (rows, rows of keys, seconds) of steps; empty if none was timed.
    """

    predicted: int
    groups: dict[str, int]
    unbounded: int
    graphs: int
    measured: int | None
    libraries: int
    steps: tuple[tuple[int, int, float], ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Peaks:
        """The peaks that `dataclasses.asdict` described.

        Raises:
            TypeError, KeyError: other fields.
        """
        return cls(**{**value, "steps": tuple(tuple(step) for step in value["steps"])})


@dataclass(frozen=True)
class Budget:
    """Limits of a step.

    Attributes:
        rows: a bucket.
        sequences: at a time.
        length: positions of a sequence of a dummy step.
        block: rows of a block.
    """

    rows: int
    sequences: int
    length: int
    block: int

    @classmethod
    def of(cls, optimized: Profiled, rows: int, sequences: int | None) -> Budget:
        """The budget for row and sequence counts; rows are rounded up to a bucket.

        By default there are as many sequences as have a block each.

        Raises:
            InputError: rows below a block.
        """
        spec: ModelSpec = optimized.spec
        if rows < spec.block_length:
            raise InputError(f"rows={rows}: a step has room for a block of {spec.block_length} rows at least.")
        rows = optimized.programs["step"].buckets(rows)
        return cls(rows, sequences or rows // spec.block_length, min(spec.max_positions, LONGEST), spec.block_length)

    def step(self, optimized: Profiled, name: str) -> DummyStep:
        """The dummy step of a program: whole sequences where it may forward such, else a block of each."""
        causal, kv = optimized.spec.attention == "block_causal", optimized.recipe.kv
        length = self.length if causal else min(self.length, self.rows)
        blocks = name != "prefill" if causal else name == "step" and kv is not None
        width, vocab = self.block if blocks else min(length, self.rows), optimized.spec.vocab
        return DummyStep(self.rows, width, length, optimized.page_size, kv=kv, vocab=vocab)

    def input_bytes(self, optimized: Profiled, name: str | None = None) -> int:
        """Bytes of the inputs of a program, caches left out; if none is named, of that with the largest."""
        if name is None:
            return max(self.input_bytes(optimized, each) for each in optimized.programs)
        sizes, total = self.step(optimized, name).sizes, 0
        for spec in optimized.programs[name].inputs.values():
            if not spec.in_place:
                count = spec.dtype.itemsize
                for dim in spec.shape:
                    count *= size_of(dim, sizes)
                total += count
        return total


def found_or_measured(
    optimized: Profiled, budget: Budget, steps: bool, measured: bool, tell: Callable[[str], None]
) -> Peaks:
    """Find the peaks of a budget in the artifact cache, or predict and measure them now and put them there.

    Args:
        optimized: the profiled model.
        budget: of a step.
        steps: True: with times of steps.
        measured: False: peaks that are not in the cache are only predicted, and not put there.
        tell: called with the name of each stage of the work, for display.
    """
    store, key = optimized.compiler.store, _key(optimized, budget)
    known = None
    stored = store.find(key) if store is not None else None
    if store is not None and stored is not None:
        try:
            known = Peaks.from_json(json.loads(stored.files[FILE]))
        except (KeyError, TypeError, ValueError) as error:
            store.reject(key.digest, f"it does not load ({error})")
    # Measuring takes steps, which all ranks must run, or none.
    known = ranks_of(optimized.programs["step"].graph.sharding).exchange(known)[0]
    if known is not None and (known.steps or not steps):
        return known
    found = known or _peaks(optimized, budget, measured, tell)
    if steps:
        found = replace(found, steps=_timed(optimized, budget, tell))
        give_back(optimized.programs["step"].graph.device)
    if store is not None and (known or measured):
        with store.making(key.digest):
            store.put(key, {FILE: json.dumps(asdict(found)).encode()}, replace=True)
    return found


def _peaks(optimized: Profiled, budget: Budget, measured: bool, tell: Callable[[str], None]) -> Peaks:
    found = {}
    for name, program in optimized.programs.items():
        tell(f"predicting {name}")
        found[name] = footprint(program, budget.step(optimized, name).sizes)
    groups = {g: max(f.groups.get(g, 0) for f in found.values()) for g in GROUPS}
    bound, unbounded = optimized.recipe.logit_rows, groups[HEAD]
    if bound is not None and bound < budget.rows:
        tell("predicting all logits at a time")
        for name, program in optimized.with_logit_rows(budget.rows).programs.items():
            unbounded = max(unbounded, footprint(program, budget.step(optimized, name).sizes).groups.get(HEAD, 0))
    seen = []
    with optimized.kernels.remembered():
        for name, program in optimized.programs.items() if measured else ():
            tell(f"measuring {name}")
            one = measure(program, budget.step(optimized, name))
            seen += [one] if one is not None else []
    return Peaks(
        predicted=max(f.peak for f in found.values()),
        groups={g: size for g, size in groups.items() if size},
        unbounded=unbounded,
        graphs=_graphs(optimized, budget),
        measured=max(one.peak for one in seen) if seen else None,
        libraries=sum(one.kept for one in seen),
    )


def _graphs(optimized: Profiled, budget: Budget) -> int:
    """Bytes that CUDA graphs share: tensors between the ops of the largest, and inputs of the largest of each program.

    Rows that `select` gathers count as activations, of which everything that runs without a graph allocates less.
    """
    if optimized.graph_pool is None:
        return 0
    peak = inputs = 0
    for name in optimized.programs.keys() - {"select"}:
        program = optimized.programs[name]
        largest = replace(budget, rows=min(budget.rows, program.graph_rows or budget.rows))
        peak = max(peak, footprint(program, largest.step(optimized, name).sizes).peak)
        inputs += largest.input_bytes(optimized, name)
    return peak + inputs


def _timed(optimized: Profiled, budget: Budget, tell: Callable[[str], None]) -> tuple[tuple[int, int, float], ...]:
    """Steps of one block per sequence, at twice as many rows each time, over short and long sequences.

    All sequences read one sequence's keys. Where these are few, the device's cache holds them, and reading is cheaper
    than it will be.
    """
    bound = optimized.recipe.logit_rows
    if optimized.graph_pool is not None and bound is not None:
        # The graphs that are recorded here read the caches of dummy steps: they go with a copy.
        optimized = optimized.with_logit_rows(bound)
    program, counts, found = optimized.programs["step"], [budget.block], []
    whole = budget.step(optimized, "step")
    while 2 * counts[-1] <= budget.rows:
        counts.append(2 * counts[-1])
    with optimized.kernels.remembered():
        for rows in counts:
            for length in sorted({max(budget.block, budget.length // 4), budget.length}):
                tell(f"timing {rows} rows over {length} keys")
                step = replace(whole, rows=rows, width=budget.block, length=length, keeps=False)
                found.append((rows, step.keys, seconds(program, step)))
    return tuple(found)


def _key(optimized: Profiled, budget: Budget) -> Key:
    """Key of everything that the figures of a budget depend on.

    The programs stand in it themselves: neither model nor recipe says how weights are stored, which rows are rounded,
    or what a rank has.
    """
    step = optimized.programs["step"]
    facts = {
        "identity": f"{optimized.model.name} under {optimized.recipe.name}",
        "model": json.dumps(optimized.spec.to_json(), sort_keys=True),
        "recipe": json.dumps(optimized.recipe.to_json(), sort_keys=True),
        "budget": json.dumps(asdict(budget), sort_keys=True),
        "backend": optimized.compiler.backend,
        "graphs": str(optimized.graph_pool is not None),
        "ranks": str(step.graph.sharding or "one"),
        "buckets": json.dumps(step.buckets.to_json()),
        "page": str(optimized.page_size),
        "tuned": str(step.tuning is not None),
        **{f"program {name}": contents(program.graph) for name, program in sorted(optimized.programs.items())},
    }
    return profile_key(facts, step.graph.device, kernel_modules())
