"""An engine that decodes requests together as they come and go, and tells each caller which tokens are final."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
import weakref
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch import Tensor

from dgraph.engine.core import EngineCore
from dgraph.engine.io.event_loop import EventLoopBridge, weakly
from dgraph.engine.io.events import Event, Response, into, next_end
from dgraph.engine.io.label_questions import Answer, Questions
from dgraph.engine.io.sinks import GuardedSink
from dgraph.engine.io.tickets import EngineRequest, Sink
from dgraph.engine.stats import EngineStats
from dgraph.engine.submission import RequestSpec
from dgraph.engine.thread import EngineClosed, EngineThread
from dgraph.errors import EngineBusy, InputError
from dgraph.errors.former import former_attribute
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.loop.label_scoring import Question
from dgraph.runtime.request_checks import canvases_of, either, ids_of, listed
from dgraph.runtime.sampling.stops import Decoder


class Engine:
    """Decode requests in slots, as they come, in a thread of its own. Make one with `CompiledModel.engine`.

        with opt.engine(max_sequences=64) as engine:
            responses = engine.generate(["Sort: b a", "Sort: d c"], max_new_tokens=64)

        async with opt.engine() as engine:
            async for event in engine.stream("Sort: b a", threshold=0.9):
                print(event.text, end="")

    Every request may have a `Decoding` of its own. Its tokens are those that it would get alone.

    Args:
        core: takes requests through their slots.
        questions: answers those about labels.
        model: its name; recipe: the name of its recipe; spec: the facts of it.
        tokenizer: as the model has it; None for no text.
        encode: ids of a text; raises `InputError` without a tokenizer.
        occupied: entered while the core runs, so that no other caller uses the model meanwhile.
    """

    def __init__(
        self,
        core: EngineCore,
        questions: Questions,
        encode: Callable[[str], list[int]],
        occupied: Callable[[], AbstractContextManager[object]],
        *,
        model: str,
        recipe: str,
        tokenizer: Decoder | None,
    ):
        self._core, self._questions, self._encode = core, questions, encode
        self.model, self.recipe, self.spec, self.tokenizer = model, recipe, core.session.spec, tokenizer
        self._bridges = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, EventLoopBridge]()
        self._ids: dict[str, int] = {}  # of requests that have not ended
        self._numbers = itertools.count()
        self._loop = EngineThread(core, questions, occupied)
        self._wake = self._loop.wake
        weakref.finalize(self, self._loop.leave).atexit = False  # a dropped engine can no longer be closed

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        decoding: Decoding | None = None,
        *,
        sink: Sink,
        canvas: Sequence[int | None] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        draft: bool = False,
        index: int = 0,
        **settings: Any,
    ) -> str:
        """Queue a request; returns its id. `sink` gets its events, in the engine's thread: it must return at once.

        Args:
            prompt: a text, framed by the model's chat template, or ids as they are.
            decoding: how; settings: instead, its fields by keyword.
            canvas: the beginning of the response as far as it is fixed (infilling): ids, and None where it is free, as
                is all after it. Fixed tokens are there from the first step on and never change; a stop token among
                them ends the response.
            request_id: unique among requests that have not ended; None to make one.
            priority: higher goes first; a whole number of 32 bits, as is `index`.
            draft: True: one event per step shows the block that is being decoded, as the step left it.
            index: of the prompt among others of one seed; draws differ by it.

        Raises:
            InputError: a prompt or a setting that cannot be used, or that never fits; an id that is in use.
            UnknownName: a setting or a scheduler that does not exist.
            EngineBusy: the queue is full.
            EngineClosed: the engine was closed.
        """
        one = RequestSpec(
            prompt=prompt,
            decoding=Decoding.of(decoding, settings),
            sink=sink,
            canvas=canvas,
            request_id=request_id,
            priority=priority,
            draft=draft,
            index=index,
        )
        (name,) = self.submit_all([one])
        return name

    def submit_all(self, several: Sequence[RequestSpec]) -> list[str]:
        """Queue requests at once: all of them or, where this raises, none. Returns their ids.

        No step is planned with some of them before the rest has come. The engine goes on while they are checked.

        Raises what `submit` does, and `InputError` for more than may ever wait.
        """
        self._check_room(len(several))  # first: requests that are not taken need no check
        return self._queue(several, [self._ticket(one) for one in several])

    async def submit_async(self, read: Callable[[], Sequence[RequestSpec]]) -> list[str]:
        """Queue requests at once from an event loop, which goes on meanwhile.

        Requests are read and checked in another thread, where a long prompt takes its time, and the first request of
        its kind compiles. A caller that is cancelled while it waits has queued nothing.

        Args:
            read: gives the requests, in that thread. It is called there since threads wait for the interpreter in
                turns. The engine's own thread, busy between two steps, lets go of it only every 5 ms.

        Raises what `submit_all` and `read` do.
        """

        def checked() -> tuple[Sequence[RequestSpec], list[EngineRequest]]:
            several = read()
            return several, [self._ticket(one) for one in several]

        self._check_room(1)
        return self._queue(*await asyncio.to_thread(checked))

    def _ticket(self, one: RequestSpec) -> EngineRequest:
        """Make a ticket, without an id, of a request that can be served; raise what `submit` does for one that cannot.
        Checking many takes its time, so the lock is not held here.
        """
        request = one.checked(self._core, self._encode)
        sink = GuardedSink(one.sink, self._freed, self.cancel)
        ticket = self._core.ticket("", next(self._numbers), request, sink, one.draft, one.priority)
        self._core.fits(ticket)
        return ticket

    def _queue(self, several: Sequence[RequestSpec], tickets: Sequence[EngineRequest]) -> list[str]:
        """Give requests their ids, and pass them to the engine, all or none."""
        with self._wake:
            self._check_room(len(tickets))
            ids = ChainMap({}, self._ids)
            for one, ticket in zip(several, tickets, strict=True):
                ticket.id = _name(ticket.number, ids) if one.request_id is None else one.request_id
                if ticket.id in ids:
                    raise InputError(
                        f"request id {ticket.id!r} is in use by a request that has not ended; choose another."
                    )
                ids[ticket.id] = ticket.number
            self._ids |= ids.maps[0]
            self._loop.inbox += tickets
            self._wake.notify()
        return [ticket.id for ticket in tickets]

    def _freed(self, request_id: str) -> None:
        with self._wake:
            self._ids.pop(request_id, None)

    def cancel(self, request_id: str) -> bool:
        """End a request before its next step; True if one of that id had not ended. Its stream ends with the reason
        "cancelled".
        """
        return self._cancel(request_id, self._ids.get(request_id))

    def _cancel(self, request_id: str, number: int | None) -> bool:
        """Cancel a request, unless its id belongs to another request by now."""
        with self._wake:
            if number is None or self._ids.get(request_id) != number:
                return False
            self._loop.cancelled.append(number)
            self._wake.notify()
        return True

    def _unheard(self, event: Event) -> None:
        """End a request whose events have no listener; after its last event, its id may belong to another request."""
        if event.finish_reason is None:
            self.cancel(event.request_id)

    def event_loop_bridge(self) -> EventLoopBridge:
        """Bridge to the running event loop: it makes sinks whose events arrive there."""
        loop = asyncio.get_running_loop()
        if loop not in self._bridges:
            self._bridges[loop] = EventLoopBridge(loop, weakly(self._unheard))
        return self._bridges[loop]

    async def stream(
        self,
        prompt: str | Sequence[int],
        decoding: Decoding | None = None,
        *,
        canvas: Sequence[int | None] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        draft: bool = False,
        index: int = 0,
        **settings: Any,
    ) -> AsyncIterator[Event]:
        """Stream the events of one request, as they come; see `submit`. Leaving the loop cancels it.

        Raises what `submit` does before the first event, and the request's own error in the place of the last one.
        """
        events = asyncio.Queue[Event]()
        one = RequestSpec(
            prompt=prompt,
            decoding=Decoding.of(decoding, settings),
            sink=self.event_loop_bridge().to(events.put_nowait),
            canvas=canvas,
            request_id=request_id,
            priority=priority,
            draft=draft,
            index=index,
        )
        (name,) = await self.submit_async(lambda: [one])
        number, ended = self._ids.get(name), False
        try:
            while not ended:
                event = await events.get()
                ended = event.finish_reason is not None
                if event.error is not None:
                    raise event.error
                yield event
        finally:
            if not ended:
                self._cancel(name, number)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]] | None = None,
        decoding: Decoding | Sequence[Decoding] | None = None,
        *,
        input_ids: Sequence[Sequence[int]] | Tensor | None = None,
        canvas: Sequence[int | None] | Sequence[Sequence[int | None] | None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> list[Response]:
        """Continue prompts and wait for all of them.

        Args:
            prompts: one text or several, or ids of each.
            input_ids: instead of texts, ids per prompt, used as they are (i64[b, t] or a list of lists).
            decoding: how, for all or for each; settings: instead, its fields by keyword.
            canvas: of one text, what is fixed of its response; of several prompts, of each (see `submit`).
            progress: called with (requests that ended, requests in all).

        Raises what `submit` does, and the first error of a request; the others are cancelled then.
        """
        if own := sorted({"sink", "index"} & settings.keys()):
            raise InputError(f"generate gives requests their {' and '.join(own)}; submit takes one for a request.")
        either(prompts, input_ids)
        several = ids_of(input_ids) if prompts is None else listed(prompts)
        each = list(decoding) if isinstance(decoding, Sequence) else [decoding] * len(several)
        if len(each) != len(several):
            raise InputError(f"give one decoding, or one for each of {len(several)} prompts, got {len(each)}.")
        canvases = canvases_of(prompts, canvas) or [None] * len(several)
        if len(canvases) != len(several):
            raise InputError(f"give one canvas for each of {len(several)} prompts, got {len(canvases)}.")
        arrived: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        names: list[str] = []
        pieces: list[list[Event]] = [[] for _ in several]
        try:
            for index, (prompt, chosen, fixed) in enumerate(zip(several, each, canvases, strict=True)):
                sink = into(arrived, index)
                while True:
                    try:
                        names.append(self.submit(prompt, chosen, sink=sink, canvas=fixed, index=index, **settings))
                        break
                    except EngineBusy as busy:
                        time.sleep(min(busy.retry_after, 0.1))
            for done in range(len(several)):
                index, event = next_end(arrived, pieces)
                if event.error is not None:
                    raise event.error
                if progress is not None:
                    progress(done + 1, len(several))
        except BaseException:
            for name in names:
                self.cancel(name)
            raise
        return [Response.of(events, self.tokenizer is not None) for events in pieces]

    def decide(
        self,
        prompt: str | Sequence[int],
        labels: Sequence[Sequence[int]],
        *,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> Answer:
        """Probability of each label in a slot after a prompt; see `dgraph.runtime.loop.label_scoring`.

        One forward of the model as published, between two steps, gives it and leaves nothing behind.

            probabilities = engine.decide("Is the sky green?", [yes, no]).result()
            probabilities = await engine.decide("Is the sky green?", [yes, no], after=full_stop)

        Args:
            prompt: a text, framed by the model's chat template, or ids as they are.
            labels: a list of ids for each.
            before, after: ids between the prompt and the slot, and after it.

        Raises:
            InputError: what cannot be asked. EngineBusy: the queue is full. EngineClosed: the engine was closed.
        """
        (answer,) = self.decide_all([(prompt, labels)], before=before, after=after)
        return answer

    def decide_all(
        self,
        several: Sequence[tuple[str | Sequence[int], Sequence[Sequence[int]]]],
        *,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> list[Answer]:
        """Ask several questions at once, a prompt and labels each; see `decide`. All of them are queued or, where this
        raises, none.

        Raises:
            InputError: as `decide`, or something that is no pair.
            EngineBusy, EngineClosed: as `submit`.
        """
        self._check_room(len(several))
        questions = []
        for number, pair in enumerate(several):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InputError(
                    f"question {number} is a prompt and its labels, as ([5, 6], [[1], [2]]), got {pair!r}."
                )
            prompt, labels = pair
            ids = self._encode(prompt) if isinstance(prompt, str) else prompt
            questions.append(Question.of(self.spec, ids, labels, before, after, self.max_tokens))
        with self._wake:
            self._check_room(len(questions))
            answers = [self._questions.ask(question) for question in questions]
            self._wake.notify()
        return answers

    def _check_room(self, count: int) -> None:
        """Raise what `submit` does if `count` requests cannot be queued now, whatever they are."""
        with self._wake:
            self._open()
            self._core.scheduler.check_queue(count, len(self._loop.inbox) + len(self._questions))

    # -- the engine as a whole -----------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine began."""
        core = self._core
        scheduler, counters, stages = core.scheduler, core.scheduler.counters, core.stages
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.waiting + len(self._loop.inbox),
            finished=dict(core.totals.finished),
            admitted=counters.admitted,
            preempted=core.totals.preempted,
            prompt_tokens=core.totals.prompt_tokens,
            completion_tokens=core.totals.completion_tokens,
            steps=stages.steps,
            rows=dict(stages.rows),
            padded=dict(stages.padded),
            refresh_rows=counters.refresh_rows,
            budget_fill=scheduler.fill,
            longest_wait=counters.skipped,
            pages=scheduler.budgets.pages,
            free_pages=core.free_pages,
            kv_bytes=core.session.cache_bytes,
            prefix_asked=0 if core.prefix is None else core.prefix.asked,
            prefix_found=0 if core.prefix is None else core.prefix.found,
            mixed_rows=core.totals.mixed_rows,
        )

    @property
    def block_length(self) -> int:
        """Tokens that are denoised together."""
        return self._core.shape.block

    @property
    def max_sequences(self) -> int:
        """Requests that run at the same time."""
        return self._core.shape.slots

    @property
    def max_tokens(self) -> int:
        """Positions of a request, prompt and response together."""
        return self._core.max_tokens

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of the times in `Served`, in seconds."""
        return self._core.clock

    @property
    def scheduler(self) -> str:
        """Name of the scheduler."""
        return self._core.scheduler.strategy.name

    policy = former_attribute("Engine", "policy", "scheduler")
    mailbox = former_attribute("Engine", "mailbox", "event_loop_bridge")

    @property
    def thread(self) -> threading.Thread:
        """The thread that drives the device and tells sinks."""
        return self._loop.thread

    @property
    def alive(self) -> bool:
        """True if the engine takes requests."""
        loop = self._loop
        return loop.dead is None and not loop.closing and loop.thread.is_alive()

    @property
    def dead(self) -> Exception | None:
        """The error that ended the engine; None without one."""
        return self._loop.dead

    @property
    def leads(self) -> bool:
        """True if requests are given to this rank: the only one, or rank 0. The others call `join`."""
        return self._loop.leads

    def join(self) -> None:
        """Serve what rank 0 is asked for, until it closes its engine.

        Raises:
            InputError: on rank 0, which is asked.
            RankLost: a rank has ended or failed.
        """
        if self.leads:
            raise InputError("rank 0 is asked for responses, and closes the engine; join it on the other ranks.")
        self._loop.thread.join()
        if self._loop.dead is not None:
            raise self._loop.dead

    def close(self, drain: bool = False) -> None:
        """Take no more requests, end those that there are, and give the memory back. On a rank other than 0, wait until
        rank 0 does so.

        drain: let them finish first; else they are cancelled.
        """
        self._loop.close(drain)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _open(self) -> None:
        loop = self._loop
        if not self.leads:
            raise InputError(
                f"requests are given to rank 0, and this is rank {loop.ranks.rank}; call Engine.join here."
            )
        if loop.dead is not None:
            raise EngineClosed(f"the engine has stopped: {loop.dead}") from loop.dead
        if loop.closing or not loop.thread.is_alive():
            raise EngineClosed("the engine is closed; make another one.")


def _name(number: int, taken: Container[str]) -> str:
    """An id that no request has."""
    names = (f"request-{number}{more}" for more in itertools.chain([""], (f"-{n}" for n in itertools.count(2))))
    return next(name for name in names if name not in taken)
