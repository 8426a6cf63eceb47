"""One client's request while the engine works on it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dgraph.engine.engine import EngineClosed
from dgraph.engine.io.event_loop import EventLoopBridge
from dgraph.engine.io.events import Event
from dgraph.engine.submission import RequestSpec
from dgraph.errors import EngineBusy, InputError, UnknownName
from dgraph.serve.inbox import EventQueue
from dgraph.serve.refusal import Refusal, not_now, shut_down, unavailable
from dgraph.serve.served_model import ServedModel
from dgraph.serve.translate import ParsedRequest, refused

LOGGER = logging.getLogger("dgraph.serve")

Arrival = tuple[int, Event] | None
"""The event of a choice, with its index; or None, which only wakes the reader."""
BEHIND = 1024
"""Events that may wait for a client to read, beside those in the connection; a client further behind counts as gone."""


class HttpStream:
    """The choices of a request in its engine.

    Attributes:
        model: the model whose engine works on them.
        order: the request, translated; set by `begin`.
        inbox: their events as they come; None in between to wake the reader for another reason.
        names: their ids in the engine.
        left: choices that have not ended.
        gone: True if the client has left.
    """

    order: ParsedRequest

    def __init__(self, model: ServedModel):
        self.model = model
        self.events: EventQueue[Arrival] = EventQueue()
        self.names: list[str] = []
        self.left = 0
        self.gone = False
        self._cancelled = False

    async def begin(self, translate: Callable[[ServedModel], ParsedRequest]) -> None:
        """Read a request, and give all of its choices to the engine, or none.

        It is read and checked in a thread, as a long text takes its time.

        Raises:
            Refusal: it cannot be served, or the engine is busy or closed.
        """
        event_loop_bridge = self.model.engine.event_loop_bridge()

        def read() -> list[RequestSpec]:
            self.order = translate(self.model)
            self.left = len(self.order.prompts) * self.order.choices
            return self._request_specs(event_loop_bridge)

        try:
            self.names = await self.model.engine.submit_async(read)
        except (EngineBusy, EngineClosed) as error:
            raise not_now(error) from None
        except (InputError, UnknownName) as error:
            raise refused(error, self.order.where, next(iter(self.order.decodings), None)) from None
        if self._cancelled:  # while the request was read
            self.cancel()

    def _request_specs(self, event_loop_bridge: EventLoopBridge) -> list[RequestSpec]:
        order = self.order
        return [
            RequestSpec(
                prompt=order.prompts[index // order.choices],
                decoding=order.decodings[index // order.choices],
                sink=event_loop_bridge.to(self._putting(index)),
                canvas=order.canvas,
                index=index,
                number=index // order.choices,
                draft=order.draft,
                shown=order.shown,
            )
            for index in range(self.left)
        ]

    def _putting(self, index: int) -> Callable[[Event], None]:
        def put(event: Event) -> None:
            if len(self.events) < BEHIND:
                self.events.put((index, event))
            elif not self.gone:
                self.leave()

        return put

    def leave(self) -> None:
        """Note that the client is gone, cancel its choices and wake the reader."""
        self.gone = True
        self.cancel()
        self.events.put(None)

    def cancel(self) -> None:
        """End all choices that have not ended, before the engine's next step."""
        self._cancelled = True
        for name in self.names:
            self.model.engine.cancel(name)


def failed(event: Event) -> Refusal | None:
    """The refusal for a choice that was cancelled or has failed; None for any other event."""
    if event.finish_reason == "cancelled":
        return shut_down()
    if event.finish_reason != "error":
        return None
    if isinstance(event.error, EngineClosed):
        return unavailable("the engine has stopped, and ended this request.", "closed")
    if isinstance(event.error, (InputError, UnknownName)):
        return refused(event.error)
    LOGGER.error("a request failed in the engine", exc_info=event.error)
    return Refusal(500, "the request failed in the engine; the server's log says why.", code="failed")
