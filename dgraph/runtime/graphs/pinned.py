"""Numbers that a device writes and the host reads, while the device goes on."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class Mapped:
    """Memory of the host that a device writes as its own, and an event that tells when it has.

    Both may be part of a CUDA graph: on an H100 they delay the launches after them there by 2 us, and a copy to the
    host delays them by 8 us. The launch that writes must come before the read.

    Args:
        shape, dtype: of the numbers.
        device: that writes them.

    Attributes:
        tensor: of that shape, on the device, for any op to write to.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        self._values: NDArray[Any] = self._memory.numpy()
        self.tensor = self._memory
        self._event: torch.cuda.Event | None = None
        if on_gpu:
            self.tensor = torch.as_tensor(_Exported(self._memory), device=device)
            self._event = torch.cuda.Event(external=True)

    def post(self) -> None:
        """Record the event: `read` waits for all writes that were launched before."""
        if self._event is not None:
            if self.tensor.data_ptr() != self._memory.data_ptr():  # another device has pinned it
                self._memory.copy_(self.tensor, non_blocking=True)
            self._event.record()

    def read(self) -> NDArray[Any]:
        """Wait for the numbers that were posted last; they last until the device writes again."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


class _Exported:
    """Pinned memory in the form that torch takes for a device's.

    It holds nothing else: a tensor and its owner would hold each other, and they would never be collected.
    """

    def __init__(self, memory: Tensor):
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        values = self._memory.numpy()
        place = self._memory.data_ptr(), False  # it may be written
        return {"shape": values.shape, "typestr": values.dtype.str, "data": place, "version": 3}
