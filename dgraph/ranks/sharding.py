"""Division of a graph over ranks, and the part of each weight that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = "tp"
"""Default group of the ranks that hold a model together."""

FIRST_ID, FIRST_EXPERT = "shard.first_id", "shard.first_expert"
"""Names of tensors with the first id and the first expert that a rank has; see `Graph.own`."""
FIRST_KV_HEAD = "shard.first_kv_head"
"""Name of the tensor with the first of the model's KV heads that a rank has; see `Graph.own`."""

KINDS = ("column", "row", "vocabulary", "per head", "experts", "replicated")
"""Shares of a weight: some of its outputs, some of its inputs, some ids, some heads, some experts, or all."""


@dataclass(frozen=True)
class Sharding:
    """Over whom a graph is divided. It is the same on every rank, as is the graph; only weights differ.

    Attributes:
        world: number of ranks, at least 1.
        group: their group, see `dgraph.ranks.groups`.
    """

    world: int
    group: str = GROUP

    def __str__(self) -> str:
        """As it reads in a dump: "over 2 ranks (tp)"."""
        return f"over {self.world} ranks ({self.group})"


@dataclass(frozen=True)
class Part:
    """Part that a rank has of a weight.

    Attributes:
        kind: one of `KINDS`.
        dim: the dimension that is divided.
        ranges: (begin, end) along it, in order; several where the weight is several projections, one after the other.
        padded: the length along it, with zeros after the ranges (a vocabulary that the ranks do not divide evenly).
    """

    kind: str
    dim: int
    ranges: tuple[tuple[int, int], ...]
    padded: int

    @classmethod
    def of(cls, kind: str, dim: int, ranges: Sequence[tuple[int, int]], padded: int | None = None) -> Part:
        """The part that is these ranges, and zeros up to a length if one is given."""
        return cls(kind, dim, tuple(ranges), sum(end - begin for begin, end in ranges) if padded is None else padded)

    def take(self, whole: Tensor) -> Tensor:
        """A contiguous copy of the part, in memory of its own (on the meta device, its shape)."""
        with torch.no_grad():
            pieces = [whole.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
            missing = self.padded - sum(end - begin for begin, end in self.ranges)
            if missing:
                shape = list(whole.shape)
                shape[self.dim] = missing
                pieces.append(whole.new_zeros(shape))
            return (
                torch.cat(pieces, self.dim)
                if len(pieces) > 1
                else pieces[0].clone(memory_format=torch.contiguous_format)
            )
