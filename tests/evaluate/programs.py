"""Programs that tests share: making one is most of their time."""

from __future__ import annotations

import functools
from typing import Any

from dgraph import api
from dgraph.families import Model

load = functools.cache(api.load)


@functools.cache
def _program(model: Model, recipe: Any, backend: str, buckets: Any, weights: Any) -> api.CompiledModel:
    return api.optimize(model, recipe, backend=backend, buckets=buckets, weights=weights)


def optimize(
    model: Model, recipe: Any, *, backend: str, buckets: Any = None, progress: Any = None, weights: Any = None
) -> api.CompiledModel:
    """What `dgraph.evaluate.run` calls, each program made once."""
    return _program(model, recipe, backend, buckets, weights)
