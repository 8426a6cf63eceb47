"""Kernels that start while the one before them still runs, and why no result depends on it.

Between two kernels of a stream a GPU is idle for some microseconds. From compute capability 9.0 on a kernel can be
launched with an attribute (programmatic dependent launch). Its blocks are placed as soon as every block of the kernel
before it has called `gdc_launch_dependents` or has ended. `gdc_wait` in it returns when that kernel has ended and its
writes are visible. So a kernel that starts early

    waits in every thread, before its first access to memory, and only then lets the next one start.

This is sound whatever the kernels read and write. Assume that when kernel i ends, all kernels before it have ended. A
kernel i + 1 without the attribute starts after the end of i. One with it touches no memory before its wait returns,
which is after the end of i. Either way no kernel before it runs any more when it first reads or writes. When it ends
they all have ended, so the same holds for i + 1. Hence no two kernels of a stream touch memory at the same time.
Events, copies, other streams and the host wait for a kernel's end, and so for all kernels before it. Blocks that wait
take no room that others need: the next kernel is placed when the last block of this one is.

A weaker rule would not do. A kernel without a wait may end before one two places earlier has, and then the wait of the
next returns too early. Inductor's own early kernels break the rule. They load buffers that, by name, the kernel before
does not write, and wait only afterwards; one that loads nothing may not wait at all. So kernels of regions never start
early. But they let the next one start with their first instruction (`dgraph.private.inductor`). They start after the
end of the one before, as if they had just waited.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch

FIRST = (9, 0)
"""The compute capability from which on kernels can start early."""

VARIABLE = "TORCHINDUCTOR_ENABLE_PDL"
"""Torch's own variable for early starts: "0" switches them off here as well."""


@lru_cache
def starts_early(device: torch.device) -> bool:
    """True if dgraph's kernels on a device start early."""
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return os.environ.get(VARIABLE) != "0" and torch.cuda.get_device_capability(device) >= FIRST
