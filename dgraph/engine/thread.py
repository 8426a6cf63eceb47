"""The thread that drives the device: it takes the requests that have come, and carries them out on every rank.

Where several ranks hold the model, rank 0 decides. Before each turn it tells the others what the turn takes in, while
the step before runs. All else is the same on every rank: the core and the scheduler look only at that and at reports,
which are the same. Nothing is told while nothing runs.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass

import torch

from dgraph.engine.core import EngineCore
from dgraph.engine.io.events import Event
from dgraph.engine.io.label_questions import Questions
from dgraph.engine.io.tickets import EngineRequest
from dgraph.errors import DgraphError, RankLost
from dgraph.ranks.groups import Group
from dgraph.runtime.loop.label_scoring import Question
from dgraph.runtime.loop.rank_check import agree_on_step
from dgraph.runtime.requests import Request

STUCK = 3.0
"""Seconds that a thread may wait for a lost rank, before its callers are told all the same."""
LAST = 10.0
"""Seconds that a process which ends waits for the turn that runs."""


class EngineClosed(DgraphError):
    """Error of a call on an engine that takes no requests any more."""


@dataclass(frozen=True)
class Arrival:
    """A request, as rank 0 tells of it: the arguments of `EngineCore.ticket`, but for the sink."""

    id: str
    number: int
    request: Request
    draft: bool
    priority: int
    arrived: float


@dataclass(frozen=True)
class Intake:
    """Input of a turn. Everything else that a turn does follows from what is known.

    Attributes:
        now: seconds on rank 0's clock, by which requests are scheduled.
        arrivals: requests that have come.
        cancelled: numbers of those that end.
        question: one that is answered after the step.
    """

    now: float
    arrivals: tuple[Arrival, ...]
    cancelled: tuple[int, ...]
    question: Question | None


class EngineThread:
    """Turns of a core, until it is closed, in a thread of its own.

    Args:
        core: takes requests through their slots.
        questions: answers those about labels.
        occupied: entered while the core runs.

    Attributes:
        ranks: the group that holds the model; rank 0 leads.
        wake: guards all of the following, and is told of each change.
        inbox: requests that have come since the last turn; `cancelled`: numbers of those that are to end.
        closing: True: it ends when nothing is left; `aborting`: True: the requests that are left are cancelled.
        dead: the error that ended it, if one did.
    """

    def __init__(self, core: EngineCore, questions: Questions, occupied: Callable[[], AbstractContextManager[object]]):
        self._core, self._questions, self._occupied = core, questions, occupied
        self.ranks: Group = core.session.ranks
        self.wake = threading.Condition()
        self.inbox: list[EngineRequest] = []
        self.cancelled: list[int] = []
        self.closing = self.aborting = False
        self.dead: Exception | None = None
        self._lost: RankLost | None = None
        self._ended = False
        self._turns = 0
        # With the context of its maker, in which a group's name may have a meaning of its own.
        self.thread = threading.Thread(target=copy_context().run, args=(self._run,), name="dgraph engine", daemon=True)
        self.ranks.when_lost(self._lose)
        if self.leads:
            # A thread that the interpreter finds at work in torch when it ends would abort the process.
            atexit.register(self.close, drain=False, wait=LAST)
        self.thread.start()

    @property
    def leads(self) -> bool:
        """True if requests are given to this rank."""
        return self.ranks.rank == 0

    def close(self, drain: bool, wait: float | None = None) -> None:
        """End, and wait for the end, at most `wait` seconds. On a rank other than 0: wait until rank 0 ends."""
        with self.wake:
            self.aborting = self.aborting or not drain
            self.leave()
        if threading.current_thread() is not self.thread:
            self.thread.join(wait)

    def leave(self) -> None:
        """End when nothing is left to do, without waiting for the end."""
        with self.wake:
            self.closing = True
            self.wake.notify()

    def _run(self) -> None:
        try:
            self._drive()
        finally:
            atexit.unregister(self.close)

    def _drive(self) -> None:
        device = self._core.session.device
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # of this thread alone: it begins with the first one
        with self._occupied():  # until every page is back
            cause: BaseException = EngineClosed("the engine was closed before the request had ended.")
            try:
                while (intake := self._decided() if self.leads else self.ranks.receive()) is not None:
                    self._carry_out(intake)
            except BaseException as error:
                cause = error
            self._die(cause)

    def _decided(self) -> Intake | None:
        """Wait until there is something to do, and take the input of the next turn; None when the loop is over."""
        core = self._core
        with self.wake:
            while not (self.inbox or self.cancelled or core.tickets or self._questions or self.closing or self._lost):
                self.wake.wait()
            if self._lost is not None:
                raise self._lost
            over = self.closing and not (core.tickets or self.inbox or self._questions)
            arrived = tuple(self.inbox)
            for ticket in arrived:
                core.take(ticket)
            cancelled = tuple(core.tickets if self.aborting else self.cancelled)
            self.inbox, self.cancelled = [], []
        if self.aborting:
            self._questions.fail(EngineClosed("the engine was closed before the question was answered."))
        if over:
            self.ranks.broadcast(None)
            return None
        known = (Arrival(t.id, t.number, t.request, t.draft, t.priority, t.times.arrived) for t in arrived)
        alone = self.ranks.world == 1
        intake = Intake(core.clock(), () if alone else tuple(known), cancelled, self._questions.take())
        self.ranks.broadcast(intake)
        return intake

    def _carry_out(self, intake: Intake) -> None:
        core = self._core
        if not self.leads:
            for one in intake.arrivals:
                told = one.id, one.number, one.request, _unheard, one.draft, one.priority
                core.take(core.ticket(*told, arrived=one.arrived))
        report = core.turn(core.plan(intake.cancelled, intake.now))
        self._turns += 1
        self.ranks.check()
        if report is not None:
            agree_on_step(self.ranks, self._turns, report, core.stages.rows, core.stages.padded)
            core.apply_report(report)
        if intake.question is not None:
            self._questions.answer(intake.question)

    def _lose(self, lost: RankLost) -> None:
        """Note the loss of a rank, and end if the thread is stuck.

        The thread finds out by itself, unless it waits for the lost rank.
        """
        with self.wake:
            self._lost = lost
            self.wake.notify()
        self.thread.join(STUCK)
        if self.thread.is_alive():
            self._die(lost)

    def _die(self, error: BaseException) -> None:
        """End with an error, and tell everybody who waits."""
        cause = error if isinstance(error, Exception) else EngineClosed(f"the engine was stopped: {error!r}.")
        with self.wake:
            if self._ended:
                return
            self._ended = self.closing = True
            if not isinstance(cause, EngineClosed):
                self.dead = cause
            inbox, self.inbox = self.inbox, []
        self.ranks.forget(self._lose)
        if self.dead is not None:
            self.ranks.fail(f"{type(cause).__name__}: {cause}")
        for ticket in inbox:
            self._core.tickets[ticket.number] = ticket
        self._questions.fail(cause)
        self._core.fail(cause)
        self._core.close()


def _unheard(event: Event) -> None:
    """Sink of the ranks other than 0, whose events have no listener."""
