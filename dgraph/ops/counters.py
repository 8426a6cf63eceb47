"""Counters that are zero when a kernel starts, as programs need that count which of them ends last.

A call takes some of its own. Outside of `shared` each takes a kernel more, which sets them to zero; within it one such
kernel serves many calls. In the capture of a CUDA graph that kernel is a part of the graph, and runs at every replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

CHUNK = 1 << 16
"""Counters that are set to zero at a time."""
ALIGNED = 4
"""A call's begin at a multiple: 16 bytes, which Triton tells from less, and compiles a kernel for either."""
_SHARED: ContextVar[dict[torch.device, list[Tensor]] | None] = ContextVar("dgraph counters", default=None)


@contextmanager
def shared() -> Iterator[None]:
    """Within it, calls take counters that one kernel sets to zero, before the first of them.

    For the capture of a graph, which the whole of it must lie within. What was taken must not be used after its end.
    """
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


def zeros(n: int, device: torch.device) -> Tensor:
    """i32 [n] of zeros, for one launch."""
    chunks = _SHARED.get()
    if chunks is None or n > CHUNK:
        return torch.zeros(n, dtype=torch.int32, device=device)
    left = chunks.setdefault(device, [])
    if not left or n > len(left[-1]):
        # What was taken before stays held as well: its memory must not become another tensor's within the graph.
        left.append(torch.zeros(CHUNK, dtype=torch.int32, device=device))
    taken, left[-1] = left[-1][:n], left[-1][-(-n // ALIGNED) * ALIGNED :]
    return taken
