"""An engine under load in this process: requests at given times, or from clients that wait for each response."""

from __future__ import annotations

import queue
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dgraph.bench.arrivals import Request, arrivals
from dgraph.bench.load import prompts_of
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.build import EngineConfig
from dgraph.engine.engine import Engine
from dgraph.engine.io.events import Event
from dgraph.engine.io.timings import Served, Summary, summarise
from dgraph.engine.scheduling.schedulers import SchedulingStrategy
from dgraph.engine.stats import EngineStats
from dgraph.engine.submission import RequestSpec
from dgraph.errors import InputError
from dgraph.families import Model
from dgraph.runtime.decoding import Decoding

WARM_UP = 0.1
"""Share of the requests, the first to come, that latencies leave out."""


@dataclass(frozen=True)
class ServedLoad:
    """Measurements of an engine under a load.

    Attributes:
        scheduler: its scheduler.
        clients: clients of a closed loop, each with one request at a time; 0 in an open loop.
        offered: requests per second that came in an open loop; None in a closed one.
        steady: requests per second that ended while new ones came.
        summary: summary of the requests' times, from when they were due. If the engine takes a request late, the delay
            counts as its latency.
        refresh_rows: rows of prompts and refreshes that were forwarded.
        preempted: number of times that a request gave way because pages ran out.
        prefix_hit_rate: share of the prompts' tokens that were in the prefix cache.
        stats: statistics of the engine since it began. Its fill of the budget and longest wait are those of the load if
            it had no other load.
        served: times of the requests, by their place in the load.
    """

    scheduler: str
    clients: int
    offered: float | None
    steady: float
    summary: Summary
    refresh_rows: int
    preempted: int
    prefix_hit_rate: float
    stats: EngineStats
    served: tuple[Served, ...]

    @property
    def refresh_rows_per_second(self) -> float:
        """Forwarded rows of prompts and refreshes per second."""
        return self.refresh_rows / self.summary.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values, with a list [arrived, admitted, first, ended, tokens, requeued] for each request.

        Its times are seconds since the first request arrived, which in an open loop is when it was due.
        """
        begin = min(s.arrived for s in self.served)
        requests = [
            [s.arrived - begin, s.admitted - begin, s.first - begin, s.ended - begin, s.tokens, s.requeued]
            for s in self.served
        ]
        names = ("scheduler", "clients", "offered", "steady", "refresh_rows_per_second", "preempted", "prefix_hit_rate")
        found = {name: getattr(self, name) for name in names}
        return {**found, **asdict(self.summary), "engine": self.stats.to_json(), "requests_each": requests}


def serve_load(
    engine: Engine,
    requests: Sequence[Request],
    prompts: Sequence[Sequence[int]],
    decoding: Decoding | None = None,
    *,
    clients: int = 0,
    warm_up: float = WARM_UP,
    limit: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ServedLoad:
    """Give requests to an engine as they come, wait for all of them, and measure them.

    Args:
        engine: an open engine. Two loads on one engine are told apart except in its fill and longest wait (see
            `ServedLoad`), so a new one for each is best.
        requests: by order of arrival; seconds from now, tokens, and priorities.
        prompts: ids of each request's prompt.
        decoding: decoding settings of all requests; `max_new_tokens` is each request's own.
        clients: number of requests in a closed loop. There are always as many, the next one comes when one has ended,
            and arrival times are not read. 0 for an open loop.
        warm_up: share of the requests, the first to come, that latencies leave out.
        limit: seconds of latency within which a request counts towards goodput.
        progress: called with (requests that ended, requests in all).

    Raises:
        InputError: no requests, or not one prompt for each; also as `Engine.submit` raises it.
        Exception: the first error of a request; the other requests are then cancelled.
    """
    if not requests or len(requests) != len(prompts):
        raise InputError(
            f"a load is at least 1 request with a prompt for each, got {len(requests)} and {len(prompts)} prompts."
        )
    chosen, before, begin = decoding or Decoding(), engine.stats, engine.clock()
    ended: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    served: list[Served | None] = [None] * len(requests)
    names: dict[int, str] = {}  # ids of the requests in the engine, by their place in the load
    count = done = 0
    try:
        while done < len(requests):
            asked: list[RequestSpec] = []
            while count < len(requests):
                request = requests[count]
                if len(names) + len(asked) >= clients if clients else begin + request.arrival > engine.clock():
                    break
                one = RequestSpec(
                    prompt=prompts[count],
                    decoding=replace(chosen, max_new_tokens=request.new),
                    sink=_end_to(ended, count),
                    priority=request.priority,
                    index=count,
                )
                asked.append(one)
                count += 1
            if asked:
                names |= zip(range(count - len(asked), count), engine.submit_all(asked), strict=True)
            wait = None
            if count < len(requests) and not clients:
                wait = max(0.0, begin + requests[count].arrival - engine.clock())
            try:
                place, event = ended.get(timeout=wait)
            except queue.Empty:
                continue
            del names[place]
            if event.error is not None:
                raise event.error
            assert event.served is not None, "the last event of a request has its times"
            due = begin + requests[place].arrival
            served[place] = event.served if clients else replace(event.served, arrived=due)
            done += 1
            if progress is not None:
                progress(done, len(requests))
    except BaseException:
        for name in names.values():
            engine.cancel(name)
        raise
    return _told(engine, before, [s for s in served if s is not None], clients, warm_up, limit)


def _end_to(ended: queue.SimpleQueue[tuple[int, Event]], place: int) -> Callable[[Event], None]:
    return lambda event: ended.put((place, event)) if event.finish_reason is not None else None


def _told(
    engine: Engine, before: EngineStats, served: list[Served], clients: int, warm_up: float, limit: float | None
) -> ServedLoad:
    stats, summary = engine.stats, summarise(served, warm_up, limit)
    mine = stats.since(before)
    came = sorted(s.arrived for s in served)
    span = came[-1] - came[0]
    offered = (len(came) - 1) / span if span > 0 and not clients else None
    return ServedLoad(
        scheduler=engine.scheduler,
        clients=clients,
        offered=offered,
        steady=steady(served, clients, warm_up) or summary.requests_per_second,
        summary=summary,
        refresh_rows=mine.refresh_rows,
        preempted=mine.preempted,
        prefix_hit_rate=mine.prefix_hit_rate,
        stats=stats,
        served=tuple(served),
    )


def steady(served: Sequence[Served], clients: int, warm_up: float = WARM_UP) -> float | None:
    """Requests per second that end while new ones come.

    The time in which the slots fill and that in which they empty are left out. None if the time between them is shorter
    than the median latency. Clients with requests of one length come together, and a part of a turn tells no rate.

    Args:
        served: at least one request.
        clients: clients of a closed loop, whose first requests are left out.
        warm_up: least share of the requests that is left out.
    """
    came = sorted(s.arrived for s in served)
    first = min(max(clients, int(warm_up * len(came))), len(came) - 1)
    begin, end = came[first], came[-1]
    ends = sum(begin < s.ended <= end for s in served)
    latency = statistics.median(s.ended - s.arrived for s in served)
    return ends / (end - begin) if ends and end - begin >= latency else None


def cut(requests: Sequence[Request], tokens: int) -> tuple[list[Request], int]:
    """Shorten prompts so that each request with its response fits into `tokens` positions.

    Returns:
        The requests, and the number of shortened ones.

    Raises:
        InputError: a response leaves no position for a prompt.
    """
    longest = max(request.new for request in requests)
    if longest >= tokens:
        raise InputError(
            f"a request has {longest} new tokens, which leaves none of {tokens} positions for its prompt; allow more "
            f"positions, or ask for fewer tokens."
        )
    found = [replace(request, prompt=min(request.prompt, tokens - request.new)) for request in requests]
    return found, sum(now.prompt < request.prompt for now, request in zip(found, requests, strict=True))


def prompts_for(model: Model, requests: Sequence[Request], shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Prompts of random ids for requests. shared: number of first tokens that all prompts have in common."""
    common = prompts_of(model, [shared], seed + 1)[0] if shared else []
    each = prompts_of(model, [request.prompt for request in requests], seed)
    return [[*common[: len(ids) - 1], *ids[len(common[: len(ids) - 1]) :]] for ids in each]


@dataclass
class LoadTest:
    """One workload and one model, under one load after another.

    Every load has an engine of its own, so that counts are those of the load alone. Compiled programs and recorded
    graphs are shared by all loads.

    Attributes:
        optimized: the model under a recipe.
        requests, prompts, decoding: as for `serve_load`.
        settings: settings of the engines, except the scheduler, which each run gives. A usual request has the mean
            lengths of the requests, unless they name another prompt.
        limit, warm_up: as for `serve_load`.
    """

    optimized: CompiledModel
    requests: Sequence[Request]
    prompts: Sequence[Sequence[int]]
    decoding: Decoding
    settings: EngineConfig = field(default_factory=EngineConfig)
    limit: float | None = None
    warm_up: float = WARM_UP

    def __post_init__(self) -> None:
        bound = self.settings.max_logit_rows
        if bound is not None and bound != self.optimized.recipe.logit_rows:
            self.optimized = self.optimized.with_logit_rows(bound)  # once, not for every engine
        if self.optimized.transitions is not None:
            self.optimized.transitions.often = 0  # compile at once, as a long run would

    def run(
        self,
        scheduler: str | SchedulingStrategy = "look_ahead",
        rate: float | None = None,
        *,
        pattern: str = "poisson",
        clients: int = 0,
        count: int | None = None,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> ServedLoad:
        """Serve the workload once. Every rank calls it, and gets the measurements of rank 0.

        Args:
            scheduler: which requests run.
            rate: requests per second, which come as `pattern` says (see `arrivals`); None for the times of the requests
                themselves.
            pattern: pattern of the arrivals.
            clients: clients of a closed loop, in place of a rate; 0 for an open loop.
            count: number of requests to serve, the first ones; None for all.
            seed: seed of the arrivals.
            progress: as for `serve_load`.

        Raises whatever `serve_load` raises.
        """
        chosen = list(self.requests[:count])
        if rate is not None:
            times = arrivals(pattern, rate, len(chosen), seed)
            chosen = [replace(request, arrival=time) for request, time in zip(chosen, times, strict=True)]
        usual = [
            round(statistics.fmean(each)) for each in zip(*((r.prompt, r.new) for r in self.requests), strict=True)
        ]
        decoding = replace(self.decoding, max_new_tokens=max(1, usual[1]))
        prompt = self.settings.usual_prompt or max(1, usual[0])
        settings = replace(self.settings, scheduler=scheduler, decoding=decoding, usual_prompt=prompt)
        served = None
        with self.optimized.engine(settings) as engine:
            if engine.leads:
                served = serve_load(
                    engine,
                    chosen,
                    self.prompts[: len(chosen)],
                    self.decoding,
                    clients=clients,
                    warm_up=self.warm_up,
                    limit=self.limit,
                    progress=progress,
                )
            else:
                engine.join()
        found: ServedLoad = self.optimized.ranks.exchange(served)[0]
        return found

    def prepare(
        self,
        scheduler: str | SchedulingStrategy = "look_ahead",
        sequences: int = 16,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Run a closed loop over some of the requests, cut short, to compile and record what their steps need."""
        brief = 2 * self.optimized.spec.block_length
        few = [replace(request, new=min(request.new, brief)) for request in self.requests[: 2 * sequences]]
        replace(self, requests=few).run(scheduler, clients=sequences, progress=progress)

    def capacity(
        self,
        scheduler: str | SchedulingStrategy = "look_ahead",
        sequences: int = 16,
        progress: Callable[[int, int], None] | None = None,
    ) -> ServedLoad:
        """Run a closed loop with a client for every slot. Its `steady` rate is the engine's capacity."""
        return self.run(scheduler, clients=sequences, progress=progress)
