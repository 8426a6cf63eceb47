"""The checks that every request passes: id, host, key and body; and its line in the log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dgraph.serve.access_log import PROBES, Record
from dgraph.serve.lifetime import Lifetime
from dgraph.serve.refusal import Refusal, unavailable
from dgraph.serve.settings import ServerConfig, takes_key
from dgraph.serve.streams import RefusalResponse

LOGGER = logging.getLogger("dgraph.serve")
REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""Form of an id that a client may give with a request."""
DROPPED = 64 << 20
"""Most bytes of a refused body that are read and dropped."""
SIGNS = {",": 1 << 18, "[": 1 << 15, "{": 1 << 15}
"""Most of these characters in a body, in texts or not. A million of the values that they begin take a second to read,
and every stream waits meanwhile.
"""
RETRY = 1.0
"""Seconds after which a client asks again, if there was no room."""
CLOSE = {"Connection": "close"}
"""Headers of an answer after which the rest of the request is not awaited."""
CROWDED = "crowded"
"""Entry of a scope: True if its connection is beyond those that a server has room for."""


class ClientLeft(Exception):
    """The connection ended in the middle of a request."""


class Guard:
    """An ASGI application around another.

    Every request has a `Record` in its scope, under "record", to which the handler adds facts.
    """

    def __init__(self, app: ASGIApp, settings: ServerConfig, lifetime: Lifetime):
        self._app, self._settings, self._lifetime = app, settings, lifetime
        self._keys = [sha256(key.encode()).digest() for key in settings.api_keys]
        self._hosts = frozenset(map(_name, settings.allowed_hosts))
        self._held, self._most_held = 0, max(settings.max_held_bytes, settings.max_body_bytes)  # bytes of all bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = scope["headers"]
        record = Record(_request_id(headers), scope["method"], scope["path"], scope.get("client"))
        scope["record"] = record
        answering = _Answering(send, record)
        try:
            try:
                if scope["path"] not in PROBES:
                    self._check_room(scope)
                    self._check_host(headers)
                self._check_key(scope)
                receive = await self._with_body(scope, receive)
            except Refusal as refusal:
                if refusal.status != 408 and _closes(scope):
                    await self._drop_body(receive)
                closing = CLOSE if refusal.status == 408 or scope.get(CROWDED) else None
                await RefusalResponse(refusal, closing)(scope, receive, answering)
                return
            await self._app(scope, receive, answering)
        except ClientLeft:
            pass
        except Exception:
            LOGGER.exception("request %s failed", record.request_id)
            if answering.begun:
                raise  # so that the connection is closed: the client sees that something is missing
            broken = Refusal(500, "the server failed; its log says why.", code="internal")
            await RefusalResponse(broken)(scope, receive, answering)
        finally:
            self._held -= record.size
            self._lifetime.ended(record)

    def _check_room(self, scope: Scope) -> None:
        if scope.get(CROWDED):
            raise unavailable("the server has no room for more connections now.", "busy", RETRY)

    def _check_host(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        given = _header(headers, b"host").decode("latin-1")
        host = _name(re.sub(r":[0-9]*$", "", given))
        if host and self._hosts and "*" not in self._hosts and host not in self._hosts:
            raise Refusal(
                403,
                "this server is not asked by that name (the Host header); `dgraph serve --allowed-host NAME` adds one.",
                code="host_not_allowed",
            )

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # where the application is mounted
        if not self._keys or scope["method"] == "OPTIONS" or not takes_key(path):
            return
        given = _header(scope["headers"], b"authorization")
        kind, _, key = given.partition(b" ")
        digest = sha256(key.strip()).digest() if kind.lower() == b"bearer" else b""
        if not any_equal(digest, self._keys):
            raise Refusal(401, "this server asks for a key: send Authorization: Bearer KEY.", code="invalid_api_key")

    async def _with_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the whole body; the result gives the same messages with the body in one of them."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        record, most, body = scope["record"], self._settings.max_body_bytes, bytearray()
        said = _header(scope["headers"], b"content-length")
        if said.isdigit() and int(said[:20]) > most:
            raise _too_large(most, int(said[:20]))
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    body += (part := message.get("body", b""))
                    self._held, record.size = self._held + len(part), record.size + len(part)
                    if record.size > most:
                        raise _too_large(most, record.size)
                    if self._held > self._most_held:
                        raise unavailable("the server holds too many large requests now.", "busy", RETRY)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise Refusal(408, "the body of the request did not come in time.", code="timeout") from None
        for sign, often in SIGNS.items():
            if (count := body.count(sign.encode())) > often:
                got = f"this one has {count}"
                raise Refusal(413, f"the body of a request has {often} of {sign!r} at most; {got}.", code="too_large")
        whole = [bytes(body)]
        del body

        async def replay() -> Message:
            if whole:
                return {"type": "http.request", "body": whole.pop(), "more_body": False}
            return await receive()

        return replay

    async def _drop_body(self, receive: Receive) -> None:
        """Read the rest of a body, within `DROPPED` bytes and `body_timeout` seconds.

        A connection that is closed with unread bytes is reset, and the client never sees the answer.
        """
        left = DROPPED
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.body_timeout):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return


class _Answering:
    """ASGI `send` that adds the request's id and notes the status; `begun`: True once a status was sent."""

    def __init__(self, send: Send, record: Record):
        self._send, self._record, self.begun = send, record, False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._record.status, self.begun = message["status"], True
            headers = [*message.get("headers", ()), (b"x-request-id", self._record.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)


def _too_large(most: int, size: int) -> Refusal:
    got = f"this one has {size} or more"
    return Refusal(413, f"the body of a request has at most {most} bytes here; {got}.", code="too_large")


def _name(host: str) -> str:
    """A host name in the form in which names are compared."""
    return host.strip().lower().removesuffix(".")


def any_equal(digest: bytes, known: Sequence[bytes]) -> bool:
    """True if a digest is one of `known`; takes the same time whichever it equals."""
    found = False
    for one in known:
        found |= hmac.compare_digest(digest, one)
    return found


def _closes(scope: Scope) -> bool:
    """True if the connection closes after the answer and the client sends its body without `Expect`.

    On a connection that stays open, the HTTP server reads the rest itself.
    """
    headers = scope["headers"]
    last = scope["http_version"] == "1.0" or b"close" in _header(headers, b"connection").lower()
    return last and not _header(headers, b"expect")


def _header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    given = _header(headers, b"x-request-id").decode("latin-1")
    return given if REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"
