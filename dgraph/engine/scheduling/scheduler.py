"""Scheduler: it chooses the requests that run, and those of them that take part in the next step."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.engine.scheduling.jobs import Budgets, Facts, Plan, RequestProgress, ScheduledRequest
from dgraph.engine.scheduling.schedulers import SchedulingStrategy, View, scheduler_of
from dgraph.errors import EngineBusy, InputError

_WINDOW = 64
"""Ends of requests over which throughput is measured."""


@dataclass(slots=True)
class Counters:
    """Counts of a scheduler since it began.

    Attributes:
        iterations: plans made, empty ones included.
        submitted, refused, admitted, finished, cancelled, requeued: requests; one that is requeued is admitted again.
        rows, refresh_rows: forwarded rows, and those of refreshes and prompts among them; of requests that had not left
            their slot when it was told.
        steps: steps of requests, and `committed`: tokens that they have committed.
        skipped: most iterations in a row in which a running request took no part.
    """

    iterations: int = 0
    submitted: int = 0
    refused: int = 0
    admitted: int = 0
    finished: int = 0
    cancelled: int = 0
    requeued: int = 0
    rows: int = 0
    refresh_rows: int = 0
    steps: int = 0
    committed: int = 0
    skipped: int = 0


class Scheduler:
    """The queue and the running requests of one engine. Pure: no device, no clock of its own; equal calls, equal plans.

    An engine calls `submit` and `cancel` as requests come and go. For every step it asks for a `plan`. A step's report
    may come after the next step was planned. Then the engine calls `update` for each request in that plan's order, and
    `finish` for those that have ended.

    Requests wait by (arrived - priority * ageing, id), smallest first. Between two, the one of higher priority goes
    first, unless the other has come `ageing` seconds per level of priority before it. So no priority starves, and
    within one the order is that of arrival. Nothing overtakes the head of the queue, whatever would fit in its place.

    Args:
        budgets: see `Budgets`.
        scheduler: a name or an object, see `dgraph.engine.scheduling.schedulers`.
        queue: requests that may wait; None for any number.
        costs: how long steps take, if that was measured; strategies may go by it.
        ageing: seconds of waiting that make up for one level of priority.

    Raises:
        UnknownName: an unknown scheduler.
        InputError: a value out of range.
    """

    def __init__(
        self,
        budgets: Budgets,
        scheduler: str | SchedulingStrategy = "look_ahead",
        *,
        queue: int | None = None,
        costs: CostModel | None = None,
        ageing: float = 10.0,
    ):
        if queue is not None and queue < 1:
            raise InputError(f"queue must be at least 1 request, or None for any number, got {queue}.")
        if not ageing > 0:
            raise InputError(f"ageing must be more than 0 seconds, got {ageing}.")
        self.budgets, self.queue, self.ageing = budgets, queue, ageing
        chosen = scheduler_of(scheduler)
        self.strategy = chosen if costs is None else chosen.measured(costs, budgets.rows)
        self.running: dict[int, RequestProgress] = {}
        self.counters = Counters()
        self._waiting: dict[int, ScheduledRequest] = {}
        self._heap: list[tuple[float, int]] = []
        self._slots = list(range(budgets.sequences))
        self._growing = 0  # running requests that may still take pages
        self._now = 0.0
        self._ends: deque[float] = deque(maxlen=_WINDOW)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def fill(self) -> float:
        """Share of the budget of rows that steps have used."""
        return self.counters.rows / max(1, self.counters.iterations * self.budgets.rows)

    def submit(self, job: ScheduledRequest, now: float) -> None:
        """Queue a request; `check_queue` says before whether there is room for it.

        Raises:
            InputError: one that would never fit, or whose id is in use.
        """
        self._now = max(self._now, now)
        try:
            self.check(job)
        except InputError:
            self.counters.refused += 1
            raise
        self.counters.submitted += 1
        if not (self.running or self._waiting):
            self._ends.clear()  # the time without requests says nothing of how fast they end
        self._enqueue(job)

    def check_queue(self, count: int = 1, coming: int = 0) -> None:
        """Check that `count` more requests may wait; coming: others that are about to be queued.

        Raises:
            InputError: more than may ever wait.
            EngineBusy: too many wait now.
        """
        if self.queue is None or not count:
            return
        if count > self.queue:
            raise InputError(f"{count} requests at once are more than the {self.queue} that may wait; ask for fewer.")
        waiting = len(self._waiting) + coming
        if waiting + count > self.queue:
            self.counters.refused += count
            after = self.drained()
            raise EngineBusy(
                f"{waiting} requests wait, of {self.queue} that may; try again in about {after:.1f} s.", after
            )

    def check(self, job: ScheduledRequest) -> None:
        """Raise `InputError` for a request that would never fit, or whose id is in use."""
        budgets = self.budgets
        if job.id in self.running or job.id in self._waiting:
            raise InputError(f"request {job.id} is here already; every request needs an id of its own.")
        if job.peak_rows > budgets.rows:
            raise InputError(
                f"request {job.id} needs {job.peak_rows} rows in one step ({job.prompt} tokens of prompt, {job.new} "
                f"new), more than the {budgets.rows} of max_batched_rows; shorten it, or raise max_batched_rows."
            )
        if job.chunk > budgets.rows:
            raise InputError(
                f"request {job.id} is forwarded in blocks of {job.chunk} rows, more than the {budgets.rows} of "
                f"max_batched_rows; raise it."
            )
        if job.pages_life > budgets.pages:
            raise InputError(
                f"request {job.id} needs {job.pages_life} pages of the KV pool ({job.prompt} tokens of prompt, "
                f"{job.new} new), which has {budgets.pages}; shorten it, or give the pool more memory."
            )
        for needed, there in zip(job.rings, budgets.rings, strict=True):
            if needed > there:
                raise InputError(
                    f"request {job.id} needs {needed} pages for the layers with a window ({job.prompt} tokens of "
                    f"prompt, {job.new} new), of which the pool has {there}; give the pool more memory."
                )
        for needed, there in zip(job.entries, budgets.entries, strict=True):
            if needed > there:
                raise InputError(
                    f"request {job.id} needs {needed} packed entries of a layer ({job.prompt} tokens of prompt, "
                    f"{job.new} new), of which the pool has {there}; shorten it, or give the pool more memory."
                )

    def cancel(self, id: int) -> bool:
        """Take a request out, waiting or running; True if it was there.

        Its slot is free from the next plan on. A plan that was made before may still admit it or have it in its order.
        """
        if self._waiting.pop(id, None) is None and self._retire(id) is None:
            return False
        self.counters.cancelled += 1
        return True

    def finish(self, id: int) -> None:
        """Note the end of a running request; one that was taken out before is ignored."""
        if self._retire(id) is not None:
            self.counters.finished += 1
            self._ends.append(self._now)

    def victim(self) -> RequestProgress | None:
        """The running request that gives way when pages run out: the last one by order of the queue."""
        return max(self.running.values(), key=lambda r: r.key, default=None)

    def requeue(self, id: int, job: ScheduledRequest | None = None) -> None:
        """Send a running request back to its place in the queue.

        Args:
            id: of the request.
            job: the same request, if it is to come back with other rows or pages.
        """
        running = self.running.get(id)
        if running is None:
            raise InputError(f"request {id} does not run; only a running request can be sent back to the queue.")
        again = job or running.job
        if again.id != id:
            raise InputError(f"request {id} cannot come back as request {again.id}; give a job of the same id.")
        self._retire(id)
        self.counters.requeued += 1
        self._enqueue(again)

    def plan(
        self, now: float, free_pages: int, free_rings: tuple[int, ...] = (), free_entries: tuple[int, ...] = ()
    ) -> Plan:
        """Plan the next step from what is known.

        Args:
            now: seconds, on the clock that `ScheduledRequest.arrived` is on.
            free_pages: pages of the pool that no request holds.
            free_rings: pages of each ring that no request holds.
            free_entries: packed entries of each group of layers alike that no request holds.
        """
        self._now = max(self._now, now)
        iteration = self.counters.iterations
        running = list(self.running.values())
        needs = [r.needs(r.ahead) for r in running]
        view = View(self.budgets, running, needs, len(running), self.waiting, self.pace, sum(needs))
        admit = []
        while self._slots and (job := self._head()) is not None:
            rings = tuple(there - needed for needed, there in zip(job.rings, free_rings, strict=True))
            entries = tuple(there - needed for needed, there in zip(job.entries, free_entries, strict=True))
            if job.pages_first + self._growing > free_pages or min((*rings, *entries), default=0) < 0:
                break
            if not self.strategy.admits(job, view):
                break
            free_pages, free_rings, free_entries = free_pages - job.pages_first, rings, entries
            view.admit(self._start(iteration))
            admit.append(job)
        order = self.strategy.order(view) if running else []
        for r in order:
            r.ahead += 1
        if len(order) < len(running):
            self._left_out(running, needs, order)
        self.counters.iterations += 1
        return Plan(iteration, tuple(admit), tuple([r.job.id for r in order]))

    def update(self, iteration: int, id: int, facts: Facts) -> None:
        """Take the device's report on a request after a step whose order has it; `iteration` is that of the plan.

        Facts of a request that has left its slot since are ignored.
        """
        running = self.running.get(id)
        if running is None or iteration < running.admitted:
            return
        counters, took = self.counters, facts.took
        steps, committed = running.steps, running.committed
        if took:
            counters.rows += took
            if running.job.chunk:
                counters.refresh_rows += facts.prompt
            elif running.refresh:
                counters.refresh_rows += took
        running.ahead -= 1
        running.told(facts, self.pace)
        counters.steps += running.steps - steps
        counters.committed += running.committed - committed
        if running.skipped > counters.skipped:
            counters.skipped = running.skipped

    @property
    def pace(self) -> float:
        """Tokens that a request commits per step, of all requests so far; 1 before the first."""
        return self.counters.committed / self.counters.steps if self.counters.committed else 1.0

    def _left_out(self, running: list[RequestProgress], needs: list[int], order: list[RequestProgress]) -> None:
        chosen = {r.job.id for r in order}
        for r, need in zip(running, needs, strict=True):
            if need and r.job.id not in chosen:
                r.skipped += 1
                self.counters.skipped = max(self.counters.skipped, r.skipped)

    def _start(self, iteration: int) -> RequestProgress:
        """Give the head of the queue a slot."""
        key = heapq.heappop(self._heap)
        job = self._waiting.pop(key[1])
        id = job.id
        running = self.running[id] = RequestProgress(job, heapq.heappop(self._slots), key, iteration, self.pace)
        self._growing += job.pages_first < job.pages_life
        self.counters.admitted += 1
        return running

    def _retire(self, id: int) -> RequestProgress | None:
        running = self.running.pop(id, None)
        if running is not None:
            heapq.heappush(self._slots, running.slot)
            self._growing -= running.job.pages_first < running.job.pages_life
        return running

    def _enqueue(self, job: ScheduledRequest) -> None:
        self._waiting[job.id] = job
        heapq.heappush(self._heap, (job.arrived - job.priority * self.ageing, job.id))
        if len(self._heap) > 2 * len(self._waiting) + _WINDOW:  # most are of requests that were cancelled
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)

    def _head(self) -> ScheduledRequest | None:
        """The request that is admitted next."""
        while self._heap:
            job = self._waiting.get(self._heap[0][1])
            if job is not None:
                return job
            heapq.heappop(self._heap)
        return None

    def drained(self) -> float:
        """Seconds until all requests that wait now are admitted, at the rate of ends since the engine was empty."""
        if len(self._ends) < 2 or self._ends[-1] == self._ends[0]:
            return 1.0
        return len(self._waiting) * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
