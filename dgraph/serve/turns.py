"""Limits on concurrent reading: one large request at a time, which never holds up small ones."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

LARGE = 64 << 10
"""Least bytes of the body of a large request."""
SMALL_AT_ONCE = 4
"""Most small requests that are read at a time: each takes a thread."""


class Turns:
    """Bounds on the number of requests that are read at a time.

    Reading turns texts into ids in a thread beside the event loop. It takes a processor for a time that grows with the
    texts, and the engine needs one, too.
    """

    def __init__(self) -> None:
        self._small, self._large = asyncio.Semaphore(SMALL_AT_ONCE), asyncio.Semaphore(1)

    def of(self, size: int) -> AbstractAsyncContextManager[None]:
        """The turn of a request whose body has `size` bytes."""
        return self._large if size >= LARGE else self._small
