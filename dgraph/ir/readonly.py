"""Read-only weights: the tensors that a pass finds in a graph belong to the model that was captured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dgraph.errors import VerifyError
from dgraph.private.torch import WriteWatch

COPIED = 64 << 20
"""Bytes of all tensors up to which these are copied ahead, so that a write by any way is found."""

_PLACE = Tensor.data.__set__  # type: ignore[attr-defined]
"""Gives a tensor another place in memory."""
_RAW = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr)
"""Functions that hand out memory to code that torch does not see."""


@contextmanager
def read_only(tensors: Mapping[str, Tensor], by: str, ahead: bool = True) -> Iterator[None]:
    """Refuse every write to tensors while the context is open; after it, they hold their former bits.

    A write by an op of torch is refused before it happens. Memory that is handed out (numpy, dlpack, a pointer) is
    compared with a copy that is made when it is, and restored. Tensors that are made meanwhile may be written, and a
    tensor may get another place in memory with the same bits in it.

    Args:
        tensors: by name; not held, since a pass may free them.
        by: the pass that runs, for the message.
        ahead: copy all of them, up to `COPIED` bytes, since their memory may have been handed out earlier.

    Raises:
        VerifyError: a tensor was, or would have been, written; the message names it and the pass.
    """
    weights = _Weights(tensors, by, ahead)
    del tensors
    try:
        with torch.no_grad(), weights.watch, weights:
            yield
    finally:
        weights.restore()
    if weights.broken:  # raised once already, unless the pass caught it
        raise VerifyError(weights.broken)


class _Weights(TorchFunctionMode):
    """Tensors, and copies of those whose memory code outside of torch may have."""

    def __init__(self, tensors: Mapping[str, Tensor], by: str, ahead: bool):
        super().__init__()
        self.by, self.broken = by, ""
        self.watch = WriteWatch(tensors, self._refuse)
        self._tensors = {name: ref(tensor) for name, tensor in tensors.items()}
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._copies: dict[str, Tensor] = {}
        if ahead and sum(tensor.nbytes for tensor in tensors.values()) <= COPIED:
            self._copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch; copy first what it hands out."""
        if func == _PLACE and (name := self._names.get(id(args[0]))) and self._tensors[name]() is args[0]:
            if not _same_bits(*args):
                self._refuse(name, "Tensor.data")
            self.watch.add(name, args[1])
        elif func in _RAW:
            self._copy(args[0].untyped_storage())
        return func(*args, **(kwargs or {}))

    def _copy(self, storage: torch.UntypedStorage) -> None:
        """Copy the tensors that lie in a memory, unless that was done."""
        if self.watch.name_of(storage) is None:
            return
        for name, tensor in self._alive():
            if name not in self._copies and tensor.untyped_storage() is storage:
                self._copies[name] = tensor.detach().clone()

    def _alive(self) -> Iterator[tuple[str, Tensor]]:
        found = ((name, tensor()) for name, tensor in self._tensors.items())
        return ((name, tensor) for name, tensor in found if tensor is not None)

    def _refuse(self, name: str, how: str) -> None:
        self._found(name, how)
        raise VerifyError(self.broken)

    def _found(self, name: str, how: str) -> None:
        self.broken = self.broken or (
            f"{self.by}: weight {name!r} is written in place ({how}), but other graphs and the model itself have it, "
            f"too. Make a new tensor, and put it into the graph in its place; changes_weights = True declares that."
        )

    def restore(self) -> None:
        """Give tensors that were written without torch their bits back."""
        for name, tensor in self._alive():
            copy = self._copies.get(name)
            if copy is None or _same_bits(tensor, copy):
                continue
            with torch.inference_mode():  # or those made in that mode could not be written
                tensor.detach().copy_(copy)
            self._found(name, "through memory that torch does not watch, as an array of numpy")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors are alike in shape, dtype, device and the bits of every element."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().view(kind), b.detach().view(kind))
