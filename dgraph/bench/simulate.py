"""A simulated engine: the real scheduler, a clock that the cost model moves, and requests that only count tokens.

It forwards nothing, so a scheduler can be judged on 100,000 requests in a minute, for any device once measured.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dgraph.bench.arrivals import Request
from dgraph.engine.io.timings import Served, Summary, summarise
from dgraph.engine.scheduling.cost_model import LLADA_8B_H200, CostModel
from dgraph.engine.scheduling.jobs import Budgets, Facts, ScheduledRequest, grant
from dgraph.engine.scheduling.scheduler import Counters, Scheduler
from dgraph.engine.scheduling.schedulers import SchedulingStrategy
from dgraph.errors import InputError


@dataclass(frozen=True)
class Method:
    """Decoding of simulated requests: its rows, tokens and pages.

    Attributes:
        block: tokens that are denoised together.
        causal: block-causal: the prompt is forwarded once, and every block once more with the first step of the next
            one. Else bidirectional: all rows are forwarded when a block starts.
        mixed: rows of prompts that the first steps of their responses forward, of all requests together, where there is
            room for them; of more that wait, all go in chunks in a forward of their own. Block-causal models alone.
        refresh_every: bidirectional: another refresh at the latest `refresh_every` steps after the last; 0 for none.
        commits: tokens per step; drawn per step and request if `drawn` (1 + geometric, with this mean), else fixed, a
            whole number.
        drawn: see `commits`.
        page: tokens per page of the KV pool.
        by_block: pages are taken as blocks are reached, else all of them at admission.
        kept: share of keys outside of the block that a bidirectional request keeps, in (0, 1]. Below 1 kept keys are
            packed, and the prompt has no pages.
        full_steps: bidirectional: refreshes at the start of every block, one after the other, at least 1.
        counts: tokens that each step of a block commits, by the place of its request, its first position and its
            masks, as `Trace.counts` says; None for those of `commits`.
    """

    block: int = 32
    causal: bool = False
    refresh_every: int = 0
    commits: float = 1.0
    drawn: bool = False
    page: int = 32
    by_block: bool = False
    kept: float = 1.0
    mixed: int = 0
    full_steps: int = 1
    counts: Callable[[int, int, int], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if min(self.block, self.page) < 1 or self.refresh_every < 0:
            raise InputError(f"block and page must be at least 1, and refresh_every at least 0, got {self}.")
        if self.causal and self.refresh_every:
            raise InputError("refresh_every is for bidirectional models: a block-causal one forwards its prompt once.")
        if self.full_steps < 1 or (self.causal and self.full_steps > 1):
            raise InputError(
                f"full_steps is at least 1, and 1 for a block-causal model, whose blocks are never forwarded with all "
                f"rows; got {self.full_steps}."
            )
        if self.commits < 1 or not (self.drawn or self.commits == int(self.commits)):
            raise InputError(f"commits must be at least 1 token a step, and whole unless drawn, got {self.commits}.")
        if self.mixed < 0:
            raise InputError(f"mixed must be a number of rows, at least 0, got {self.mixed}.")
        if self.mixed and not self.causal:
            raise InputError("mixed is for block-causal models: others forward a prompt with its response anyway.")
        if not 0 < self.kept <= 1:
            raise InputError(f"kept must be a share in (0, 1], got {self.kept}.")

    def job(self, request: Request, id: int) -> ScheduledRequest:
        """A request of a trace as the scheduler sees it."""
        block, length = self.block, request.prompt + request.new
        full = request.prompt // block * block
        return ScheduledRequest(
            id=id,
            prompt=request.prompt,
            new=request.new,
            block=block,
            arrived=request.arrival,
            priority=request.priority,
            refresh_rows=full if self.causal else length,
            reuse_rows=2 * block if self.causal else block,
            chunk=block if self.causal else 0,
            refresh_blocks=not self.causal,
            refresh_every=self.refresh_every,
            steps_per_block=None if self.drawn or self.counts is not None else math.ceil(block / self.commits),
            pages_first=self.pages(request, min(block, request.new) if self.by_block else request.new),
            pages_life=self.pages(request, request.new),
        )

    def keys(self, job: ScheduledRequest) -> int:
        """Keys that a step of a request reads at its start."""
        return job.prompt + job.block if self.causal else math.ceil((job.prompt + job.new) * self.kept)

    def pages(self, request: Request | ScheduledRequest, new: int) -> int:
        """Pages of a request with `new` tokens of its response."""
        absent = 0 if self.causal or self.kept == 1 else request.prompt // self.page
        return -(-(request.prompt + new) // self.page) - absent


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation.

    Attributes:
        scheduler: its name.
        summary: of the requests' times.
        counters: of the scheduler.
        steps, busy: steps that forwarded rows, and their seconds.
        fill: share of the rows of these steps' budgets that was used.
        active: requests that took part in a step, on average.
        served: requests by their place in the trace.
        refused: why others were not.
    """

    scheduler: str
    summary: Summary
    counters: Counters
    steps: int
    busy: float
    fill: float
    active: float
    served: dict[int, Served]
    refused: list[InputError]

    def to_json(self) -> dict[str, Any]:
        """Everything but the requests one by one."""
        names = ("scheduler", "steps", "busy", "fill", "active")
        return (
            {name: getattr(self, name) for name in names} | self.summary.to_json() | {"counters": asdict(self.counters)}
        )


class _Slot:
    """State of one running request, as a device would hold it."""

    __slots__ = (
        *("blocks_left", "counts", "draw", "full_left", "job", "keys", "masks_left", "mixed", "pages", "prompt_left"),
        *("refresh", "rows", "since"),
    )

    def __init__(self, job: ScheduledRequest, method: Method, seed: int):
        self.job, self.pages, self.keys = job, job.pages_first, method.keys(job)
        self.draw = random.Random(seed << 32 | job.id).random
        self.masks_left = min(job.block, job.new)
        self.blocks_left = -(-job.new // job.block) - 1
        self.prompt_left = job.refresh_rows if job.chunk else 0
        self.rows, self.refresh, self.since = job.first_rows, job.refresh_rows > 0, 0
        self.mixed = False  # True if its first step forwards its prompt
        self.begin(method, 0)

    def begin(self, method: Method, block: int) -> None:
        """Begin a block, by its number in the response."""
        job, self.full_left = self.job, method.full_steps
        counts = () if method.counts is None else method.counts(job.id, job.prompt + block * job.block, self.masks_left)
        self.counts = list(reversed(counts))

    @property
    def cut(self) -> int:
        """Rows at multiples of which its next forward can be cut; 0 if it cannot."""
        return self.job.chunk if self.prompt_left and not self.mixed else 0

    def facts(self, took: int, prompt: int) -> Facts:
        return Facts(took, self.rows, self.refresh, self.masks_left, self.blocks_left, self.prompt_left, prompt)


class Engine:
    """The slots, the pages and the clock of a simulation.

    Args:
        requests: by order of arrival.
        scheduler: a new one.
        clients: closed loop: number of requests that are there at any time. The next comes when one has ended, and
            arrivals are not looked at. 0 for an open loop.
        overlap: True: a step is planned while the one before it runs, from the facts of the one before that. False: it
            is planned after the one before it, from all facts.
        pad: rows with which a step of a number of rows runs, as `Buckets` says; None for the same.
        seed: of the tokens per step; a request's are the same under every scheduler.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        scheduler: Scheduler,
        method: Method,
        costs: CostModel,
        *,
        clients: int = 0,
        overlap: bool = True,
        pad: Callable[[int], int] | None = None,
        seed: int = 0,
    ):
        self.scheduler, self.method, self.costs = scheduler, method, costs
        self.clients, self.overlap, self.pad, self.seed = clients, overlap, pad, seed
        self.now, self.free = 0.0, scheduler.budgets.pages
        self.slots: dict[int, _Slot] = {}
        self.served: dict[int, Served] = {}
        self.refused: list[InputError] = []
        self.steps = self.rows = self.parts = 0
        self.busy = 0.0
        self._coming = deque(enumerate(requests))
        self._here = 0
        self._scale = 1 / math.log1p(-1 / method.commits) if method.drawn and method.commits > 1 else 0.0
        self._untold: tuple[int, list[tuple[int, Facts]]] = (0, [])
        self._arrive()
        self._plan = scheduler.plan(self.now, self.free)

    def advance(self) -> bool:
        """Run the planned step, and plan the next; False once all requests have ended."""
        for job in self._plan.admit:
            if job.id in self.scheduler.running:  # it may have been cancelled since
                self._begin(job)
        iteration, order = self._plan.iteration, self._plan.order
        end, facts = self._step(order)
        if self.overlap:
            self._tell(*self._untold)
            self._untold = iteration, facts
        else:
            self.now = end
            self._tell(iteration, facts)
        self._arrive()
        self._plan = self.scheduler.plan(self.now, self.free)
        self.now = end
        if self._plan.order or facts:
            return True
        if self._here:
            return True
        if not self._coming:
            return False
        self.now = max(self.now, self._coming[0][1].arrival)  # no request is here: sleep until one comes
        return True

    def cancel(self, id: int) -> None:
        """Cancel a request as its client would; one that has ended, or not come, is ignored."""
        if self.scheduler.cancel(id):
            self._drop(id)
            del self.served[id]
            self._here -= 1

    def _arrive(self) -> None:
        """Queue the requests that have come until now."""
        while self._coming:
            id, request = self._coming[0]
            if self.clients:
                if self._here >= self.clients:
                    return
                request = replace(request, arrival=self.now)
            elif request.arrival > self.now:
                return
            self._coming.popleft()
            try:
                self.scheduler.submit(self.method.job(request, id), self.now)
            except InputError as error:
                self.refused.append(error)
                continue
            self.served[id] = Served(request.arrival, math.nan, math.nan, math.nan, request.new)
            self._here += 1

    def _begin(self, job: ScheduledRequest) -> None:
        self.free -= job.pages_first
        self.slots[job.id] = _Slot(job, self.method, self.seed)
        if math.isnan(self.served[job.id].admitted):
            self.served[job.id].admitted = self.now

    def _step(self, order: Sequence[int]) -> tuple[float, list[tuple[int, Facts]]]:
        """Forward the rows that the budget allows; the time when that ends, and the facts told of it."""
        slots = [slot for id in order if (slot := self.slots.get(id)) is not None]
        self._mix(slots)
        granted = grant([s.rows for s in slots], [s.cut for s in slots], self.scheduler.budgets.rows)
        rows, keys = [0, 0], [0, 0]
        for slot, took in zip(slots, granted, strict=True):
            if took:  # prompts that go in chunks have a forward of their own, before that of the others
                rows[slot.cut > 0] += took
                keys[slot.cut > 0] += slot.keys
        end = self.now
        if any(rows):
            padded = rows if self.pad is None else [self.pad(count) if count else 0 for count in rows]
            seconds = sum(map(self.costs.step, padded, keys))
            end += seconds
            self.busy += seconds
            self.steps += 1
            self.rows += sum(rows)
        facts = []
        for slot, took in zip(slots, granted, strict=True):
            prompt = min(took, slot.prompt_left)
            if took and slot.job.id in self.slots:  # it may have given way to one before it
                self.parts += 1
                self._forward(slot, took, end)
            facts.append((slot.job.id, slot.facts(took, prompt)))
        return end, facts

    def _mix(self, slots: Sequence[_Slot]) -> None:
        """Let first steps forward the prompts of those slots that wait, where these are few rows, and fit."""
        waiting = [slot for slot in slots if slot.cut]
        prompts = sum(slot.prompt_left for slot in waiting)
        left = self.scheduler.budgets.rows - sum(slot.rows for slot in slots if not slot.cut)
        if prompts <= self.method.mixed and prompts + len(waiting) * self.method.block <= left:
            for slot in waiting:
                slot.mixed, slot.rows = True, slot.prompt_left + slot.job.block

    def _forward(self, slot: _Slot, took: int, end: float) -> None:
        if slot.cut:
            slot.prompt_left -= took
            slot.rows, slot.refresh = slot.prompt_left or slot.job.block, slot.prompt_left > 0
            return
        slot.prompt_left = 0
        slot.since = 0 if slot.refresh else slot.since + 1
        slot.full_left -= 1
        slot.refresh = (slot.job.refresh_blocks and slot.full_left > 0) or 0 < slot.job.refresh_every <= slot.since + 1
        slot.masks_left -= min(self._commits(slot), slot.masks_left)
        slot.rows = slot.job.refresh_rows if slot.refresh else slot.job.block
        if not slot.masks_left:
            self._next_block(slot, end)

    def _commits(self, slot: _Slot) -> int:
        """Tokens of this step."""
        if slot.counts:
            return slot.counts.pop()
        if not self.method.drawn:
            return int(self.method.commits)
        return 1 + int(math.log(1 - slot.draw()) * self._scale)

    def _next_block(self, slot: _Slot, end: float) -> None:
        job, served = slot.job, self.served[slot.job.id]
        if math.isnan(served.first):
            served.first = end
        if not slot.blocks_left:
            slot.rows, slot.refresh, served.ended = 0, False, end
            return
        slot.blocks_left -= 1
        reached = job.new - slot.blocks_left * job.block if slot.blocks_left else job.new
        slot.masks_left = job.block if slot.blocks_left else (job.new - 1) % job.block + 1
        slot.begin(self.method, -(-job.new // job.block) - 1 - slot.blocks_left)
        slot.refresh = slot.refresh or job.refresh_blocks
        slot.rows = job.refresh_rows if slot.refresh else job.reuse_rows
        slot.keys += job.block if self.method.causal else 0
        if self.method.by_block:
            self._grow(slot, self.method.pages(job, reached))

    def _grow(self, slot: _Slot, pages: int) -> None:
        """Take pages for another block; the youngest give theirs back where none are free."""
        missing = pages - slot.pages
        while missing > self.free:
            victim = self.scheduler.victim()
            assert victim is not None, "the pages that are not free are those of running requests"
            id = victim.job.id
            self.scheduler.requeue(id)
            self.served[id].requeued += 1
            self._drop(id)
            if id == slot.job.id:
                return
        self.free -= max(missing, 0)
        slot.pages = max(pages, slot.pages)

    def _tell(self, iteration: int, facts: Sequence[tuple[int, Facts]]) -> None:
        """Tell the scheduler about a step, as the host learns of it."""
        scheduler = self.scheduler
        for id, what in facts:
            slot = self.slots.get(id)
            scheduler.update(iteration, id, what)
            if slot is not None and not slot.rows and not what.rows:
                scheduler.finish(id)
                self._drop(id)
                self._here -= 1

    def _drop(self, id: int) -> None:
        slot = self.slots.pop(id, None)
        if slot is not None:
            self.free += slot.pages


def simulate(
    requests: Sequence[Request],
    budgets: Budgets,
    method: Method,
    scheduler: str | SchedulingStrategy = "look_ahead",
    costs: CostModel = LLADA_8B_H200,
    *,
    clients: int = 0,
    overlap: bool = True,
    pad: Callable[[int], int] | None = None,
    seed: int = 0,
    warm_up: float = 0.1,
    limit: float | None = None,
) -> Simulated:
    """Serve a trace under a scheduler; see `Engine` and `summarise` for the arguments.

    Requests that never fit are refused and left out, as the engine does it.

    Raises:
        InputError: no requests, or none that ever fits.
        UnknownName: an unknown scheduler.
    """
    if not requests:
        raise InputError("a simulation needs at least 1 request, got none.")
    planner = Scheduler(budgets, scheduler, costs=costs)
    engine = Engine(requests, planner, method, costs, clients=clients, overlap=overlap, pad=pad, seed=seed)
    while engine.advance():
        pass
    if not engine.served:
        raise engine.refused[0]
    return Simulated(
        scheduler=planner.strategy.name,
        summary=summarise(list(engine.served.values()), warm_up, limit),
        counters=planner.counters,
        steps=engine.steps,
        busy=engine.busy,
        fill=engine.rows / max(1, engine.steps * budgets.rows),
        active=engine.parts / max(1, engine.steps),
        served=engine.served,
        refused=engine.refused,
    )
