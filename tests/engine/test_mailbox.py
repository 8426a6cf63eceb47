"""From an engine's thread to an event loop: order, wake-ups, loops that are closed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from dgraph.engine.io.event_loop import EventLoopBridge
from dgraph.engine.io.events import Event, Usage


def event(name: str) -> Event:
    return Event(name, "", (), (), (), Usage(1, 0))


def test_events_of_many_requests_arrive_in_order_and_wake_the_loop_once() -> None:
    woken: list[Any] = []
    got: dict[str, list[Event]] = {"a": [], "b": []}

    async def run() -> None:
        loop = asyncio.get_running_loop()
        box = EventLoopBridge(loop, lambda event: None)
        sinks = {name: box.to(events.append) for name, events in got.items()}
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (woken.append(args), wake(*args))[1]  # type: ignore[method-assign]
        sent = [event(name) for name in "abbaab"]

        def step() -> None:
            for one in sent:
                sinks[one.request_id](one)

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert (len(woken), got) == (1, {"a": [], "b": []}), "the loop has not had a turn"
        await asyncio.sleep(0)
        assert got == {name: [one for one in sent if one.request_id == name] for name in "ab"}
        sinks["a"](sent[0])
        await asyncio.sleep(0)
        assert (len(woken), len(got["a"])) == (2, 4)

    asyncio.run(run())


def test_a_loop_that_is_closed_gets_nothing_and_its_requests_are_lost() -> None:
    lost: list[Event] = []
    loop = asyncio.new_event_loop()
    sink = EventLoopBridge(loop, lost.append).to(lambda event: None)
    sink(event("early"))  # the loop is closed before its next turn
    loop.close()
    late = event("late")
    sink(late)
    del loop
    sink(late)
    assert lost == [late, late]
