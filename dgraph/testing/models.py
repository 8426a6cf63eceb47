"""Tiny random models of every family, each captured once, and prompts for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dgraph.cache.store import open_store
from dgraph.compiler.base_graph import graph_of_model
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import UnknownName
from dgraph.families import Model, families
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes import QuantizeWeights, ShardTensorParallel
from dgraph.passes.manager import run_passes
from dgraph.recipes import RECIPES, Recipe, RecipeLike, build


@dataclass(frozen=True, eq=False)
class TinyModel:
    """A model of a family with few random weights; prints as the family's name.

    Attributes:
        family: the family's name.
        model: the model, in fp32 on the CPU.
    """

    family: str
    model: Model

    def __str__(self) -> str:
        return self.family

    @functools.cached_property
    def graph(self) -> Graph:
        """The captured forward of the model; copy it before you rewrite it.

        It is captured at the first use. So tests can be collected, with models as their parameters, without a capture.
        The artifact cache is the one that a test's fixtures have set.
        """
        return graph_of_model(self.model, open_store())

    def quantised(self, step: QuantizeWeights) -> TinyModel:
        """The same model with quantised weights."""
        return _quantised(self, step)

    def recipe(self, recipe: RecipeLike, **options: object) -> Recipe:
        """A recipe for this model; see `dgraph.recipe`."""
        return build(RECIPES, recipe, self.model.spec, dict(options))

    def optimized(
        self, recipe: RecipeLike, backend: str = "eager", buckets: str = "exact", **options: object
    ) -> CompiledModel:
        """The model under a recipe, as `dgraph.optimize` gives it; equal recipes share one result."""
        return _optimized(self, self.recipe(recipe, **options), backend, buckets)

    def on_rank(
        self,
        rank: int,
        world: int,
        recipe: RecipeLike,
        backend: str = "eager",
        buckets: str = "exact",
        experts: str = "split",
        **options: object,
    ) -> CompiledModel:
        """The model under a recipe on one of several ranks; run it in `dgraph.testing.ranks`."""
        graph, made = _part(self, rank, world, experts).copy(), self.recipe(recipe, **options)
        return CompiledModel(self.model, graph, made, RegionCompiler(backend), Buckets.of(buckets))


@functools.lru_cache(maxsize=64)
def _quantised(tiny: TinyModel, step: QuantizeWeights) -> TinyModel:
    found = TinyModel(tiny.family, tiny.model)
    graph = tiny.graph.copy()
    run_passes(graph, [step])
    object.__setattr__(found, "graph", graph)  # in place of the captured one
    return found


@functools.lru_cache(maxsize=64)
def _part(tiny: TinyModel, rank: int, world: int, experts: str) -> Graph:
    graph = tiny.graph.copy()
    hints = tuple(tiny.model.hints.items())
    run_passes(graph, [ShardTensorParallel(world, experts=experts, hints=hints, rank=rank)])
    return graph


@functools.lru_cache(maxsize=64)
def _optimized(tiny: TinyModel, recipe: Recipe, backend: str, buckets: str) -> CompiledModel:
    return CompiledModel(tiny.model, tiny.graph, recipe, RegionCompiler(backend), Buckets.of(buckets))


@functools.cache
def _tiny(family: str, seed: int) -> TinyModel:
    return TinyModel(family, families()[family].random(seed))


def models(attention: str | None = None, *names: str, seed: int = 0) -> list[TinyModel]:
    """Tiny models of all families, in order of their names.

    Args:
        attention: "block_causal" or "bidirectional" for models of that kind alone; None for both.
        names: only these families. By default all that have a mask token, which most methods and rules need, and
            graphs of their own (`Family.alike`).
        seed: seed of the weights.

    Raises:
        UnknownName: no such family.
    """
    for name in names:
        if name not in families():
            raise UnknownName("family", name, families())
    own = [name for name, family in families().items() if not getattr(family, "alike", "")]
    found = [_tiny(name, seed) for name in sorted(names or own)]
    asked = (tiny for tiny in found if names or tiny.model.spec.noise == "mask")
    return [tiny for tiny in asked if attention in (None, tiny.model.spec.attention)]


def prompts(tiny: TinyModel, seed: int = 0) -> list[list[int]]:
    """Ragged prompts: shorter than a block, more than a block, two whole blocks; without mask and stop tokens."""
    spec = tiny.model.spec
    taken = {spec.mask_id, *spec.eos_ids}
    ids = torch.tensor([token for token in range(spec.vocab) if token not in taken])
    draw = torch.Generator().manual_seed(seed)
    lengths = (3, spec.block_length + 5, 2 * spec.block_length)
    return [ids[torch.randint(len(ids), (n,), generator=draw)].tolist() for n in lengths]
