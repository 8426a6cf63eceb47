"""An engine under load: times of requests, open and closed loops, what a load is made of."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dgraph.api import CompiledModel, optimize
from dgraph.bench.arrivals import Request
from dgraph.bench.load import endless
from dgraph.bench.serve import LoadTest, cut, prompts_for, serve_load, steady
from dgraph.bench.traces import synthesise
from dgraph.engine.build import EngineConfig
from dgraph.engine.engine import Engine
from dgraph.engine.io.events import Event, Usage
from dgraph.engine.io.timings import Served
from dgraph.engine.stats import EngineStats
from dgraph.engine.submission import RequestSpec
from dgraph.errors import InputError
from dgraph.families import load as load_model
from dgraph.runtime.decoding import Decoding
from tests.cli.folders import write_checkpoint

BLOCK = 8
SCRIPTED = Decoding(policy=synthesise(BLOCK, 5.0, 3.0, histories=4).script(), ignore_eos=True)
REQUESTS = [Request(0.01 * place, 5 + 3 * place, new) for place, new in enumerate((12, 20, 3, 9, 16, 8))]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> CompiledModel:
    model = endless(load_model(write_checkpoint(tmp_path_factory.mktemp("serve") / "small")))
    return optimize(model, "dense", backend="eager")


@pytest.fixture
def engine(dense: CompiledModel) -> Iterator[Engine]:
    with dense.engine(max_sequences=2, max_tokens=64) as found:
        yield found


def prompts_of_requests(dense: CompiledModel) -> list[list[int]]:
    return prompts_for(dense.model, REQUESTS)


def test_an_open_loop_says_how_every_request_fared(dense: CompiledModel, engine: Engine) -> None:
    told: list[tuple[int, int]] = []
    found = serve_load(
        engine, REQUESTS, prompts_of_requests(dense), SCRIPTED, limit=60.0, progress=lambda *at: told.append(at)
    )
    assert [s.tokens for s in found.served] == [request.new for request in REQUESTS]
    for served in found.served:
        assert served.arrived <= served.admitted < served.first <= served.ended
    assert [s.arrived - found.served[0].arrived for s in found.served] == pytest.approx(
        [request.arrival for request in REQUESTS]
    )
    assert found.served[1].first < found.served[1].ended, "its response has several blocks"
    assert found.served[2].first == pytest.approx(found.served[2].ended, abs=0.01), "its response is one block"
    assert found.offered == pytest.approx(100)
    assert found.summary.goodput == found.summary.requests_per_second
    assert (found.summary.requests, found.summary.tokens) == (6, 68)
    assert (found.scheduler, found.clients, found.preempted) == ("look_ahead", 0, 0)
    assert found.refresh_rows == sum(r.prompt // BLOCK * BLOCK for r in REQUESTS)
    assert found.stats.finished == {"length": 6}
    assert told == [(done, 6) for done in range(1, 7)]


def test_a_closed_loop_has_as_many_requests_as_clients(dense: CompiledModel) -> None:
    test = LoadTest(dense, REQUESTS, prompts_of_requests(dense), SCRIPTED, EngineConfig(max_sequences=4, max_tokens=64))
    found = test.capacity("fcfs", 2)
    at_a_time = [sum(o.arrived <= s.arrived < o.ended for o in found.served) for s in found.served]
    assert max(at_a_time) == 2
    assert found.offered is None
    assert found.scheduler == "fcfs"
    assert found.steady > 0


def test_requests_that_are_due_together_are_planned_together(dense: CompiledModel) -> None:
    """Under the policy `static` a first request that was planned alone would be a batch of its own."""

    class Slow(list[list[int]]):
        def __getitem__(self, place: Any) -> Any:
            time.sleep(0.02)  # the engine has all the time to begin
            return super().__getitem__(place)

    at_once = [replace(request, arrival=0.0) for request in REQUESTS]
    with dense.engine(max_sequences=6, max_tokens=64, scheduler="static") as engine:
        found = serve_load(engine, at_once, Slow(prompts_of_requests(dense)), SCRIPTED)
    assert len({s.admitted for s in found.served}) == 1


def test_every_load_has_an_engine_of_its_own(dense: CompiledModel) -> None:
    settings = EngineConfig(max_sequences=2, max_tokens=64, max_logit_rows=16)
    test = LoadTest(dense, REQUESTS, prompts_of_requests(dense), SCRIPTED, settings)
    assert test.optimized.recipe.logit_rows == 16
    first, second = test.run("static", 200.0, count=2), test.run("look_ahead", count=3)
    assert first.stats.kv_bytes == second.stats.kv_bytes > 0
    assert (first.scheduler, len(first.served), len(second.served)) == ("static", 2, 3)
    assert second.stats.admitted == 3, "counts are of this load alone"


def test_two_loads_on_one_engine_are_told_apart(dense: CompiledModel, engine: Engine) -> None:
    prompts = prompts_of_requests(dense)
    first, second = (serve_load(engine, REQUESTS, prompts, SCRIPTED, clients=2) for _ in range(2))
    assert first.prefix_hit_rate == 0
    assert second.prefix_hit_rate > 0.9, "these prompts were there before, but for the blocks that are open"
    assert second.refresh_rows < first.refresh_rows == sum(r.prompt // BLOCK * BLOCK for r in REQUESTS)


def test_latency_counts_from_when_a_request_was_due() -> None:
    clock = itertools.count().__next__
    stats = EngineStats(0, 0, {}, 0, 0, 0, 0, 0, {}, {}, 0, 0.0, 0, 0, 0, 0)

    class Late:
        def __init__(self) -> None:
            self.clock, self.stats, self.scheduler = lambda: float(clock()), stats, "fcfs"

        def submit_all(self, several: Sequence[RequestSpec]) -> list[str]:
            (one,), now = several, self.clock()
            served = Served(now, now, now, now, one.decoding.max_new_tokens)
            one.sink(Event("a", "", (), (), (), Usage(1, 1), finish_reason="length", served=served))
            return ["a"]

    late: Any = Late()
    (served,) = serve_load(late, [Request(0.0, 1, 4)], [[5]]).served
    assert served.arrived == 0.0, "the engine was asked two ticks later"
    assert served.ended > 1.0


def test_the_first_error_cancels_the_others(dense: CompiledModel, engine: Engine) -> None:
    from dgraph.runtime.sampling.sampler import Sampler

    def wrong(logits: Any, rows: Any) -> Any:
        raise ValueError("this sampler is broken")

    sampler = Decoding(max_new_tokens=8, sampler=Sampler(processors=(wrong,)))
    with pytest.raises(ValueError, match="this sampler is broken"):
        serve_load(engine, REQUESTS, prompts_of_requests(dense), sampler, clients=2)
    gone = threading.Event()
    engine.submit([5, 6], max_new_tokens=1, sink=lambda event: gone.set() if event.finish_reason else None)
    assert gone.wait(30), "the engine goes on"
    assert engine.stats.running == engine.stats.waiting == 0


@pytest.mark.parametrize(("requests", "prompts"), [([], []), (REQUESTS, [[5]])])
def test_a_load_needs_requests_and_their_prompts(engine: Engine, requests: list[Request], prompts: Any) -> None:
    with pytest.raises(InputError, match="at least 1 request with a prompt for each"):
        serve_load(engine, requests, prompts)


def test_the_steady_rate_leaves_out_filling_and_emptying() -> None:
    # Two clients, a second per request, and one request that lasts long at the end.
    times = [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (3, 4), (3, 14)]
    served = [Served(a, a, e, e, 1) for a, e in times]
    assert steady(served, 2) == 2.0
    assert steady(served[:2], 2) is None
    assert steady(served[:1], 4) is None


def test_no_rate_is_steady_over_a_part_of_a_turn() -> None:
    # Four clients whose requests all last a second: two turns, and three clients of the second are a little late.
    times = [(0.0, 1.0)] * 4 + [(1.0 + 0.01 * late, 2.0) for late in range(4)]
    two = [Served(a, a, e, e, 1) for a, e in times]
    assert steady(two, 4) is None
    third = [Served(2.0 + 0.01 * late, 2.0, 3.0, 3.0, 1) for late in range(4)]
    assert steady([*two, *third], 4) == pytest.approx(4.0, rel=0.05)


def test_prompts_are_cut_to_what_fits() -> None:
    found, shortened = cut([Request(0, 10, 6), Request(1, 100, 4)], 16)
    assert [(r.prompt, r.new) for r in found] == [(10, 6), (12, 4)]
    assert shortened == 1
    with pytest.raises(InputError, match="a request has 16 new tokens, which leaves none of 16 positions"):
        cut([Request(0, 10, 16)], 16)


def test_prompts_begin_alike_if_they_are_to(dense: CompiledModel) -> None:
    prompts = prompts_for(dense.model, REQUESTS, shared=4)
    assert [len(ids) for ids in prompts] == [request.prompt for request in REQUESTS]
    assert len({tuple(ids[:4]) for ids in prompts}) == 1
    assert len({ids[4] for ids in prompts}) > 1
    assert prompts_for(dense.model, [Request(0, 2, 1)], shared=4)[0][:1] == prompts[0][:1]


def test_a_cancelled_request_has_the_times_that_it_lived_to_see(engine: Engine) -> None:
    last: list[Event] = []
    over = threading.Event()

    def sink(event: Event) -> None:
        if event.finish_reason is not None:
            last.append(event)
            over.set()

    assert engine.cancel(engine.submit([5, 6, 7], max_new_tokens=56, steps=8, sink=sink))
    assert over.wait(30)
    served = last[0].served
    assert served is not None
    assert last[0].finish_reason == "cancelled"
    assert served.arrived <= served.ended
    assert math.isnan(served.first)
