"""Keys and values of two runs, compared."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dgraph.compiler.compiled_model import Result
from dgraph.runtime.results import Generation


def kv_pairs(got: Result | Generation, want: Result | Generation) -> Iterator[tuple[Tensor, Tensor]]:
    """What two runs kept of each prompt and layer, side by side: keys, then values. As many positions are final."""
    assert got.kv is not None
    assert want.kv is not None
    for mine, theirs in zip(got.kv, want.kv, strict=True):
        assert (mine.committed, mine.first) == (theirs.committed, theirs.first)
        for layer in zip(mine.layers, theirs.layers, strict=True):
            yield from zip(*layer, strict=True)
