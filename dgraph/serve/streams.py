"""Answers over HTTP: in one piece, or as server-sent events while the engine works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dgraph.engine.io.events import Event
from dgraph.serve.answers import Answer, to_json
from dgraph.serve.refusal import Refusal
from dgraph.serve.running import HttpStream, failed

KEEP_ALIVE = b": still here\n\n"
DONE = "data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Seen = Callable[[int, Event], None]
"""Called with the index of a choice and an event of it, for every event of a request."""


class RefusalResponse(JSONResponse):
    """Answer to a refused request; its line of the log says why. headers: sent beside the refusal's own."""

    def __init__(self, refusal: Refusal, headers: Mapping[str, str] | None = None):
        super().__init__(refusal.body, refusal.status, {**refusal.headers, **(headers or {})})
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        scope["record"].refuse(self._refusal)
        await super().__call__(scope, receive, send)


class RunningResponse(Response):
    """Answer to a request that the engine works on; a client that hangs up cancels it.

    Args:
        running: the request.
        answer: turns its events into objects and chunks.
        seen: called with each of its events.
        ended: called when it is over, also after an error.
        keep_alive: seconds without an event after which a stream gets a comment.
    """

    def __init__(self, running: HttpStream, answer: Answer, seen: Seen, ended: Callable[[], None], keep_alive: float):
        super().__init__()
        self._running, self._answer, self._seen, self._ended = running, answer, seen, ended
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        watch = asyncio.create_task(self._watch(receive))
        try:
            await self._answer_with(scope, receive, send)
        finally:
            watch.cancel()
            self._running.cancel()
            self._ended()

    async def _answer_with(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._running.leave()


class WholeResponse(RunningResponse):
    """Answer in one piece, sent when the request has ended."""

    async def _answer_with(self, scope: Scope, receive: Receive, send: Send) -> None:
        running, answer = self._running, self._answer
        while running.left and not running.gone:
            for arrival in await running.events.take():
                if arrival is None:
                    continue
                index, event = arrival
                self._seen(index, event)
                refusal = failed(event)
                if refusal is not None and not running.gone:
                    await RefusalResponse(refusal)(scope, receive, send)
                    return
                answer.keep(answer.choices[index], event)
                running.left -= event.finish_reason is not None
        if not running.gone:
            await Response(answer.whole(), media_type="application/json")(scope, receive, send)


class StreamResponse(RunningResponse):
    """Answer as server-sent events, sent as tokens become final."""

    async def _answer_with(self, scope: Scope, receive: Receive, send: Send) -> None:
        running, loop = self._running, asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        sent = loop.time()

        timer: asyncio.TimerHandle

        def tick() -> None:
            nonlocal timer
            running.events.put(None)
            timer = loop.call_later(self._keep_alive, tick)

        timer = loop.call_later(self._keep_alive, tick)
        try:
            while running.left and not running.gone:
                data = "".join(self._told(arrival) for arrival in await running.events.take() if arrival is not None)
                if data or loop.time() - sent >= 0.9 * self._keep_alive:
                    await send(part(data.encode() or KEEP_ALIVE))
                    sent = loop.time()
        finally:
            timer.cancel()
        if not running.gone:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _told(self, arrival: tuple[int, Event]) -> str:
        """An event as lines of the stream; the last event of a request includes the end of the stream."""
        running, answer = self._running, self._answer
        index, event = arrival
        if not running.left:  # the request has failed: drop the events that still come
            return ""
        self._seen(index, event)
        refusal = failed(event)
        if refusal is not None:
            running.left = 0
            return f"data: {to_json(refusal.body)}\n\n{DONE}"
        told = "".join(f"data: {chunk}\n\n" for chunk in answer.chunks(answer.choices[index], event))
        if event.finish_reason is not None:
            running.left -= 1
            if not running.left:
                told += f"data: {answer.usage_chunk()}\n\n" if answer.order.usage_at_end else ""
                told += DONE
        return told


def part(data: bytes) -> dict[str, Any]:
    """ASGI message with a piece of a body that is not its last."""
    return {"type": "http.response.body", "body": data, "more_body": True}
