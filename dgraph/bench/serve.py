"""An engine under load, in the process itself: requests that come on the clock, or from clients that each wait."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dgraph.bench.load import prompts_of
from dgraph.engine.build import EngineSettings
from dgraph.engine.engine import Engine
from dgraph.engine.events import Event
from dgraph.engine.load import Request, arrivals
from dgraph.engine.policies import SchedulePolicy
from dgraph.engine.served import Served, Summary, summarise
from dgraph.engine.stats import EngineStats
from dgraph.engine.submission import Submission
from dgraph.errors import InputError
from dgraph.families import Model
from dgraph.optimized import Optimized
from dgraph.runtime.decoding import Decoding

WARM_UP = 0.1
"""Share of the requests, the first to come, that latencies leave out."""


@dataclass(frozen=True)
class ServedLoad:
    """What an engine did under a load.

    Attributes:
        policy: of its scheduler.
        clients: of a closed loop, each with one request at a time; 0 in an open one.
        offered: requests per second that came in an open loop; None in a closed one.
        steady: requests per second that ended while new ones came.
        summary: of the requests' times, from when they were due. Steps that the engine was late to take a request in
            count as its latency.
        refresh_rows: rows of prompts and refreshes that were forwarded.
        preempted: how often a request gave way because pages ran out.
        prefix_hit_rate: share of the prompts' tokens that were in the prefix cache.
        stats: of the engine since it began; its fill of the budget and longest wait are those of the load if it had no
            other.
        served: requests, by their place in the load.
    """

    policy: str
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
        """Of prompts and refreshes."""
        return self.refresh_rows / self.summary.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values; of the requests one by one [arrived, admitted, first, ended, tokens, requeued], in seconds
        since the first was due.
        """
        begin = min(s.arrived for s in self.served)
        requests = [
            [s.arrived - begin, s.admitted - begin, s.first - begin, s.ended - begin, s.tokens, s.requeued]
            for s in self.served
        ]
        names = ("policy", "clients", "offered", "steady", "refresh_rows_per_second", "preempted", "prefix_hit_rate")
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
    """Give requests to an engine as they come, wait for all of them, and say how they fared.

    Args:
        engine: an open one. Two loads on one engine are told apart except in its fill and longest wait (see
            `ServedLoad`), so a new one for each is best.
        requests: by order of arrival; seconds from now, tokens, and priorities.
        prompts: ids of each, as many as it says.
        decoding: how all of them are decoded, except for how many tokens.
        clients: a closed loop: so many requests are there at any time, the next one comes when one has ended, and
            their arrivals are not looked at. 0 for an open one.
        warm_up: share of the requests, the first to come, that latencies leave out.
        limit: seconds of latency within which a request counts towards goodput.
        progress: called with (requests that ended, requests in all).

    Raises what `Engine.submit` does, and the first error of a request; the others are cancelled then.
    """
    if not requests or len(requests) != len(prompts):
        raise InputError(
            f"a load is at least 1 request with a prompt for each, got {len(requests)} and {len(prompts)} prompts."
        )
    chosen, before, begin = decoding or Decoding(), engine.stats, engine.clock()
    ended: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    served: list[Served | None] = [None] * len(requests)
    names: dict[int, str] = {}  # of those that are there, by their place
    count = done = 0
    try:
        while done < len(requests):
            asked: list[Submission] = []
            while count < len(requests):
                request = requests[count]
                if len(names) + len(asked) >= clients if clients else begin + request.arrival > engine.clock():
                    break
                one = Submission(
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
        policy=engine.policy,
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
    """Requests per second that end while new ones come: without the time in which the slots fill, and that in which
    they empty. None where these are all there is.

    Args:
        served: at least one.
        clients: whose first requests are left out.
        warm_up: share of the requests that is left out at least.
    """
    came = sorted(s.arrived for s in served)
    first = min(max(clients, int(warm_up * len(came))), len(came) - 1)
    begin, end = came[first], came[-1]
    ends = sum(begin < s.ended <= end for s in served)
    return ends / (end - begin) if ends else None


def cut(requests: Sequence[Request], tokens: int) -> tuple[list[Request], int]:
    """The requests with prompts that leave their responses room in so many positions; how many were shortened.

    Raises:
        InputError: a response that leaves none for a prompt.
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
    """Prompts of random ids for requests; `shared` is the number of tokens that all of them begin with."""
    common = prompts_of(model, [shared], seed + 1)[0] if shared else []
    each = prompts_of(model, [request.prompt for request in requests], seed)
    return [[*common[: len(ids) - 1], *ids[len(common[: len(ids) - 1]) :]] for ids in each]


@dataclass
class LoadTest:
    """One workload and one model, under load after load. Every load has an engine of its own, so that counts are of it
    alone; what was compiled and captured for one serves the others.

    Attributes:
        optimized: the model under a recipe.
        requests, prompts, decoding: as for `serve_load`.
        settings: of the engines; each run says its policy.
        limit, warm_up: as for `serve_load`.
    """

    optimized: Optimized
    requests: Sequence[Request]
    prompts: Sequence[Sequence[int]]
    decoding: Decoding
    settings: EngineSettings = field(default_factory=EngineSettings)
    limit: float | None = None
    warm_up: float = WARM_UP

    def __post_init__(self) -> None:
        bound = self.settings.max_logit_rows
        if bound is not None and bound != self.optimized.recipe.logit_rows:
            self.optimized = self.optimized.with_logit_rows(bound)  # once, not for every engine
        if self.optimized.transitions is not None:
            self.optimized.transitions.often = 0  # compile at once: what is measured is a long run

    def run(
        self,
        policy: str | SchedulePolicy = "look_ahead",
        rate: float | None = None,
        *,
        pattern: str = "poisson",
        clients: int = 0,
        count: int | None = None,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> ServedLoad:
        """Serve the workload once. Every rank calls it, and gets what rank 0 has measured.

        Args:
            policy: who runs.
            rate: requests per second, which come as `pattern` says (see `arrivals`); None for the times of the requests
                themselves.
            clients: instead a closed loop of so many.
            count: only so many requests, the first ones.
            seed: of the arrivals.
            progress: as for `serve_load`.

        Raises what `serve_load` does.
        """
        chosen = list(self.requests[:count])
        if rate is not None:
            times = arrivals(pattern, rate, len(chosen), seed)
            chosen = [replace(request, arrival=time) for request, time in zip(chosen, times, strict=True)]
        settings = replace(self.settings, policy=policy, decoding=self.decoding)
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
        policy: str | SchedulePolicy = "look_ahead",
        sequences: int = 16,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """A closed loop over some of the requests, cut short, which compiles and records what their steps need."""
        brief = 2 * self.optimized.spec.block_length
        few = [replace(request, new=min(request.new, brief)) for request in self.requests[: 2 * sequences]]
        replace(self, requests=few).run(policy, clients=sequences, progress=progress)

    def capacity(
        self,
        policy: str | SchedulePolicy = "look_ahead",
        sequences: int = 16,
        progress: Callable[[int, int], None] | None = None,
    ) -> ServedLoad:
        """A closed loop with a client for every slot. Its `steady` rate is what the engine can serve."""
        return self.run(policy, clients=sequences, progress=progress)
