"""Recipes: the passes of each phase, and how the decode loop runs the phases."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dgraph.errors import InputError, UnknownName
from dgraph.passes import PASSES
from dgraph.passes.base import Pass, check_pass, pass_from_json
from dgraph.passes.cache_kv import CacheKV
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.plans.block_cache import BLOCK_CACHES
from dgraph.plans.kv import KVPlan
from dgraph.plans.parts import Part
from dgraph.plans.rows import PARTS, RowPlan
from dgraph.types.card import Card, Described


@dataclass(frozen=True)
class Phase:
    """A program to derive from the captured graph.

    Attributes:
        name: "prefill", "step", or "select": the step in which some sequence chooses what it keeps.
        passes: applied in this order. Phases share the work of a common beginning.
        optional: names of passes that may apply nowhere.
    """

    name: str
    passes: tuple[Pass, ...]
    optional: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for step in self.passes:
            try:
                check_pass(step)
            except InputError as error:
                raise InputError(f"phase {self.name!r}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"phase": self.name, "passes": [p.to_json() for p in self.passes], "optional": sorted(self.optional)}


@dataclass(frozen=True, repr=False)
class Recipe(Described):
    """A method as a value: equal recipes give equal programs.

    Attributes:
        name: under which it was built.
        version: raised when the same options come to mean another program.
        phases: the programs, by phase.
        block_cache: rows of the current block that stay cached between its steps. "off": no rows; "dc": decoded rows;
            "dc+": decoded rows whose right neighbour is decoded too (FOCUS, section 4.3).
        recommit: True if a finished block is forwarded once more as a whole before it is committed to the KV cache.
        plan: rows that a step of a bidirectional model forwards. For a block-causal model, its full steps; None if its
            programs do not ask.
        kv: keys and values that stay; None for all of them.
    """

    name: str
    version: int
    phases: tuple[Phase, ...]
    block_cache: str = "off"
    recommit: bool = True
    plan: RowPlan | None = None
    kv: KVPlan | None = None

    def __post_init__(self) -> None:
        if self.block_cache not in BLOCK_CACHES:
            raise InputError(
                f"block_cache must be one of {', '.join(map(repr, BLOCK_CACHES))}, got {self.block_cache!r}."
            )
        if not isinstance(self.recommit, bool):
            raise InputError(f"recommit must be True or False, got {self.recommit!r}.")

    def card(self) -> Card:
        """See `Described`."""
        phases = ((phase.name, " > ".join(map(repr, phase.passes)) or "as captured") for phase in self.phases)
        facts = (
            *phases,
            ("decoding", f"block_cache={self.block_cache!r}, recommit={self.recommit}"),
            ("rows", "" if self.plan is None else repr(self.plan)),
            ("keys", "" if self.kv is None else repr(self.kv)),
            ("use", "dgraph.optimize(model, recipe)"),
        )
        return Card(f"Recipe {self.name}, version {self.version}", facts)

    def phase(self, name: str) -> Phase:
        """The phase of that name.

        Raises:
            UnknownName: no such phase.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise UnknownName("phase", name, [p.name for p in self.phases])

    def inserting(self, step: Pass, after: str) -> Recipe:
        """The recipe whose phases run a pass right after another one, wherever they run that.

        Raises:
            UnknownName: no phase runs a pass of the name `after`.
        """
        names = {p.name for phase in self.phases for p in phase.passes}
        if after not in names:
            raise UnknownName(f"pass of recipe {self.name!r}", after, names)

        def with_step(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
            return tuple(p for old in passes for p in ((old, step) if old.name == after else (old,)))

        return replace(self, phases=tuple(replace(p, passes=with_step(p.passes)) for p in self.phases))

    def keeping_logits(self) -> Recipe:
        """The same method with programs that end in logits, for samplers that need whole rows of them."""
        phases = (
            replace(phase, passes=tuple(p for p in phase.passes if not isinstance(p, ChunkLMHead)))
            for phase in self.phases
        )
        return replace(self, phases=tuple(phases))

    def with_last(self, step: Pass, phases: Collection[str]) -> Recipe:
        """The same method with one more pass at the end of the phases of these names."""
        more = (replace(p, passes=(*p.passes, step)) if p.name in phases else p for p in self.phases)
        return replace(self, phases=tuple(more))

    def with_logit_rows(self, rows: int) -> Recipe:
        """The same method with the logits of at most `rows` rows at a time, in every phase (`ChunkLMHead`).

        Raises:
            InputError: below 1.
        """

        def bound(phase: Phase) -> Phase:
            passes = (replace(p, max_num_logits=rows) if isinstance(p, ChunkLMHead) else p for p in phase.passes)
            return replace(phase, passes=tuple(passes))

        return replace(self, phases=tuple(map(bound, self.phases)))

    def with_kv_dtype(self, dtype: str | None) -> Recipe:
        """The same method with keys and values stored in a format, in every phase (`CacheKV`); None: the model's dtype.

        Raises:
            UnknownName: no such format.
            InputError: a format for a recipe that stores none.
        """
        if dtype is not None and not any(isinstance(p, CacheKV) for phase in self.phases for p in phase.passes):
            raise InputError(
                f"recipe {self.name!r} keeps no keys and values (CacheKV), so leave out kv_dtype={dtype!r}."
            )

        def stored(phase: Phase) -> Phase:
            passes = (replace(p, dtype=dtype) if isinstance(p, CacheKV) else p for p in phase.passes)
            return replace(phase, passes=tuple(passes))

        return replace(self, phases=tuple(map(stored, self.phases)))

    def with_all_keys(self) -> Recipe:
        """The same method with keys behind a layer's window kept, in every phase (`CacheKV`)."""

        def kept(phase: Phase) -> Phase:
            passes = (replace(p, rings=False) if isinstance(p, CacheKV) else p for p in phase.passes)
            return replace(phase, passes=tuple(passes))

        return replace(self, phases=tuple(map(kept, self.phases)))

    @property
    def logit_rows(self) -> int | None:
        """Rows whose logits exist at a time, at most; None for all of a step's."""
        bounds = [p.max_num_logits for phase in self.phases for p in phase.passes if isinstance(p, ChunkLMHead)]
        return max(bounds, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "recipe": self.name,
            "version": self.version,
            "block_cache": self.block_cache,
            "recommit": self.recommit,
            **({} if self.plan is None else {"plan": self.plan.to_json()}),
            **({} if self.kv is None else {"kv": self.kv.to_json()}),
            "phases": [p.to_json() for p in self.phases],
        }

    @classmethod
    def from_json(
        cls,
        value: Mapping[str, Any],
        passes: Mapping[str, type[Pass]] = PASSES,
        parts: Mapping[str, type[Part]] = PARTS,
    ) -> Recipe:
        """The recipe that `to_json` described; equal to the one that wrote it.

        Args:
            value: plain values as `to_json` gives them.
            passes: passes by name; add those that no installed package brings in the entry-point group "dgraph.passes".
            parts: regions and schedules by name, likewise with "dgraph.parts".

        Raises:
            InputError: an entry is missing or out of range.
            UnknownName: an unknown pass, region or schedule, or a field that it does not have.
        """
        try:
            phases = tuple(
                Phase(p["phase"], tuple(pass_from_json(v, passes) for v in p["passes"]), frozenset(p["optional"]))
                for p in value["phases"]
            )
            plan = RowPlan.from_json(value["plan"], parts) if "plan" in value else None
            kv = KVPlan.from_json(value["kv"]) if "kv" in value else None
            return cls(value["recipe"], value["version"], phases, value["block_cache"], value["recommit"], plan, kv)
        except UnknownName:  # a KeyError, too
            raise
        except KeyError as error:
            raise InputError(f"this recipe has no entry {error}; give what Recipe.to_json wrote.") from error
