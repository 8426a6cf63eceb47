"""From the host to the device without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes: where each tensor of a copy begins is a multiple of it, as kernels that read several values at a time want."""


def upload(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Tensors of the host on a device, made by one copy in the order of what was launched there.

    A copy from memory that may move to another place waits for all that the device has to do; this one is from memory
    that may not (the allocator of it knows when it can be used again), so that the host goes on at once.

    Args:
        device: where to.
        tensors: on the host; each becomes a contiguous one, in memory that nothing else lies in.
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
