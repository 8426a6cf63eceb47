"""Low-rank adapters: weights that are not the model's, added to those of its linear layers on some rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank addend of one weight: scale * up @ down.

    Attributes:
        down, up: [r, inputs] and [outputs, r].
        scale: a factor.
    """

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank adapter by which a model drafts, and by which it does not verify.

    Attributes:
        name: for messages.
        weights: by the name that each weight has in a graph, what drafts add to it.
    """

    name: str
    weights: Mapping[str, LowRank]
