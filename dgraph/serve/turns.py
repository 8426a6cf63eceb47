"""Turns at reading requests: a large one is read alone of its kind, and never holds small ones up."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

LARGE = 64 << 10
"""Bytes of a body from which on a request is large."""
SMALL_AT_ONCE = 4
"""Small requests that are read at a time: each takes a thread."""


class Turns:
    """Bounds how many requests are read at a time. Reading turns texts into ids beside the event loop, which takes a
    processor for as long as the texts ask for, and the engine needs one, too.
    """

    def __init__(self) -> None:
        self._small, self._large = asyncio.Semaphore(SMALL_AT_ONCE), asyncio.Semaphore(1)

    def of(self, size: int) -> AbstractAsyncContextManager[None]:
        """The turn of a request whose body has `size` bytes."""
        return self._large if size >= LARGE else self._small
