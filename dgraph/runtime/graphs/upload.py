"""Copies from the host to the device that do not block the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 16
"""Alignment in bytes of each tensor of a copy, as kernels that read several values at a time want it."""


def upload(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy tensors of the host to a device by one copy, in the order of the launches there.

    A copy from pageable memory waits for all work of the device. This one is from pinned memory, so that the host goes
    on at once; the allocator of that memory knows when it can be reused.

    Args:
        device: the target.
        tensors: on the host; each becomes a contiguous one, in memory that no other tensor uses.
    """
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + -(-tensor.nbytes // ALIGNED) * ALIGNED)
    sent = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, part in zip(tensors, _parts(sent, ends, tensors), strict=True):
        part.copy_(tensor)
    return _parts(sent.to(device, non_blocking=True), ends, tensors)


def _parts(memory: Tensor, ends: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    parts = zip(like, ends, strict=False)
    return [memory[begin : begin + one.nbytes].view(one.dtype).view(one.shape) for one, begin in parts]
