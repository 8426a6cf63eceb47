"""One replica of a server: an actor with engines of its own, under the ASGI application of `dgraph.serve`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import Any

from dgraph.blueprint import Blueprint
from dgraph.engine.engine import EngineClosed
from dgraph.ray.ranks import engines
from dgraph.serve.access_log import to_stderr
from dgraph.serve.lifetime import Lifetime
from dgraph.serve.settings import ServerConfig

LOGGER = logging.getLogger("ray.serve")
"""Logger that Serve writes to the log of a replica."""


class Replica:
    """Class of the actor that Serve makes for each replica; its methods are called in the event loop that answers.

    Args:
        blueprint: blueprint of its engines.
        settings: settings of the application.
        ranks: number of devices of the replica.
        access_log: True for a line on stderr on each request.
    """

    def __init__(self, blueprint: Blueprint, settings: ServerConfig, ranks: int, access_log: bool):
        self._settings, self.lifetime, self._open = settings, Lifetime(), ExitStack()
        self._open.enter_context(to_stderr(access_log))
        built, self._others = engines(blueprint, ranks, lambda what: LOGGER.info("%s", what))
        self.lifetime.begin(built)

    def __serve_build_asgi_app__(self) -> Any:
        """The application, without the header of a request's id, as Serve adds the same one."""
        from dgraph.serve.application import build

        answer = build(self.lifetime, self._settings)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def sent(message: Any) -> None:
                if message["type"] == "http.response.start":
                    headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                    message = {**message, "headers": headers}
                await send(message)

            await answer(scope, receive, sent)

        return app

    def models(self) -> list[str]:
        """Names of its engines for clients."""
        return list(self.lifetime.models)

    def check_health(self) -> None:
        """Raise `EngineClosed` once an engine has died: Serve ends the replica then, and starts another one."""
        if not self.lifetime.alive:
            raise EngineClosed("an engine of this replica has stopped; its log says why.")

    async def __del__(self) -> None:
        """Give the device back; the requests have ended by now."""
        for model in self.lifetime.models.values():
            await asyncio.to_thread(model.engine.close)
        self._open.close()
