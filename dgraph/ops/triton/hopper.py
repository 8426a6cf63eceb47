"""What the kernels share that Hopper GPUs alone can run, whose warps have roles of their own."""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon import language as gl

LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Blocks of 16-bit values in shared memory, as the copy engine writes and the matrix instructions read them."""


@functools.cache
def understood(device: torch.device) -> bool:
    """Whether a device has the matrix instructions of these kernels: compute capability 9.0 alone has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
