"""Events on their way from an engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable

from dgraph.engine.io.events import Event

Put = Callable[[Event], None]
"""Takes an event in the thread of its event loop; it must return at once and not raise."""


class EventLoopBridge:
    """Bridge to one event loop, which is woken once for all events of a step, of however many requests.

    Args:
        loop: the event loop; the events go to its thread.
        lost: called in the engine's thread with an event that cannot be delivered, since the loop is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, lost: Callable[[Event], object]):
        self._loop = weakref.ref(loop)
        self._lost = lost
        self._events: deque[tuple[Put, Event]] = deque()
        self._woken = False

    def to(self, put: Put) -> Put:
        """Make a sink of the engine that hands its events to `put` in the loop's thread, in their order."""

        def sink(event: Event) -> None:
            loop = self._loop()
            if loop is None or loop.is_closed():
                self._events.clear()
                self._lost(event)
                return
            self._events.append((put, event))
            if not self._woken:
                self._woken = True
                with contextlib.suppress(RuntimeError):  # closed just now: the next event finds out
                    loop.call_soon_threadsafe(self._deliver)

        return sink

    def _deliver(self) -> None:
        self._woken = False  # first: later events may miss the loop below
        while self._events:
            put, event = self._events.popleft()
            put(event)


def weakly(method: Callable[[Event], None]) -> Callable[[Event], None]:
    """Call a method without keeping its object alive; once the object is gone, the call does nothing."""
    held = weakref.WeakMethod(method)

    def call(event: Event) -> None:
        if (found := held()) is not None:
            found(event)

    return call
