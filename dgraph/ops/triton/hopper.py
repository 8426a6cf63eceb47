"""Helpers of the kernels that Hopper GPUs alone can run, whose warps have roles of their own."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl


@functools.cache
def layout_of(itemsize: int) -> gl.NVMMASharedLayout:
    """Layout in shared memory of blocks of values of `itemsize` bytes.

    The copy engine writes it, and the matrix instructions read it.
    """
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=2)


@functools.cache
def understood(device: torch.device) -> bool:
    """True if a device has the matrix instructions of these kernels: compute capability 9.0 alone has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def in_bulk(x: Tensor) -> bool:
    """True if the copy engine can read blocks of a matrix whose columns lie side by side; it came with 9.0."""
    if x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    return bool(x.stride(0)) and not (x.stride(0) * x.element_size() | x.data_ptr()) % 16
