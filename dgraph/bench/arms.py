"""Arms: a recipe, with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dgraph.plans.block_cache import BLOCK_CACHES
from dgraph.recipes import Recipe

NEEDED = frozenset({"PackRows", "CacheKV", "OnlyKV"})
"""Passes that step-by-step decoding needs."""


@dataclass(frozen=True)
class Arm:
    """A recipe to measure, and one line of a table.

    Attributes:
        label: its name in tables.
        recipe: the recipe that is run.
        graphs: True to replay stages as CUDA graphs, on a GPU.
    """

    label: str
    recipe: Recipe
    graphs: bool = True


def without(recipe: Recipe, name: str) -> Recipe:
    """The recipe with a pass left out of every phase."""
    phases = tuple(
        replace(phase, passes=tuple(p for p in phase.passes if p.name != name), optional=phase.optional - {name})
        for phase in recipe.phases
    )
    return replace(recipe, phases=phases)


def ablation(arm: Arm, on_gpu: bool) -> Iterator[Arm]:
    """Arms that differ from the given one in one thing each.

    It is a pass that is left out, another block cache, the other value of `recommit`, or no CUDA graphs.
    """
    names = dict.fromkeys(p.name for p in arm.recipe.phase("step").passes)
    for name in names:
        if name not in NEEDED:
            yield replace(arm, label=f"without {name}", recipe=without(arm.recipe, name))
    for kind in BLOCK_CACHES:
        if kind != arm.recipe.block_cache:
            yield replace(arm, label=f"block_cache={kind}", recipe=replace(arm.recipe, block_cache=kind))
    other = replace(arm.recipe, recommit=not arm.recipe.recommit)
    yield replace(arm, label=f"recommit={str(other.recommit).lower()}", recipe=other)
    if on_gpu and arm.graphs:
        yield replace(arm, label="without graphs", graphs=False)
