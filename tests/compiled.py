"""Programs over graphs that the tests of a process share: capture and first passes are most of what they take."""

from __future__ import annotations

import functools

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.testing import TinyModel


@functools.cache
def shared(model: str | dgraph.Model) -> TinyModel:
    """A model, or an embedded one by its name, captured at the first use."""
    return TinyModel(str(model), dgraph.load(model) if isinstance(model, str) else model)


def compiled(model: str | dgraph.Model, recipe: str = "focus", **options: object) -> CompiledModel:
    """A program as `dgraph.optimize(model, recipe, backend="eager", **options)` makes it, over a shared graph."""
    tiny = shared(model)
    chosen, buckets = tiny.recipe(recipe, **options), Buckets.default(tiny.graph.device)
    return CompiledModel(tiny.model, tiny.graph, chosen, RegionCompiler("eager"), buckets)
