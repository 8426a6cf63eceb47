"""Connections whose clients may be slow, silent or hostile: none takes memory, files or time without bound."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from functools import partial
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dgraph.serve.access_log import Record
from dgraph.serve.guard import CROWDED
from dgraph.serve.lifetime import Lifetime
from dgraph.serve.refusal import Refusal
from dgraph.serve.settings import ServerConfig

if sys.platform != "win32":
    import resource

SPARE = 16
"""Connections beyond the limit that are answered with a refusal; others are closed."""
RESERVE = 64
"""File descriptors that are left to the rest of the process."""
PIPELINED = 64
"""Requests that may wait on a connection for the answer to another, at most."""
LINGER = 5.0
"""Seconds in which a refused client's remaining bytes are read and dropped: else a reset would lose its answer."""
DESCRIPTORS = "/proc/self/fd"
"""Folder that lists the open files of a process, on systems that have it."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: each connection is a file."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for(most: int) -> int:
    """The number of connections that the remaining file descriptors allow: `most` at most, and at least 1."""
    if sys.platform == "win32":
        return most
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    used = len(os.listdir(DESCRIPTORS)) if os.path.isdir(DESCRIPTORS) else RESERVE
    return max(1, min(most, soft - used - RESERVE - SPARE))


class Crowd:
    """All connections of a server. Used only in the thread of its event loop.

    If there are too many, the one that has waited longest for its client is closed. A connection waits for a head, for
    a body, or for the client to read. If none waits, the new one is told that there is no room.

    Args:
        settings: time limits and size limits.
        lifetime: counts refused requests and dropped connections.
        most: connections that there may be.
    """

    def __init__(self, settings: ServerConfig, lifetime: Lifetime, most: int):
        self.settings, self.lifetime, self._most = settings, lifetime, most
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # in the order in which they began to wait

    def protocol(self) -> type[asyncio.Protocol]:
        """Factory of connections, as uvicorn expects it."""
        return cast(type[asyncio.Protocol], partial(Connection, self))

    def enter(self, one: Connection) -> None:
        """Add a new connection, and make room for it."""
        self._open.add(one)
        if not self.full:
            return
        longest = next(iter(self._waiting), None)
        if longest is not None:
            longest.drop("crowded")
        elif len(self._open) > self._most + SPARE:
            one.drop("crowded")
        else:
            one.crowded = True

    @property
    def full(self) -> bool:
        """True while there are more connections than there may be."""
        return len(self._open) > self._most

    def waits(self, one: Connection) -> None:
        """Note that a connection waits for its client from now on."""
        self._waiting.pop(one, None)
        self._waiting[one] = None

    def works(self, one: Connection) -> None:
        """Note that a connection no longer waits for its client."""
        self._waiting.pop(one, None)

    def leave(self, one: Connection) -> None:
        """Remove a connection that is over."""
        self._open.discard(one)
        self.works(one)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with a bound on bytes outside bodies and a time limit on every wait.

    It limits the time until the head of a request has come, and after the answer; the guard limits that of a body.
    """

    def __init__(self, crowd: Crowd, **given: Any):
        super().__init__(**given)
        self.crowded = False
        self._crowd, self._settings = crowd, crowd.settings
        self._timer: asyncio.TimerHandle | None = None  # while it waits for its client
        self._stall: asyncio.TimerHandle | None = None  # while its client does not read
        self._fault: Refusal | None = None
        self._in_head = self._in_body = self._refused = False
        self._head = 0  # bytes of the request's line and headers, and of trailers
        self._unread = 0  # bytes since the last part of a body, or the end of the last head

    # -- input ---------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._crowd.enter(self)
        self._wait(self._settings.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and leave the crowd."""
        super().connection_lost(exc)
        self._stop_timer()
        self._flows()
        self._crowd.leave(self)

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes; after a refusal, drop them."""
        if self._refused:
            return
        self._unset_keepalive_if_required()
        self._unread += len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade:
            pass  # there is no other protocol here
        except HttpParserError:
            self._refuse(self._fault or Refusal(400, "the request is not HTTP/1.1.", code="http_invalid"))
        if self._unread > self._settings.max_header_bytes and not self._refused:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        """Begin the head of a request, at its first byte."""
        super().on_message_begin()
        self._in_head, self._head = True, 0
        if not self._answering:
            self._wait(self._settings.header_timeout)

    def on_url(self, url: bytes) -> None:
        """Count a part of a request's line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or a trailer."""
        self._count(len(name) + len(value))
        if len(self.headers) >= self._settings.max_headers:
            self._fail(self._too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer and begin the answer: the head is whole."""
        self._in_head, self._in_body, self._unread = False, True, 0
        if len(self.pipeline) >= PIPELINED:
            self._fail(Refusal(400, f"at most {PIPELINED} requests wait on a connection.", code="http_invalid"))
        self._stop_timer()
        self.crowded = self.crowded and self._crowd.full
        cast(dict[str, Any], self.scope)[CROWDED] = self.crowded
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of a body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body, at the last byte of a request."""
        self._in_body = False
        if self._answering:
            self._crowd.works(self)
        super().on_message_complete()

    # -- waits ---------------------------------------------------------------------------------------------------------

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        """Give the client some seconds, then `_late` refuses or drops it."""
        self._stop_timer()
        self._crowd.waits(self)
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._in_head and not self._refused:
            self._refuse(Refusal(408, "the head of the request did not come in time.", code="timeout"))
        else:
            self.drop("not_read" if self.transport.get_write_buffer_size() else "idle")

    def on_response_complete(self) -> None:
        """Wait for the next event after an answer: the rest of the body, another request, or the client's reading."""
        super().on_response_complete()
        if self._answering:  # the next of several requests that came together
            return
        settings = self._settings
        if self.transport.is_closing():
            self._wait(settings.send_timeout)
        elif self._in_head:
            self._wait(settings.header_timeout)
        else:
            self._wait(settings.body_timeout if self._in_body else settings.idle_timeout)

    def pause_writing(self) -> None:
        """Watch a client that reads slower than the server writes."""
        super().pause_writing()
        self._crowd.waits(self)
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop watching: the client has read."""
        super().resume_writing()
        self._flows()
        if self._answering:
            self._crowd.works(self)

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self._settings.send_timeout, self._stalled, left)

    def _stalled(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_reader()
        else:
            self.drop("not_read")

    def _flows(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def drop(self, reason: str) -> None:
        """Close the connection now, whatever is unsent, and count the reason."""
        self._crowd.lifetime.dropped[reason] += 1
        self._crowd.leave(self)
        self._stop_timer()
        self.transport.abort()

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > self._settings.max_header_bytes:
            self._fail(self._too_large())

    def _too_large(self) -> Refusal:
        most, count = self._settings.max_header_bytes, self._settings.max_headers
        said = f"the line and the headers of a request have at most {most} bytes here, in {count} headers"
        return Refusal(431, f"{said}; send fewer.", code="headers_too_large")

    def _fail(self, refusal: Refusal) -> None:
        """Raise `ValueError` to stop the parser; `data_received` then answers with this refusal."""
        self._fault = refusal
        raise ValueError(refusal.message)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, drop further input, and close when the answer was read. In the middle of another answer, close."""
        self._refused = True
        if self._answering:
            self.drop("invalid")
            return
        scope = self.scope or {}
        made = Record(f"{random.getrandbits(128):032x}", scope.get("method", ""), scope.get("path", ""), self.client)
        made.refuse(refusal)
        self._crowd.lifetime.ended(made)
        body = json.dumps(refusal.body).encode()
        lines = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", made.request_id.encode()),
            (b"connection", b"close"),
        ]
        head = b"".join(b"%s: %s\r\n" % line for line in lines)
        self.transport.write(STATUS_LINE[refusal.status] + head + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._wait(min(LINGER, self._settings.send_timeout))
