"""The engine's thread: events, cancels, threads that die, closing, many callers at once."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from dgraph.engine.build import EngineConfig, build_engine
from dgraph.engine.engine import Engine, EngineClosed
from dgraph.engine.io.events import Event
from dgraph.engine.io.tickets import EngineRequest
from dgraph.engine.submission import RequestSpec
from dgraph.errors import DgraphWarning, EngineBusy, InputError, UnknownName
from dgraph.lowering.program import ProgramResult
from dgraph.runtime import BlockSession
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.sampling.sampler import Sampler
from tests.engine.driven import Letters, no_preparation, no_profile
from tests.runtime.fake import FakeProgram, make_session

BLOCK = 4
WAIT = 20.0
"""Seconds after which a test gives up waiting for a thread."""
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Gate(FakeProgram):
    """A step that waits until it may run, and then does what it is told."""

    def __init__(self, kind: str = "step"):
        super().__init__(kind)
        self.open, self.begun = threading.Event(), threading.Event()
        self.act: Callable[[], None] = lambda: None
        self.open.set()

    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        self.begun.set()
        assert self.open.wait(WAIT)
        self.act()
        self.calls.clear()
        return super().__call__(inputs, rows)


class Served:
    """An engine over a fake model whose steps can be held up."""

    def __init__(self, kind: str = "step", tokenizer: Any = None, **settings: Any):
        self.session: BlockSession = make_session(BLOCK, kind)
        self.gate = Gate(kind)
        self.session.programs["step"] = self.gate
        self.in_use = 0
        engine = {"max_sequences": 2, "max_tokens": 64, **settings}
        self.engine: Engine = build_engine(
            self.session,
            EngineConfig(**engine),
            model="fake",
            recipe="dense",
            tokenizer=Letters() if tokenizer is None else tokenizer or None,
            encode=lambda text: [ord(c) - ord("a") for c in text],
            prepare=no_preparation,
            occupied=self._occupied,
            profiled=no_profile,
            scoring=lambda: self.gate,
        )

    @contextlib.contextmanager
    def _occupied(self) -> Iterator[None]:
        self.in_use += 1
        yield
        self.in_use -= 1
        self.free_at_the_end = self.session.kv.free_pages == self.session.kv.pages

    def submit(self, prompt: Any = (1, 2, 3), **settings: Any) -> queue.SimpleQueue[Event]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.engine.submit(prompt, sink=events.put, **{"max_new_tokens": 9, "ignore_eos": True, **settings})
        return events

    def hold(self) -> None:
        """Stop the thread in the middle of a step."""
        self.gate.open.clear()
        self.gate.begun.clear()


def last(events: queue.SimpleQueue[Event]) -> Event:
    while True:
        event = events.get(timeout=WAIT)
        if event.finish_reason is not None:
            assert events.empty()
            return event


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.gate.open.set()
    one.engine.close()


# -- what can go wrong in the thread ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), SystemExit(3), KeyboardInterrupt()])
def test_a_thread_that_dies_in_mid_step_tells_everybody(served: Served, error: BaseException) -> None:
    def fail() -> None:
        raise error

    served.hold()
    running = [served.submit() for _ in range(2)]
    assert served.gate.begun.wait(WAIT)
    waiting = [served.submit() for _ in range(3)]
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            served.engine.generate([[1], [2]], max_new_tokens=4)
        except BaseException as raised:
            caught.append(raised)

    caller = threading.Thread(target=ask)
    caller.start()
    while served.engine.stats.waiting < 5:
        pass
    served.gate.act = fail
    served.gate.open.set()
    for events in [*running, *waiting]:
        end = last(events)
        assert end.finish_reason == "error"
        assert end.error is error or isinstance(end.error, EngineClosed)
    caller.join(WAIT)
    assert len(caught) == 1
    served.engine.close()
    assert not served.engine.alive
    with pytest.raises(EngineClosed, match=r"stopped|closed"):
        served.submit()
    stats = served.engine.stats
    assert (stats.running, stats.waiting, stats.finished) == (0, 0, {"error": 7})
    assert stats.free_pages == stats.pages
    assert served.in_use == 0
    assert served.free_at_the_end, "whoever uses the model next finds every page"


@pytest.mark.parametrize("kind", [ValueError, SystemExit, asyncio.CancelledError])
def test_a_sink_that_raises_ends_its_own_request(served: Served, kind: type[BaseException]) -> None:
    heard: list[str] = []

    def broken(event: Event) -> None:
        raise kind("nobody listens")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda args: heard.append(str(args.exc_value)))
        served.engine.submit([1], sink=broken, max_new_tokens=60, threshold=1.0, ignore_eos=True)
        assert last(served.submit()).finish_reason == "length"
        served.engine.close(drain=True)
    assert set(heard) == {"nobody listens"}
    assert served.engine.stats.finished == {"length": 1, "cancelled": 1}


def test_a_hook_that_raises_does_not_stop_the_engine_either(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(event: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(threading, "excepthook", broken)
    served.engine.submit([1], sink=broken, max_new_tokens=60, threshold=1.0, ignore_eos=True)
    assert last(served.submit()).finish_reason == "length"
    assert served.engine.alive


# -- closing ----------------------------------------------------------------------------------------------------------


def test_draining_lets_requests_end(served: Served) -> None:
    events = [served.submit() for _ in range(5)]
    served.engine.close(drain=True)
    assert [last(one).finish_reason for one in events] == ["length"] * 5
    with pytest.raises(EngineClosed, match="the engine is closed"):
        served.submit()
    served.engine.close()


def test_closing_cancels_what_there_is(served: Served) -> None:
    served.hold()
    events = [served.submit() for _ in range(4)]
    assert served.gate.begun.wait(WAIT)
    closing = threading.Thread(target=served.engine.close)
    closing.start()
    while served.engine.alive:
        pass
    served.gate.open.set()
    closing.join(WAIT)
    assert [last(one).finish_reason for one in events] == ["cancelled"] * 4
    assert served.in_use == 0
    assert served.free_at_the_end


def test_a_sink_may_close_the_engine(served: Served) -> None:
    ended = threading.Event()

    def sink(event: Event) -> None:
        served.engine.close()
        if event.finish_reason is not None:
            ended.set()

    served.engine.submit([1], sink=sink, max_new_tokens=40)
    assert ended.wait(WAIT)


# -- cancelling, ids and the queue ------------------------------------------------------------------------------------


def test_cancelling_what_waits_and_what_runs(served: Served) -> None:
    served.hold()
    events = [served.submit(request_id=f"mine {n}", max_new_tokens=40) for n in range(3)]
    assert served.gate.begun.wait(WAIT)
    assert served.engine.cancel("mine 0")
    assert served.engine.cancel("mine 2")
    assert not served.engine.cancel("mine 3")
    served.gate.open.set()
    ends = [last(one) for one in events]
    assert [end.finish_reason for end in ends] == ["cancelled", "length", "cancelled"]
    assert not served.engine.cancel("mine 0"), "it has ended"
    assert ends[2].usage.completion_tokens == 0


def test_an_id_is_free_when_its_last_event_is_there(served: Served) -> None:
    again = threading.Event()

    def sink(event: Event) -> None:
        if event.finish_reason is not None:
            served.engine.submit([1], sink=lambda event: again.set(), request_id="one", max_new_tokens=1)

    served.hold()
    served.engine.submit([1], sink=sink, request_id="one", max_new_tokens=1)
    with pytest.raises(InputError, match="request id 'one' is in use"):
        served.submit(request_id="one")
    served.gate.open.set()
    assert again.wait(WAIT)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sink": None}, "sink is a function that is called with every event, got None"),
        ({"request_id": [1]}, r"request_id is a text, or None to make one, got \[1\]"),
        ({"prompt": 5}, r"prompt 0 is 5, expected a text or a list of ids, as \[5, 6\]"),
        ({"prompt": b"abc"}, "prompt 0 is b'abc', expected a text or a list of ids"),
        ({"prompt": None, "index": 3}, "prompt 3 is None, expected a text or a list of ids"),
        ({"prompt": [99], "index": 2}, "prompt 2: token 0 is 99, outside the vocabulary"),
    ],
)
def test_what_is_of_another_type_is_refused(served: Served, wrong: dict[str, Any], message: str) -> None:
    asked = {"prompt": [1], "sink": lambda event: None, **wrong}
    with pytest.raises(InputError, match=message):
        served.engine.submit(asked.pop("prompt"), **asked)
    assert served.engine.stats.waiting == 0


def test_prompts_of_another_type_are_refused(served: Served) -> None:
    for prompts, message in (
        (None, "give either prompts"),
        (5, "got 5"),
        ([5, 6], "prompt 0 is 5, expected"),
        ([[1], 6], "prompt 1"),
    ):
        wrong: Any = prompts
        with pytest.raises(InputError, match=message):
            served.engine.generate(wrong, max_new_tokens=4)


def test_an_id_that_is_made_is_nobody_elses(served: Served) -> None:
    served.hold()
    taken = served.submit(request_id="request-1")
    made = served.submit()
    served.gate.open.set()
    assert last(taken).request_id == "request-1"
    assert last(made).request_id not in ("request-1", "")


def test_a_full_queue_says_when_to_come_back() -> None:
    served = Served(max_sequences=1, queue=2)
    served.hold()
    first = served.submit()
    assert served.gate.begun.wait(WAIT)
    others = [served.submit() for _ in range(2)]
    for _ in range(3):
        with pytest.raises(EngineBusy, match="2 requests wait, of 2 that may; try again in about") as raised:
            served.submit(request_id="refused")
        assert raised.value.retry_after >= 0
    assert not served.engine.cancel("refused"), "what was refused left nothing"
    served.gate.open.set()
    for events in (first, *others):
        assert last(events).finish_reason == "length"
    assert len(served.engine.generate([[n] for n in range(9)], max_new_tokens=3)) == 9, "a call waits for its place"
    served.engine.close()


def several(events: queue.SimpleQueue[Event], count: int = 3, **more: Any) -> list[RequestSpec]:
    """Requests that are given at once."""
    decoding = Decoding(max_new_tokens=2, ignore_eos=True)
    return [RequestSpec(prompt=[n + 1], decoding=decoding, sink=events.put, **more) for n in range(count)]


def test_the_engine_goes_on_while_requests_are_checked(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    events, fits = queue.SimpleQueue[Event](), served.engine._core.fits
    checking, ended = threading.Event(), threading.Event()

    def patient(ticket: EngineRequest) -> None:
        checking.set()
        assert ended.wait(WAIT)
        fits(ticket)

    served.hold()
    running = served.submit()
    assert served.gate.begun.wait(WAIT)
    monkeypatch.setattr(served.engine._core, "fits", patient)
    caller = threading.Thread(target=served.engine.submit_all, args=(several(events),))
    caller.start()
    assert checking.wait(WAIT)
    served.gate.open.set()
    assert last(running).finish_reason == "length"
    assert events.empty()
    ended.set()
    caller.join(WAIT)
    served.engine.close(drain=True)
    assert served.engine.stats.finished == {"length": 4}


@pytest.mark.parametrize(
    ("count", "wrong", "message"),
    [
        (3, {"prompt": [99]}, "token 0 is 99, outside the vocabulary"),
        (3, {"request_id": "mine"}, "request id 'mine' is in use"),
        (4, {}, "4 requests at once are more than the 3 that may wait"),
    ],
)
def test_requests_at_once_are_all_taken_or_none(count: int, wrong: dict[str, Any], message: str) -> None:
    served, events = Served(max_sequences=1, queue=3), queue.SimpleQueue[Event]()
    served.hold()
    running = served.submit()
    assert served.gate.begun.wait(WAIT)
    first, *others = several(events, count)
    with pytest.raises(InputError, match=message):
        served.engine.submit_all([replace(first, request_id="mine"), *others[:-1], replace(others[-1], **wrong)])
    assert served.engine.stats.waiting == 0
    assert not served.engine.cancel("mine"), "what was refused left nothing"
    names = served.engine.submit_all([replace(first, request_id="mine"), first])
    assert names[0] == "mine" != names[1]
    with pytest.raises(EngineBusy, match="2 requests wait, of 3 that may"):
        served.engine.submit_all([first, first])
    assert served.engine.stats.waiting == 2
    served.gate.open.set()
    assert last(running).finish_reason == "length"
    served.engine.close(drain=True)
    assert served.engine.stats.finished == {"length": 3}


def test_requests_from_many_threads_never_exceed_the_queue_nor_stop_the_engine() -> None:
    served = Served(max_sequences=1, queue=1)
    ends, refused = queue.SimpleQueue[Event](), queue.SimpleQueue[float]()

    def ask() -> None:
        for _ in range(8):
            try:
                ends.put(last(served.submit(max_new_tokens=2)))
            except EngineBusy as busy:
                refused.put(busy.retry_after)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert served.engine.alive
    served.engine.close()
    assert ends.qsize() + refused.qsize() == 32
    assert served.engine.stats.finished == {"length": ends.qsize()}


# -- streams ----------------------------------------------------------------------------------------------------------


def test_streams_of_many_requests_at_once() -> None:
    served = Served(max_sequences=3)
    prompts = [[n, n + 1, n + 2] for n in range(12)]
    stops = ("a", "é", "b\n")
    settings = {"max_new_tokens": 14, "stop": stops, "ignore_eos": True}

    async def follow(prompt: list[int]) -> list[Event]:
        return [event async for event in served.engine.stream(prompt, draft=True, **settings)]

    async def all_of_them() -> list[list[Event]]:
        async with served.engine:
            return await asyncio.gather(*map(follow, prompts))

    streams = asyncio.run(all_of_them())
    other = Served(max_sequences=1)
    for prompt, events in zip(prompts, streams, strict=True):
        (wanted,) = other.engine.generate([prompt], **settings)
        assert "".join(event.text for event in events) == wanted.text
        assert [token for event in events for token in event.token_ids] == wanted.token_ids
        assert [step for event in events for step in event.step_map] == wanted.step_map
        assert all(event.finish_reason is None for event in events[:-1])
        drafts = [event.draft for event in events if event.draft is not None]
        assert all(-1 <= token < 29 for draft in drafts for token in draft.token_ids)
        assert [draft.offset for draft in drafts] == sorted(draft.offset for draft in drafts)
    other.engine.close()
    assert not served.engine.alive


@pytest.mark.parametrize("leaves", [False, True])
def test_the_event_loop_goes_on_while_what_a_stream_needs_is_compiled(
    served: Served, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """Who leaves meanwhile has asked for nothing."""
    went_on, compiling, compiled = threading.Event(), threading.Event(), threading.Event()

    def slowly(decodings: Sequence[Decoding]) -> None:
        if not compiled.is_set():
            compiling.set()
            assert went_on.wait(WAIT)
            compiled.set()

    async def follow() -> list[Event]:
        return [event async for event in served.engine.stream([1, 2], max_new_tokens=9, ignore_eos=True)]

    async def both() -> list[Event]:
        following = asyncio.create_task(follow())
        assert await asyncio.to_thread(compiling.wait, WAIT)
        if leaves:
            following.cancel()
        went_on.set()
        (found,) = await asyncio.gather(following, return_exceptions=True)
        assert isinstance(found, asyncio.CancelledError if leaves else list)
        return found if isinstance(found, list) else []

    monkeypatch.setattr(served.engine._core, "_prepare", slowly)
    assert bool(asyncio.run(both())) != leaves
    served.engine.close(drain=True)
    assert served.engine.stats.finished == ({} if leaves else {"length": 1})


def test_leaving_a_stream_cancels_it(served: Served) -> None:
    async def leave() -> None:
        events = served.engine.stream([1, 2], max_new_tokens=60, threshold=1.0, ignore_eos=True)
        async with contextlib.aclosing(events):
            async for _ in events:
                break

    asyncio.run(leave())
    served.engine.close(drain=True)
    assert served.engine.stats.finished == {"cancelled": 1}


def test_leaving_a_stream_that_has_ended_leaves_the_next_one_of_its_id_alone(served: Served) -> None:
    async def leave() -> str | None:
        first = served.engine.stream([1, 2], request_id="a", max_new_tokens=9, ignore_eos=True)
        await anext(first)
        async with asyncio.timeout(WAIT):
            while served.engine.stats.finished != {"length": 1}:
                await asyncio.sleep(0.001)
        served.hold()
        events: asyncio.Queue[Event] = asyncio.Queue()
        sink = served.engine.event_loop_bridge().to(events.put_nowait)
        served.engine.submit([1, 2], request_id="a", sink=sink, max_new_tokens=9, ignore_eos=True)
        await first.aclose()
        served.gate.open.set()
        async with asyncio.timeout(WAIT):
            while (event := await events.get()).finish_reason is None:
                pass
        return event.finish_reason

    assert asyncio.run(leave()) == "length"


def test_a_stream_raises_the_error_of_its_request() -> None:
    served = Served()

    def fail() -> None:
        raise RuntimeError("out of memory")

    async def follow() -> None:
        async for _ in served.engine.stream([1, 2], max_new_tokens=60):
            served.gate.act = fail

    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(follow())
    served.engine.close()
    with pytest.raises(EngineClosed, match="the engine has stopped: out of memory"):
        served.submit()


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_sequences": 0}, "max_sequences must be a whole number, at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number, at least 1, got True"),
        ({"max_tokens": 513}, "max_tokens=513 is more than the 512 positions of fake"),
        ({"max_batched_rows": 1.5}, "max_batched_rows must be a whole number"),
        ({"max_batched_rows": 7}, "max_batched_rows=7 is less than 2 blocks of 4"),
        ({"kv_bytes": -1}, "kv_bytes must be a whole number"),
        ({"kv_bytes": 10}, "kv_bytes=10 does not hold one page of 4 positions, which takes 256 bytes"),
        ({"queue": 0}, "queue must be a whole number, at least 1, got 0"),
        ({"block_length": 0}, "block_length must be a whole number"),
        ({"scheduler": "look_behind"}, "unknown scheduler 'look_behind'. Did you mean 'look_ahead'"),
        ({"scheduler": 3}, "scheduler must be a name"),
        ({"pages": "blocks"}, "unknown way of giving out pages 'blocks'. Did you mean 'block'"),
    ],
)
def test_settings_that_an_engine_refuses(settings: dict[str, Any], message: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises((InputError, UnknownName), match=message):
        Served(**settings)
    assert before >= set(threading.enumerate())


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt 0 is empty"),
        ([99], {}, "token 0 is 99, outside the vocabulary"),
        ([28], {}, "is the mask token"),
        (["x"], {}, "expected an integer id"),
        ([1], {"threshold": 2.0}, "threshold"),
        ([1], {"thresold": 0.5}, "unknown setting of Decoding 'thresold'. Did you mean 'threshold'"),
        ([1], {"policy": "tresholds"}, "unknown"),
        ([1], {"threshold": 0.5, "steps": 3}, "threshold|steps"),
        ([1], {"stop": "a"}, "stop strings are a list"),
        ([1], {"block_length": 8}, "this engine decodes blocks of 4 tokens, got block_length=8"),
        ([1], {"max_new_tokens": 64}, "take 65 positions, more than the 64 of this engine"),
        ([1] * 62, {"max_new_tokens": 500}, "more than the 512 of fake"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 0.5}, "needs whole logits"),
        ([1], {"seed": "x"}, "seed must be a whole number"),
        ([1], {"priority": "high"}, "priority must be a whole number of 32 bits, got 'high'"),
        ([1], {"priority": 1 << 31}, "priority must be a whole number of 32 bits"),
        ([1], {"priority": float("nan")}, "priority must be a whole number of 32 bits, got nan"),
        ([1], {"index": None}, "index must be a whole number of 32 bits, got None"),
    ],
)
def test_requests_that_an_engine_refuses(served: Served, prompt: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, UnknownName), match=message):
        served.submit(prompt, **settings)
    assert last(served.submit()).finish_reason == "length", "the engine goes on"
    assert served.engine.stats.finished == {"length": 1}


def test_what_never_fits_is_refused_at_the_door() -> None:
    served = Served(kv_bytes=5 * 256, pages="life")
    with pytest.raises(InputError, match=r"take 32 positions, more than the 20 of this engine"):
        served.submit([1] * 8, max_new_tokens=24)
    assert last(served.submit([1] * 8, max_new_tokens=12)).finish_reason == "length"
    served.engine.close()


def test_guidance_and_stop_texts_where_they_mean_nothing() -> None:
    served = Served("logits", tokenizer=False)
    with pytest.raises(InputError, match=r"cfg_scale=1.5 runs every step twice"):
        served.submit(sampler=Sampler(cfg_scale=1.5))
    with pytest.raises(InputError, match="without a tokenizer, so texts in stop mean nothing"):
        served.submit(stop=["a"])
    with pytest.raises(InputError, match="give one decoding, or one for each of 2 prompts, got 1"):
        served.engine.generate([[1], [2]], [Decoding()])
    with pytest.raises(InputError, match="generate gives requests their index; submit takes one for a request"):
        served.engine.generate([[1]], index=3)
    served.engine.close()


def test_an_engine_of_other_blocks_takes_requests_that_do_not_say() -> None:
    served = Served(block_length=8)
    with pytest.warns(DgraphWarning, match="block_length=8"):
        events = served.submit(max_new_tokens=11)
    assert last(events).usage.completion_tokens == 11
    with pytest.raises(InputError, match="this engine decodes blocks of 8 tokens, got block_length=4"):
        served.submit(block_length=4)
    served.engine.close()
