"""The guard between an engine and the listener of a request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from dgraph.engine.io.events import Event
from dgraph.engine.io.tickets import Sink


class GuardedSink:
    """A sink that cannot stop the engine whose events it gets.

    A thread that is told the end may use the model at once, so nothing is kept of the engine from the last event on.

    Args:
        sink: the listener; its exceptions go to `threading.excepthook`.
        freed: called with the id of the request before its last event is told.
        cancel: called with it where the sink raises before that.
    """

    def __init__(self, sink: Sink, freed: Callable[[str], object], cancel: Callable[[str], object]):
        self._sink, self._freed, self._cancel = sink, freed, cancel

    def __call__(self, event: Event) -> None:
        if event.finish_reason is not None:
            self._freed(event.request_id)
            self._freed = self._cancel = _nothing
        try:
            self._sink(event)
        except BaseException as error:  # this listener is gone or broken; the others are not
            self._cancel(event.request_id)
            here = threading.current_thread()
            with suppress(BaseException):  # a hook may raise, too
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, here)))


def _nothing(request_id: str) -> None:
    """Do nothing, in the place of the engine's functions after the end of a request."""
