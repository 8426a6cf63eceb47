"""Weights that are read on demand, and only the parts asked for, so that a rank never holds a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dgraph.families.quantised import PARTS, Format, QuantisedWeight, quantise
from dgraph.ranks.sharding import Part


def hollow(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of a shape in the memory of one element, which stands for a weight that is not read yet."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


def weights_of(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Parameters and buffers by the name that they have in a graph: that within the module, without the prefix."""
    named = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {name.removeprefix(prefix): tensor for name, tensor in named.items()}


@torch.no_grad()
def read_all(weights: Mapping[str, Tensor], source: WeightSource) -> None:
    """Fill hollow tensors with the weights that they stand for; stand-ins of quantised weights stay hollow.

    A tensor of several names is read once, by the first.
    """
    read: set[int] = set()
    for name, tensor in weights.items():
        if name in source and name not in source.formats and id(tensor) not in read:
            tensor.data = source.whole(name, tensor)
            read.add(id(tensor))


class Shapes:
    """Stand-in for a `WeightSource`: every weight and part is hollow and none is read; for graphs that are not run."""

    def __contains__(self, name: str) -> bool:
        return True

    def take(self, name: str, like: Tensor, part: Part | None) -> Tensor:
        """See `WeightSource.take`."""
        shape = like.shape if part is None else part.take(like.to("meta")).shape
        return hollow(shape, like.dtype, like.device)


@dataclass(frozen=True)
class Made:
    """A tensor that is made of stored ones when it is read.

    Attributes:
        shape, dtype: of the tensor.
        make: makes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


Stored = Tensor | Made


def made(stored: Stored) -> Tensor:
    """Return a stored tensor, made if it is a `Made`."""
    return stored.make() if isinstance(stored, Made) else stored


class WeightSource:
    """Weights by name, each stored as one tensor, or as the blocks of a stack [items, rows, columns].

    The stored tensors are to lie in mapped files, of which only what is taken is read. The values of a quantised weight
    have its name, its scales and zeros that name with `PARTS` after it.

    Args:
        stored: per weight its tensor. For a stack, the blocks [rows, columns] of each item one after the other, with
            the same number of them for every item.
        formats: formats of the weights that are stored quantised, by name.
        names: names in the checkpoint of the tensors of weights that are stored as they are.

    Attributes:
        formats: see above.
        all_quantised: True if it has no other weights.
        taken: bytes that have been taken so far, as they are stored.
    """

    def __init__(
        self,
        stored: Mapping[str, Sequence[Stored]],
        formats: Mapping[str, Format] | None = None,
        names: Mapping[str, Sequence[str]] | None = None,
    ):
        self._stored = {name: tuple(blocks) for name, blocks in stored.items()}
        self._names = dict(names or {})
        self.formats, self.all_quantised = dict(formats or {}), False
        self.taken = 0

    def quantised(self) -> WeightSource | None:
        """Source of the weights that are stored quantised, to read after all others; None without such weights."""
        names = [f"{name}{part}" for name in self.formats for part in PARTS if f"{name}{part}" in self._stored]
        found = WeightSource({name: self._stored[name] for name in names}, self.formats)
        found.all_quantised = True
        return found if names else None

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def named(self) -> list[tuple[str, str, Stored]]:
        """Tensors with a name in the checkpoint, each as (name of the weight, the checkpoint's own name, tensor)."""
        every = ((name, zip(names, self._stored[name], strict=True)) for name, names in self._names.items())
        return [(name, own, block) for name, blocks in every for own, block in blocks]

    def stored(self) -> list[tuple[str, str, Tensor]]:
        """Tensors of `named` that are stored as they are."""
        return [(name, own, block) for name, own, block in self.named() if isinstance(block, Tensor)]

    def changed(self, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> WeightSource:
        """The source with tensors that are changed whenever they are read, by the checkpoint's own names."""
        stored = dict(self._stored)
        for name, names in self._names.items():
            blocks = zip(names, self._stored[name], strict=True)
            stored[name] = tuple(_changed(block, changes[own]) if own in changes else block for own, block in blocks)
        return WeightSource(stored, self.formats, self._names)

    def stays(self, name: str, like: Tensor) -> bool:
        """Say if `whole` leaves a weight in the memory where it is stored."""
        blocks = self._stored.get(name, ())
        stored = blocks[0] if len(blocks) == 1 else None
        return isinstance(stored, Tensor) and all(getattr(stored, fact) == getattr(like, fact) for fact in _SAME)

    def whole(self, name: str, like: Tensor) -> Tensor:
        """A weight; in the memory where it is stored, if it is stored as one tensor in the dtype and on the device of
        `like`.
        """
        if self.stays(name, like):
            stored = made(self._stored[name][0])
            self.taken += stored.nbytes
            return stored
        return self.take(name, like, None)

    @torch.no_grad()
    def take(self, name: str, like: Tensor, part: Part | None) -> Tensor:
        """A weight, or a part of it, in memory of its own.

        Args:
            name: of the weight.
            like: the whole weight's shape, and the dtype and device of the result.
            part: the part to take; None for the whole.
        """
        blocks = self._stored[name]
        if len(blocks) == 1 and blocks[0].shape == like.shape:
            block = made(blocks[0])
            mine = block if part is None else part.take(block)
            self.taken += mine.nbytes
            return mine.to(like.device, like.dtype, copy=mine is blocks[0]).contiguous()
        each = len(blocks) // like.shape[0]
        items = _indices(part, 0, like.shape[0])
        shape = like.shape if part is None else part.take(like.to("meta")).shape
        found = torch.empty(shape, dtype=like.dtype, device=like.device)
        for place, i in zip(found, items, strict=True):
            self._read_item(blocks[i * each : (i + 1) * each], part, place)
        return found

    def _read_item(self, blocks: Sequence[Stored], part: Part | None, into: Tensor) -> None:
        """Read the share of a part in one item of a stack."""
        at = row = 0
        for block in map(made, blocks):
            for begin, end in _ranges(part, 1, at, at + block.shape[0]):
                column = 0
                for left, right in _ranges(part, 2, 0, block.shape[1]):
                    piece = block[begin - at : end - at, left:right]
                    into[row : row + end - begin, column : column + right - left].copy_(piece)
                    self.taken += piece.nbytes
                    column += right - left
                row += end - begin
            at += block.shape[0]


def _changed(block: Stored, change: Callable[[Tensor], Tensor]) -> Made:
    return Made(tuple(block.shape), torch.float32, lambda: change(made(block)))


_SAME = ("shape", "dtype", "device")


def _ranges(part: Part | None, dim: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of a dimension between two places that belong to a part."""
    if part is None or part.dim != dim:
        yield begin, end
        return
    for first, last in part.ranges:
        if max(first, begin) < min(last, end):
            yield max(first, begin), min(last, end)


def _indices(part: Part | None, dim: int, length: int) -> list[int]:
    return [i for begin, end in _ranges(part, dim, 0, length) for i in range(begin, end)]


class Quantising:
    """The weights of another source, some of them quantised when they are taken.

    A quantised weight is read whole, and what of it was asked for is taken: values, scales or zeros, or a part of one.
    One weight is held meanwhile, the last one, since the others of its tensors are asked for next.

    Args:
        source: of the weights as they are; None: of `whole`.
        whole: by name, the weights as they are, or `hollow` stand-ins of their shape, dtype and device.
        formats: by name, what weights are quantised to; of those that the source stores so already, it is no matter.
    """

    def __init__(self, source: WeightSource | None, whole: Mapping[str, Tensor], formats: Mapping[str, Format]):
        stored = {} if source is None else source.formats
        self._source, self._whole = source, whole
        self._formats = {name: format for name, format in formats.items() if name not in stored}
        self._places = {f"{name}{part}": (name, i) for name in self._formats for i, part in enumerate(PARTS)}
        self._held: tuple[str, QuantisedWeight] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._places or (self._source is not None and name in self._source)

    def take(self, name: str, like: Tensor, part: Part | None) -> Tensor:
        """See `WeightSource.take`."""
        if name not in self._places:
            assert self._source is not None, name
            return self._source.whole(name, like) if part is None else self._source.take(name, like, part)
        of, index = self._places[name]
        stored = self._quantised(of)
        found = (stored.values, stored.scales, stored.zeros)[index]
        assert found is not None, name
        return found if part is None else part.take(found)

    def _quantised(self, name: str) -> QuantisedWeight:
        if self._held is None or self._held[0] != name:
            self._held = None  # before the next one is read
            whole = self._whole[name]
            if self._source is not None and name in self._source:
                whole = self._source.whole(name, whole)
            self._held = name, quantise(whole, self._formats[name], name)
        return self._held[1]


Source = WeightSource | Shapes | Quantising
"""Source from which weights are taken."""
