"""Numbers that a device writes and the host reads, while the device goes on."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class Mapped:
    """Memory of the host that a device writes as its own, and an event that tells when it has.

    Both may be part of a CUDA graph: on an H100 they hold up what follows them there by 2 us, and a copy to the host by
    8. Whoever reads must have launched what writes.

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
        """What is launched until now writes what is read."""
        if self._event is not None:
            if self.tensor.data_ptr() != self._memory.data_ptr():  # another device has pinned it
                self._memory.copy_(self.tensor, non_blocking=True)
            self._event.record()

    def read(self) -> NDArray[Any]:
        """The numbers as they were posted last, once they are there; they last until the device writes again."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


class _Exported:
    """Pinned memory as torch takes it for a device's. It holds nothing else, or a tensor and its owner would hold each
    other where nothing collects them.
    """

    def __init__(self, memory: Tensor):
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        values = self._memory.numpy()
        place = self._memory.data_ptr(), False  # it may be written
        return {"shape": values.shape, "typestr": values.dtype.str, "data": place, "version": 3}
