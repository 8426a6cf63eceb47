"""A core that is taken through its turns one by one, and everything that must hold of what it tells.

Time is the number of turns: a clock of its own, so that equal schedules are served equally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from dgraph.engine.build import EngineConfig, build_core
from dgraph.engine.core import EngineCore
from dgraph.engine.io.events import Draft, Event
from dgraph.engine.memory.profile import Profile
from dgraph.engine.scheduling.schedulers import LookAhead
from dgraph.runtime import BlockSession
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.requests import Canvas, Request
from dgraph.spec import ModelSpec

PIECES = [
    *(chr(ord("a") + n).encode() for n in range(16)),
    *(b" ", b"\n", b"ab", b" c"),
    *("é".encode(), "€".encode()[:1], "€".encode()[1:2], "€".encode()[2:], "€".encode()[:2]),
    *("😀".encode()[:2], "😀".encode()[2:], "z€".encode(), b"\xff"),
]
"""What the ids of a small vocabulary stand for. Some characters lie in several tokens, and one token is no text."""


class Letters:
    """A tokenizer over bytes."""

    def decode(self, ids: Sequence[int], /) -> str:
        return b"".join(PIECES[id % len(PIECES)] for id in ids).decode("utf-8", "replace")


@dataclass(frozen=True)
class Asked:
    """A request of a schedule: what is asked for, at which turn, and after how many more it is cancelled."""

    ids: tuple[int, ...]
    decoding: Decoding
    index: int = 0
    turn: int = 0
    priority: int = 0
    cancel: int | None = None
    draft: bool = False
    canvas: Canvas = ()

    @property
    def alone(self) -> Asked:
        """The same request with nobody else."""
        return Asked(self.ids, self.decoding, self.index, canvas=self.canvas)

    def request(self, spec: ModelSpec) -> Request:
        return Request.of(list(self.ids), self.decoding, self.index, self.canvas, spec)


@dataclass
class Told:
    """The events of a request."""

    events: list[Event] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def step_map(self) -> list[int]:
        return [step for event in self.events for step in event.step_map]

    @property
    def confidence(self) -> list[float]:
        return [each for event in self.events for each in event.confidence]

    @property
    def drafts(self) -> list[Draft]:
        return [event.draft for event in self.events if event.draft is not None]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish(self) -> str | None:
        return self.events[-1].finish_reason if self.events else None

    @property
    def whole(self) -> tuple[list[int], list[int], str, str | None]:
        """All that must be the same whoever else is served, confidence aside."""
        return self.token_ids, self.step_map, self.text, self.finish

    def check_as(self, alone: Told) -> None:
        """It is what another one was told; sums over another number of rows may end in other bits."""
        assert self.whole == alone.whole
        assert self.confidence == pytest.approx(alone.confidence, abs=1e-4)

    def check(self, asked: Asked) -> None:
        """What holds of the events of any request that has ended."""
        assert [event.finish_reason is None for event in self.events] == [True] * (len(self.events) - 1) + [False]
        said = 0
        for event in self.events:
            assert len(event.token_ids) == len(event.step_map) == len(event.confidence)
            said += len(event.token_ids)
            assert event.usage.prompt_tokens == len(asked.ids)
            assert event.usage.completion_tokens == said
            assert 0 <= event.usage.cached_tokens <= len(asked.ids)
            assert (event.draft is not None) <= asked.draft
            if event.draft is not None:
                assert len(event.draft.token_ids) == len(event.draft.confidence) == len(event.draft.kept) > 0
                assert event.draft.offset + len(event.draft.token_ids) <= asked.decoding.max_new_tokens
                for token, sure in zip(event.draft.token_ids, event.draft.confidence, strict=True):
                    assert (sure > 0) == (token >= 0)
        assert said <= asked.decoding.max_new_tokens
        assert all(0 < each <= 1 for each in self.confidence)
        fixed = dict(enumerate(asked.canvas))
        for place, (token, step) in enumerate(zip(self.token_ids, self.step_map, strict=True)):
            given = fixed.get(place)
            assert given in (None, token)
            assert (step == 0) == (given is not None)
            assert given is None or self.confidence[place] == 1.0
        self.check_drafts(asked)
        assert (self.finish == "error") == (self.events[-1].error is not None)

    def check_drafts(self, asked: Asked) -> None:
        """Drafts show every step, and what they show is what is said in the end."""
        drafts = self.drafts
        assert [draft.step for draft in drafts] == list(range(1, len(drafts) + 1))
        if asked.draft and self.finish in ("stop", "length"):
            assert len(drafts) == max((*self.step_map, len(drafts)))
        last = {draft.offset: draft for draft in drafts}
        shown = {
            draft.offset + place: pair
            for draft in last.values()
            for place, pair in enumerate(zip(draft.token_ids, draft.confidence, strict=True))
        }
        for place, pair in enumerate(zip(self.token_ids, self.confidence, strict=True)):
            assert shown.get(place, pair) == pair


def no_preparation(decodings: Sequence[Decoding]) -> None:
    """A session that has every program it needs."""


def no_profile(rows: int, sequences: int) -> Profile:
    """On a CPU nobody asks."""
    raise AssertionError("a CPU is not profiled")


def driver_of(
    session: BlockSession,
    clock: Callable[[], float] = lambda: 0.0,
    prepare: Callable[[Sequence[Decoding]], None] = no_preparation,
    **settings: Any,
) -> EngineCore:
    chosen = EngineConfig(**settings)
    return build_core(session, chosen, tokenizer=Letters(), prepare=prepare, profiled=no_profile, clock=clock)


class Turns:
    """Takes a schedule through a core."""

    def __init__(self, session: BlockSession, asked: Sequence[Asked], **settings: Any):
        self.now = 0
        self.asked = asked
        self.core = driver_of(session, lambda: float(self.now), **settings)
        self.told = [Told() for _ in asked]
        self.most_running = 0

    def run(self, limit: int = 5000) -> list[Told]:
        """Serve all of them, and check what must hold then."""
        core, left = self.core, list(enumerate(self.asked))
        while left or core.tickets:
            cancelled = [
                number
                for number, one in enumerate(self.asked)
                if one.cancel is not None and one.turn + one.cancel <= self.now and number in core.tickets
            ]
            while left and any(one.turn <= self.now for _, one in left):
                number, one = next((n, a) for n, a in left if a.turn <= self.now)
                left.remove((number, one))
                core.check(one.decoding)
                request, sink = one.request(core.session.spec), self.told[number].events.append
                ticket = core.ticket(f"r{number}", number, request, sink, one.draft, one.priority)
                core.fits(ticket)
                core.take(ticket)
            self.turn(cancelled)
            self.now += 1
            assert self.now < limit, "a request that never ends"
        self.check()
        return self.told

    def turn(self, cancelled: Sequence[int] = ()) -> None:
        report = self.core.turn(self.core.plan(cancelled))
        if report is not None:
            self.core.apply_report(report)
        self.most_running = max(self.most_running, len(self.core.scheduler.running))

    def check(self) -> None:
        """Nothing is left, and everything has been counted."""
        core, kv = self.core, self.core.session.kv
        scheduler, totals = core.scheduler, core.totals
        for told, asked in zip(self.told, self.asked, strict=True):
            told.check(asked)
        assert not scheduler.running
        assert not scheduler.waiting
        assert (core.free_pages, core.free_rings) == (scheduler.budgets.pages, scheduler.budgets.rings)
        assert sum(totals.finished.values()) == len(self.asked)
        for reason, count in totals.finished.items():
            assert sum(told.finish == reason for told in self.told) == count
        assert totals.completion_tokens == sum(len(t.token_ids) for t in self.told)
        assert totals.prompt_tokens == sum(len(a.ids) for a in self.asked)
        counters = scheduler.counters
        assert counters.submitted == len(self.asked) == counters.finished + counters.cancelled
        assert counters.requeued >= totals.preempted
        assert counters.admitted <= len(self.asked) + counters.requeued
        if isinstance(scheduler.strategy, LookAhead):
            assert counters.skipped <= self.patience(scheduler.strategy) + 1
        core.close()
        assert kv.free_pages == kv.pages
        assert all(store.owners(page) == 0 for store in (kv, *kv.rings.values()) for page in range(store.pages))
        assert all(ring.free_pages == ring.pages for ring in kv.rings.values())
        packed = core.session.packed
        if packed is not None:
            assert not any(runs._of or runs._taken for runs in packed._runs.values())
        kv.unlimited()

    def patience(self, policy: LookAhead) -> int:
        """Steps that a request may sit out, as `LookAhead` says."""
        budgets = self.core.scheduler.budgets
        largest = 2 * self.core.shape.width + self.core.shape.mixed
        if self.core.session.spec.attention != "block_causal":
            largest = max(len(a.ids) + a.decoding.max_new_tokens for a in self.asked)
        return policy.patience + 1 + (budgets.sequences - 1) * 2 // (budgets.rows // min(largest, budgets.rows))


_ALONE: dict[Any, Told] = {}


def alone(key: Any, session: BlockSession, asked: Asked, **more: Any) -> Told:
    """What a request gets in an engine of one slot, where nothing else is; remembered under a key and the request."""
    one = asked.alone
    at = key, one
    if at not in _ALONE:
        settings = {"max_sequences": 1, "scheduler": "fcfs", "prefix_cache": False, "pages": "life", **more}
        _ALONE[at] = Turns(session, [one], **settings).run()[0]
    return _ALONE[at]


def filled(draw: DrawFn, asked: Asked, block: int, vocab: int) -> Asked:
    """The same request with nothing fixed, some positions, or whole blocks of its response."""
    kind, size = draw(st.sampled_from(["none", "some", "blocks"])), draw(st.integers(0, asked.decoding.max_new_tokens))
    if kind == "none":
        return asked
    flags = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    if kind == "blocks":
        flags = [flags[(len(asked.ids) + at) % len(flags) // block] for at in range(size)]
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size))
    return replace(asked, canvas=tuple(t if f else None for t, f in zip(tokens, flags, strict=True)))
