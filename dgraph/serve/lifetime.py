"""A server from its loading to its end: the models it serves, its state, and its shutdown."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from dgraph.engine.engine import Engine, EngineClosed
from dgraph.serve.access_log import Record, write
from dgraph.serve.refusal import Refusal, unavailable
from dgraph.serve.served_model import ServedModel

LOADING_RETRY = 5.0
"""Seconds after which a client asks a loading server again."""
LAST_WORDS = 2.0
"""Seconds for ended requests to say so to their clients."""


class Answering(Protocol):
    """A request of any kind that is being answered."""

    def cancel(self) -> None:
        """End the request; it says so to its client, and leaves."""


class Lifetime:
    """State of a server and the models that it serves. Used only in the thread of its event loop, except `begin`.

    Attributes:
        models: by the names that clients call them; empty while the server loads.
        started: start of the server, in seconds on the monotonic clock.
        draining: True if it takes no more requests, and ends the running ones.
        refused: requests that were answered with an error, by status; 499 if the client left before.
        dropped: connections that the server closed, by reason.
    """

    def __init__(self) -> None:
        self.models: Mapping[str, ServedModel] = {}
        self.started = time.monotonic()
        self.draining = False
        self.refused: Counter[int] = Counter()
        self.dropped: Counter[str] = Counter()
        self._running: set[Answering] = set()
        self._idle = asyncio.Event()

    def begin(self, engines: Mapping[str, Engine]) -> None:
        """Serve these engines from now on."""
        self.models = {name: ServedModel(name, engine) for name, engine in engines.items()}

    @property
    def alive(self) -> bool:
        """True as long as no engine has died."""
        return all(model.engine.alive for model in self.models.values())

    @property
    def dead(self) -> EngineClosed | None:
        """The error of the first dead engine, with its name and reason; None as long as all engines live."""
        for name, model in self.models.items():
            if model.engine.dead is not None:
                return EngineClosed(f"the engine of {name!r} has stopped: {model.engine.dead}")
        return None

    @property
    def ready(self) -> bool:
        """True if the server takes requests: its models are loaded, it does not drain, and no engine has died."""
        return bool(self.models) and not self.draining and self.alive

    def model(self, name: str | None) -> ServedModel:
        """The model that a request names; the first if it names none.

        Raises:
            Refusal: the server does not take requests, or has no such model.
        """
        if self.draining:
            raise unavailable("the server is shutting down.", "draining")
        if not self.models:
            raise unavailable("the server is loading its model.", "loading", LOADING_RETRY)
        found = next(iter(self.models.values())) if not name else self.models.get(name)
        if found is None:
            known = ", ".join(map(repr, self.models))
            raise Refusal(404, f"no such model; this server has {known}.", param="model", code="model_not_found")
        return found

    @property
    def running(self) -> int:
        """The number of requests that are being answered."""
        return len(self._running)

    def enter(self, running: Answering) -> None:
        """Add a request that begins."""
        self._running.add(running)

    def leave(self, running: Answering) -> None:
        """Remove a request that is over."""
        self._running.discard(running)
        if not self._running:
            self._idle.set()

    def ended(self, record: Record) -> None:
        """Count an answered request of any kind if its answer is an error, and write its line of the log."""
        if record.status >= 400:
            self.refused[record.status] += 1
        write(record)

    async def drain(self, timeout: float) -> None:
        """Take no more requests, and wait for the running ones; cancel them after `timeout` seconds."""
        self.draining = True
        if self._running and not await self._rest(timeout):
            for running in list(self._running):
                running.cancel()
            await self._rest(LAST_WORDS)

    async def _rest(self, timeout: float) -> bool:
        """Wait until nothing runs; True if that came within `timeout` seconds."""
        self._idle.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True
