"""A process that serves: its port, bound before engines load, its signals and its end."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping
from types import FrameType

import uvicorn

from dgraph.engine.engine import Engine
from dgraph.errors import InputError
from dgraph.serve.application import build
from dgraph.serve.connections import Crowd, room_for
from dgraph.serve.lifetime import Lifetime
from dgraph.serve.settings import ServerConfig

BACKLOG = 2048
"""Connections that may wait to be accepted."""
GRACE = 3
"""Seconds for connections to close when nothing is left to say on them."""
LOOK = 1.0
"""Seconds between two checks for a dead engine."""
WAKE = 10.0
"""Seconds that a server goes on after an engine died: /health and /metrics tell of it, and clients ask elsewhere."""

Loader = Callable[[Callable[[str], None]], Mapping[str, Engine]]
"""Makes the engines; its argument is a function that it calls with a text for each thing that it does."""


class Stopped(Exception):
    """Raised in the loader when the server is to stop while it loads."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 for any free one.

    Raises:
        InputError: the address cannot be had.
    """
    if not 0 <= port < 1 << 16:
        raise InputError(f"a port is a number from 0 to 65535, got {port}.")
    try:
        asked = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # The protocol is named because asyncio sets TCP_NODELAY only on sockets that say they are TCP.
        found = socket.socket(asked[0], socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(asked[4])
            found.listen(BACKLOG)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise InputError(
            f"cannot listen at {host}:{port}: {_reason(error)}. Choose another --host or --port (0 for any "
            f"free one), or stop whatever listens there."
        ) from None
    found.setblocking(False)
    return found


def _reason(error: OSError) -> str:
    """The system's text for an error, as that of a socket repeats the address."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Host(uvicorn.Server):
    """Server on a socket, both while a thread loads the engines and afterwards.

    The first SIGTERM or SIGINT drains: no more requests are taken, and running ones are ended after
    `shutdown_timeout`. The second ends them at once. A server whose engine has died ends, too, with that error, as only
    a new process revives it.

    Args:
        listener: see `bind`.
        settings: settings of the application.
        shutdown_timeout: seconds that requests may take after the first signal.
    """

    def __init__(self, listener: socket.socket, settings: ServerConfig, shutdown_timeout: float):
        self.lifetime = Lifetime()
        settings = settings.listening_at(listener.getsockname()[0])
        crowd = Crowd(settings, self.lifetime, room_for(settings.max_connections))
        super().__init__(
            uvicorn.Config(
                build(self.lifetime, settings),
                http=crowd.protocol(),
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=math.ceil(settings.idle_timeout + GRACE),  # `Connection` closes sooner
                timeout_graceful_shutdown=GRACE,
            )
        )
        self._listener, self._shutdown_timeout = listener, shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def serve_with(self, load: Loader, tell: Callable[[str], None], ready: Callable[[str], None]) -> None:
        """Serve until a signal comes.

        Args:
            load: see `Loader`.
            tell: called with a text for each thing that the loader does.
            ready: called once with the address, when requests are taken.

        Raises whatever `load` raises, and `EngineClosed` if an engine has died.
        """

        def loading() -> None:
            try:
                engines = load(self._telling(tell))
                self.lifetime.begin(engines)
                ready(address(self._listener))
            except Stopped:
                pass
            except BaseException as error:
                self._failure = error
                self.should_exit = True

        thread = threading.Thread(target=loading, name="dgraph loader", daemon=True)
        thread.start()
        try:
            self.run([self._listener])
        finally:
            self.lifetime.draining = True
            thread.join(self._shutdown_timeout)
            for model in self.lifetime.models.values():
                model.engine.close()
        if self._failure is not None:
            raise self._failure

    def _telling(self, tell: Callable[[str], None]) -> Callable[[str], None]:
        def told(what: str) -> None:
            if self.lifetime.draining:
                raise Stopped
            tell(what)

        return told

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        self._loop = asyncio.get_running_loop()
        self._watch = asyncio.create_task(self._watching())
        await super().startup(sockets)

    async def _watching(self) -> None:
        """Stop the server `WAKE` seconds after an engine has died."""
        while (dead := self.lifetime.dead) is None:
            await asyncio.sleep(LOOK)
        self._failure = dead
        await asyncio.sleep(WAKE)
        if self._drain is None:
            self.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: exit before the event loop runs, else call `stop` in its thread."""
        if self._loop is None:
            self.should_exit = True
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Drain, and then exit; at once if it is called a second time. Used only in the thread of the event loop."""
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._end(self._shutdown_timeout))
        else:
            self._drain.cancel()
            self._drain = asyncio.ensure_future(self._end(0.0))

    async def _end(self, timeout: float) -> None:
        await self.lifetime.drain(timeout)
        self.should_exit = True
