"""Helpers that the kernels share: the sequence of a row, sizes of blocks, and the early start of small kernels."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dgraph.errors import InputError
from dgraph.private.early_start import starts_early

MOST_OFFSETS = 512


def power_of_two(n: int, least: int = 1, most: int = 1 << 30) -> int:
    """The power of two at or above `n`, between two others."""
    return min(max(least, 1 << max(n - 1, 0).bit_length()), most)


def dense_rows(x: Tensor) -> Tensor:
    """`x` itself if the values of each row are contiguous, whatever the stride between rows; else a copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


def check_slots(op: str, **caches: Tensor) -> None:
    """Refuse caches [pages, page, ...] in which the values of a slot are not contiguous."""
    for name, cache in caches.items():
        expected = 1
        for size, stride in zip(reversed(cache.shape[2:]), reversed(cache.stride()[2:]), strict=True):
            if size != 1 and stride != expected:
                raise InputError(
                    f"dgraph::{op}: a slot of {name} {list(cache.shape)} must be contiguous, got strides "
                    f"{cache.stride()}. Allocate the cache in that layout."
                )
            expected *= size


def start_of(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch for a kernel that begins with `wait(EARLY)`: it starts early where that is possible."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}


def offsets_block(b: int) -> int:
    """Offsets that `sequence_at` compares at once, for b sequences."""
    return power_of_two(b + 1, 16, MOST_OFFSETS)


@triton.jit
def wait(EARLY: tl.constexpr):
    """The first line of a kernel that may start early: see `dgraph.private.early_start`."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def sequence_at(cu_ptr, b, at, EVERY: tl.constexpr, BLOCK: tl.constexpr, OWN: tl.constexpr = 1):
    """The last i in [0, b] with cu[i] // EVERY + OWN * i <= at, where i = b stands for the padding rows.

    With tiles of EVERY rows, sequence i owns the tiles from cu[i] // EVERY + i on, and that is always enough
    of them; so b + 1 + rows // EVERY tiles cover any division of the rows into sequences. Every OWN above 1
    gives each sequence one tile more.
    """
    found = -1
    for first in range(0, b + 1, BLOCK):
        i = first + tl.arange(0, BLOCK)
        start = tl.load(cu_ptr + i, mask=i <= b, other=0)
        found += tl.sum(((start // EVERY + OWN * i <= at) & (i <= b)).to(tl.int32))
    return found


@triton.jit
def owner_of(cu_ptr, b, row, BLOCK: tl.constexpr):
    """The sequence of a live row; the last of several that start there, because the others are empty."""
    found = -1
    for first in range(0, b, BLOCK):
        i = first + tl.arange(0, BLOCK)
        start = tl.load(cu_ptr + i, mask=i < b, other=0)
        found += tl.sum(((start <= row) & (i < b)).to(tl.int32))
    return found


@triton.jit
def live_rows(cu_ptr, b, n):
    """Number of live rows among n, by the last of b + 1 offsets."""
    return tl.minimum(tl.load(cu_ptr + b), n).to(tl.int32)
