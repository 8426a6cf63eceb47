"""Weights that are read when they are asked for, and as far as they are: how a rank never holds a whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dgraph.sharding import Part


def hollow(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of a shape that takes the memory of one element: what stands for a weight that is not read yet."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


class Shapes:
    """In place of a `WeightSource`: every weight and part is hollow, and nothing is read. For graphs that none runs."""

    def __contains__(self, name: str) -> bool:
        return True

    def take(self, name: str, like: Tensor, part: Part | None) -> Tensor:
        """See `WeightSource.take`."""
        shape = like.shape if part is None else part.take(like.to("meta")).shape
        return hollow(shape, like.dtype, like.device)


class WeightSource:
    """Weights by name, each stored as one tensor, or as the blocks of a stack [items, rows, columns].

    The stored tensors are to lie in mapped files, of which only what is taken is read.

    Args:
        stored: per weight its tensor, or, of a stack, the blocks of each item one after the other, [rows, columns]
            each, with the same number of them for every item.

    Attributes:
        taken: bytes of what has been taken so far, as they are stored.
    """

    def __init__(self, stored: Mapping[str, Sequence[Tensor]]):
        self._stored = {name: tuple(blocks) for name, blocks in stored.items()}
        self.taken = 0

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @torch.no_grad()
    def take(self, name: str, like: Tensor, part: Part | None) -> Tensor:
        """A weight, or a part of it, in memory of its own.

        Args:
            name: of the weight.
            like: the whole weight's shape, and the dtype and device of the result.
            part: which part; None for the whole.
        """
        blocks = self._stored[name]
        if len(blocks) == 1 and blocks[0].shape == like.shape:
            (block,) = blocks
            found = block.clone() if part is None else part.take(block)
            self.taken += found.nbytes
            return found.to(like.device, like.dtype)
        each = len(blocks) // like.shape[0]
        items = _indices(part, 0, like.shape[0])
        pieces = [self._item(blocks[i * each : (i + 1) * each], part) for i in items]
        found = torch.empty((len(pieces), *pieces[0].shape), dtype=like.dtype, device=like.device)
        for place, piece in zip(found, pieces, strict=True):
            place.copy_(piece)
        return found

    def _item(self, blocks: Sequence[Tensor], part: Part | None) -> Tensor:
        """What a part has of one item of a stack."""
        pieces, at = [], 0
        for block in blocks:
            for begin, end in _ranges(part, 1, at, at + block.shape[0]):
                for left, right in _ranges(part, 2, 0, block.shape[1]):
                    pieces.append(block[begin - at : end - at, left:right])
            at += block.shape[0]
        found = torch.cat(pieces)
        self.taken += found.nbytes
        return found


def _ranges(part: Part | None, dim: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """What a part has of a dimension between two places."""
    if part is None or part.dim != dim:
        yield begin, end
        return
    for first, last in part.ranges:
        if max(first, begin) < min(last, end):
            yield max(first, begin), min(last, end)


def _indices(part: Part | None, dim: int, length: int) -> list[int]:
    return [i for begin, end in _ranges(part, dim, 0, length) for i in range(begin, end)]
