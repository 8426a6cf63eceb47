"""Counters that are zero when a kernel starts, by which programs tell which of them ends last.

Each call takes counters of its own. Outside of `shared` every call launches one more kernel, which sets them to zero;
within it one such kernel serves many calls. While a CUDA graph is captured, that kernel becomes part of the graph and
runs at every replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

CHUNK = 1 << 16
"""Counters that one kernel sets to zero."""
ALIGNED = 4
"""The counters of a call begin at a multiple of this, 16 bytes: Triton compiles one more kernel for less alignment."""
_SHARED: ContextVar[dict[torch.device, list[Tensor]] | None] = ContextVar("dgraph counters", default=None)


@contextmanager
def shared() -> Iterator[None]:
    """Let calls take counters that one kernel sets to zero, before the first of them.

    It is for the capture of a graph, and must begin and end within that capture. Its counters must not be used after
    its end.
    """
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


def zeros(n: int, device: torch.device) -> Tensor:
    """Zeroed counters i32[n] for one launch."""
    chunks = _SHARED.get()
    if chunks is None or n > CHUNK:
        return torch.zeros(n, dtype=torch.int32, device=device)
    left = chunks.setdefault(device, [])
    if not left or n > len(left[-1]):
        # Earlier chunks stay referenced: within the graph their memory must not become another tensor's.
        left.append(torch.zeros(CHUNK, dtype=torch.int32, device=device))
    taken, left[-1] = left[-1][:n], left[-1][-(-n // ALIGNED) * ALIGNED :]
    return taken
