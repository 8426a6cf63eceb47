"""The scheduler alone, and under random requests, budgets, policies and cancels in the simulated engine."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgraph.bench.arrivals import Request
from dgraph.bench.simulate import Method
from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.engine.scheduling.jobs import Budgets, Facts, ScheduledRequest, grant
from dgraph.engine.scheduling.scheduler import Scheduler
from dgraph.engine.scheduling.schedulers import SCHEDULERS, Fcfs, LookAhead
from dgraph.errors import EngineBusy, InputError, UnknownName
from tests.engine.simulated import Checked, run

BLOCK = 4
NAMES = sorted(SCHEDULERS)


def job(id: int = 0, rows: int = 20, **changes: int) -> ScheduledRequest:
    values = {"prompt": rows - 8, "new": 8, "block": BLOCK, "refresh_rows": rows, "reuse_rows": BLOCK}
    return ScheduledRequest(id=id, arrived=float(id), refresh_blocks="chunk" not in changes, **{**values, **changes})


def begun(count: int, budgets: Budgets, policy: str = "fcfs", **changes: int) -> Scheduler:
    """A scheduler that has admitted so many jobs."""
    scheduler = Scheduler(budgets, policy)
    for id in range(count):
        scheduler.submit(job(id, **changes), 0.0)
    assert len(scheduler.plan(0.0, budgets.pages).admit) == count
    return scheduler


# -- the rule by which rows are given out -------------------------------------------------------------------------


def test_rows_are_given_by_order_until_one_does_not_fit() -> None:
    assert grant([10, 20, 5], [0, 0, 0], 35) == [10, 20, 5]
    assert grant([10, 20, 5], [0, 0, 0], 29) == [10, 0, 0], "5 rows would fit, but nothing overtakes"
    assert grant([10, 20, 5], [0, 8, 0], 29) == [10, 16, 0], "a prompt gets what is left, in whole blocks"
    assert grant([10, 20, 5], [0, 8, 0], 17) == [10, 0, 0]
    assert grant([0, 20, 0, 5], [0, 0, 0, 0], 25) == [0, 20, 0, 5], "who has ended takes nothing and stops nobody"
    assert grant([], [], 25) == []


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 4, 8]))), st.integers(1, 100))
def test_a_step_never_has_more_rows_than_its_budget(slots: list[tuple[int, int]], budget: int) -> None:
    needs, chunks = [need for need, _ in slots], [chunk for _, chunk in slots]
    granted = grant(needs, chunks, budget)
    assert sum(granted) <= budget
    short = [i for i, (need, given) in enumerate(zip(needs, granted, strict=True)) if given < need]
    assert all(granted[i] == 0 for i in range(short[0] + 1, len(slots))) if short else granted == needs
    if short:
        first = short[0]
        assert granted[first] == 0 or (chunks[first] and granted[first] % chunks[first] == 0)
        assert sum(granted[:first]) + needs[first] > budget


# -- the queue ----------------------------------------------------------------------------------------------------


def test_admission_is_by_arrival_and_the_head_is_not_overtaken() -> None:
    scheduler = Scheduler(Budgets(rows=50, sequences=8, pages=8), "fcfs")
    for id, rows in enumerate((20, 40, 10)):
        scheduler.submit(job(id, rows), 0.0)
    plan = scheduler.plan(0.0, 8)
    assert [j.id for j in plan.admit] == [0], "the third would fit, but it came after the second"
    assert plan.order == (0,)
    scheduler.cancel(1)
    assert [j.id for j in scheduler.plan(0.0, 8).admit] == [2]


def test_a_higher_priority_goes_first_but_not_for_ever() -> None:
    scheduler = Scheduler(Budgets(rows=20, sequences=1, pages=8), "fcfs", ageing=10.0)
    for id, priority in enumerate((0, 0, 1, 1)):  # they arrive at 0, 1, 2, 3 seconds
        scheduler.submit(job(id, priority=priority), 3.0)
    scheduler.submit(job(11, priority=1), 11.0)  # eleven seconds after the first: too late to go before it
    admitted = []
    for _ in range(5):
        (first,) = scheduler.plan(11.0, 8).admit
        admitted.append(first.id)
        scheduler.finish(first.id)
    assert admitted == [2, 3, 0, 1, 11]


def test_pages_bound_who_is_admitted() -> None:
    scheduler = Scheduler(Budgets(rows=100, sequences=8, pages=10), "fcfs")
    for id in range(4):
        scheduler.submit(job(id, pages_first=3, pages_life=4), 0.0)
    plan = scheduler.plan(0.0, 10)
    assert len(plan.admit) == 2, "a page is kept for each that may still take one"


def test_the_youngest_gives_way_and_keeps_its_place() -> None:
    budgets = Budgets(rows=60, sequences=3, pages=8)
    scheduler = begun(3, budgets)
    assert scheduler.victim() is scheduler.running[2]
    scheduler.submit(job(3), 0.0)
    scheduler.requeue(2)
    assert (list(scheduler.running), scheduler.waiting) == ([0, 1], 2)
    assert [j.id for j in scheduler.plan(0.0, 8).admit] == [2]
    scheduler.requeue(2, job(2, 53))
    assert scheduler.plan(0.0, 8).admit == (), "53 rows do not fit beside two blocks of 4"
    with pytest.raises(InputError, match="request 3 does not run"):
        scheduler.requeue(3)
    with pytest.raises(InputError, match="request 1 cannot come back as request 7"):
        scheduler.requeue(1, job(7))
    assert scheduler.counters.requeued == 2
    for id in (0, 1):
        scheduler.cancel(id)
    assert scheduler.victim() is None


def test_facts_of_a_step_before_it_came_back_are_ignored() -> None:
    scheduler = begun(1, Budgets(rows=60, sequences=3, pages=8))
    scheduler.requeue(0)
    scheduler.plan(0.0, 8)
    ended = Facts(took=20, rows=0, refresh=False, masks_left=0, blocks_left=0)
    scheduler.update(0, 0, ended)
    assert scheduler.running[0].rows == 20
    assert scheduler.counters.rows == 0
    scheduler.update(1, 0, ended)
    assert scheduler.running[0].rows == 0
    scheduler.finish(0)
    scheduler.update(1, 0, ended)
    assert scheduler.counters.rows == 20


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"rows": 51},
            ("request 0 needs 51 rows in one step", "43 tokens of prompt, 8 new", "50 of max_batched_rows"),
        ),
        ({"reuse_rows": 60}, ("needs 60 rows in one step",)),
        ({"chunk": 64}, ("blocks of 64 rows", "50 of max_batched_rows")),
        ({"pages_life": 9}, ("needs 9 pages", "which has 8", "give the pool more memory")),
    ],
)
def test_what_never_fits_is_refused_at_the_door(change: dict[str, int], parts: tuple[str, ...]) -> None:
    scheduler = Scheduler(Budgets(rows=50, sequences=2, pages=8))
    with pytest.raises(InputError) as refused:
        scheduler.submit(job(**change), 0.0)
    assert all(part in str(refused.value) for part in parts), refused.value
    assert (scheduler.counters.refused, scheduler.waiting) == (1, 0)


def test_a_prompt_in_chunks_may_be_longer_than_a_step() -> None:
    scheduler = Scheduler(Budgets(rows=50, sequences=2, pages=8))
    scheduler.submit(job(rows=200, chunk=4), 0.0)
    assert len(scheduler.plan(0.0, 8).admit) == 1


def test_a_full_queue_says_when_to_come_back() -> None:
    scheduler = Scheduler(Budgets(rows=20, sequences=1, pages=8), "fcfs", queue=2)
    for id in range(2):
        scheduler.submit(job(id), 0.0)
    with pytest.raises(EngineBusy, match=r"2 requests wait, of 2 that may; try again in about 1\.0 s"):
        scheduler.check_queue()
    for id in range(3, 6):  # one ends every two seconds
        scheduler.plan(2.0 * id, 8)
        scheduler.finish(next(iter(scheduler.running)))
        scheduler.check_queue()
        scheduler.submit(job(id), 2.0 * id)
    with pytest.raises(EngineBusy, match="3 requests wait") as busy:
        scheduler.check_queue(coming=1)
    assert busy.value.retry_after == pytest.approx(4.0), "two wait, one ends every two seconds"


def test_a_night_without_requests_is_no_reason_to_come_back_late() -> None:
    scheduler = Scheduler(Budgets(rows=20, sequences=1, pages=8), "fcfs", queue=2)
    for id in range(9):  # one a minute, and then many at once, of which one ends every two seconds
        now = 60.0 * id if id < 5 else 36_000.0 + 2 * (id - 5)
        scheduler.submit(job(id), now)
        scheduler.plan(now, 8)
        if id != 5:
            scheduler.finish(next(iter(scheduler.running)))
            scheduler.plan(now, 8)
    scheduler.submit(job(9), now)
    assert scheduler.drained() == pytest.approx(2.0 * scheduler.waiting)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budgets(rows=0, sequences=1, pages=1), "budget of rows must be a whole number, at least 1, got 0"),
        (lambda: job(new=0), "request 0: new must be at least 1, got 0"),
        (lambda: job(pages_first=2), r"pages_first must be from 0 to pages_life \(0\), got 2"),
        (lambda: Scheduler(Budgets(1, 1, 1), queue=0), "queue must be at least 1 request"),
        (lambda: Scheduler(Budgets(1, 1, 1), ageing=0), "ageing must be more than 0 seconds, got 0"),
        (lambda: begun(1, Budgets(20, 1, 1)).submit(job(0), 0.0), "request 0 is here already"),
    ],
)
def test_wrong_values_are_refused(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


def test_look_ahead_goes_by_what_was_measured_unless_told_otherwise() -> None:
    costs, budgets = CostModel((100, 200), (1.0, 2.0)), Budgets(1000, 1, 1)
    assert Scheduler(budgets, "look_ahead", costs=costs).strategy == LookAhead(enough=800)
    assert Scheduler(budgets, LookAhead(enough=7), costs=costs).strategy == LookAhead(enough=7)
    assert Scheduler(budgets, "look_ahead").strategy == LookAhead()
    assert Scheduler(budgets, "fcfs", costs=costs).strategy == Fcfs()


def test_an_unknown_scheduler() -> None:
    with pytest.raises(UnknownName, match=r"unknown scheduler 'look-ahead'\. Did you mean 'look_ahead'"):
        Scheduler(Budgets(1, 1, 1), "look-ahead")


# -- everything together ----------------------------------------------------------------------------------------------


@st.composite
def methods(draw: st.DrawFn) -> Method:
    causal = draw(st.booleans())
    return Method(
        block=BLOCK,
        causal=causal,
        refresh_every=0 if causal else draw(st.sampled_from([0, 0, 1, 3])),
        commits=draw(st.sampled_from([1, 2, 3])),
        drawn=draw(st.booleans()),
        page=BLOCK,
        by_block=draw(st.booleans()),
        mixed=draw(st.sampled_from([0, 8, 40])) if causal else 0,
    )


REQUESTS = st.lists(
    st.builds(Request, st.floats(0, 3), st.integers(1, 40), st.integers(1, 24), st.sampled_from([0, 0, 0, 1, 2])),
    min_size=1,
    max_size=20,
).map(lambda found: sorted(found, key=lambda r: r.arrival))
LARGEST = 64
BUDGETS = st.builds(Budgets, rows=st.integers(LARGEST, 200), sequences=st.integers(1, 6), pages=st.integers(16, 60))


@settings(max_examples=100, deadline=None)
@given(
    requests=REQUESTS,
    budgets=BUDGETS,
    method=methods(),
    policy=st.sampled_from([*NAMES, LookAhead(enough=40), LookAhead(horizon=3, delay=0)]),
    cancels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 19))),
    clients=st.sampled_from([0, 0, 1, 4]),
    overlap=st.booleans(),
)
def test_every_request_ends_and_nothing_is_lost(
    requests: list[Request],
    budgets: Budgets,
    method: Method,
    policy: str,
    cancels: list[tuple[int, int]],
    clients: int,
    overlap: bool,
) -> None:
    scheduler = Scheduler(budgets, policy)
    engine = Checked(requests, scheduler, method, clients=clients, overlap=overlap)
    step = 0
    while engine.advance():
        for when, id in cancels:
            if when == step:
                engine.cancel(id)
        step += 1
        assert step < 20_000
    counters = scheduler.counters
    assert engine.free == budgets.pages
    assert (scheduler.waiting, len(scheduler.running)) == (0, 0)
    assert counters.submitted == len(requests) == counters.finished + counters.cancelled
    assert counters.finished == len(engine.served)
    assert all(s.arrived <= s.admitted < s.first <= s.ended for s in engine.served.values())
    assert counters.admitted - counters.cancelled <= len(engine.admissions) <= counters.admitted
    assert counters.finished <= counters.admitted <= len(requests) + counters.requeued
    assert counters.rows == engine.rows or (counters.rows < engine.rows and (counters.cancelled or counters.requeued))
    assert counters.refresh_rows <= counters.rows
    firsts = list({j.id: j for j in engine.admissions}.values())
    for priority in {j.priority for j in firsts}:
        ids = [j.id for j in firsts if j.priority == priority]
        assert ids == sorted(ids), "within a priority, requests start in order of arrival"


def largest_need(requests: list[Request], budgets: Budgets, method: Method) -> int:
    jobs = [method.job(request, 0) for request in requests]
    step = BLOCK if method.mixed else 0  # with a prompt
    return max(min(max(j.refresh_rows + step, j.reuse_rows), budgets.rows) for j in jobs)


@settings(max_examples=100, deadline=None)
@given(requests=REQUESTS, budgets=BUDGETS, method=methods(), overlap=st.booleans(), patience=st.integers(1, 4))
def test_look_ahead_keeps_its_bound_on_sitting_out(
    requests: list[Request], budgets: Budgets, method: Method, overlap: bool, patience: int
) -> None:
    policy = LookAhead(horizon=2, delay=9, patience=patience)  # admits what will collide
    engine = run(requests, budgets, method, policy, overlap=overlap)
    lag, others = int(overlap), budgets.sequences - 1
    served = budgets.rows // largest_need(requests, budgets, method)
    assert engine.longest <= patience + lag + others * (1 + lag) // served
    assert engine.scheduler.counters.skipped <= engine.longest + lag


@settings(max_examples=100, deadline=None)
@given(requests=REQUESTS, budgets=BUDGETS, method=methods(), policy=st.sampled_from(["fcfs", "static"]))
def test_by_order_of_admission_the_bound_is_the_work_of_those_before(
    requests: list[Request], budgets: Budgets, method: Method, policy: str
) -> None:
    engine = run(requests, budgets, method, policy)
    most = 0
    for request in requests:
        job = method.job(request, 0)
        steps = request.new if method.drawn else math.ceil(BLOCK / method.commits) * math.ceil(request.new / BLOCK)
        refreshes = 1 if method.causal else steps
        most = max(most, refreshes * job.refresh_rows + steps * job.reuse_rows)
    room = budgets.rows - largest_need(requests, budgets, method) + 1
    assert engine.longest <= (budgets.sequences - 1) * most // room


def test_refreshes_that_collide() -> None:
    """Six requests, each with a refresh every other step, of which one fits into a step."""
    requests = [Request(0.0, 40, 24) for _ in range(6)]
    budgets, method = Budgets(rows=64 + 24, sequences=6, pages=1000), Method(block=BLOCK, refresh_every=2)
    longest = {}
    for policy in ("static", LookAhead(delay=99), LookAhead(delay=99, patience=1), LookAhead(delay=0)):
        engine = run(requests, budgets, method, policy, overlap=False)
        longest[str(policy)] = engine.longest
    static, patient, strict, foresighted = longest.values()
    assert static > 4 + 5, longest
    assert patient <= 4 + 5
    assert strict <= 1 + 5
    assert foresighted == 0, "nobody is admitted whose refresh will find no room"


def test_requests_that_gave_way_end_all_the_same() -> None:
    requests = [Request(0.01 * i, 16, 24) for i in range(8)]
    budgets, method = Budgets(rows=200, sequences=8, pages=24), Method(block=BLOCK, page=BLOCK, by_block=True)
    for policy in NAMES:
        engine = run(requests, budgets, method, policy)
        assert engine.scheduler.counters.finished == 8
        assert sum(s.requeued for s in engine.served.values()) == engine.scheduler.counters.requeued > 0


def test_the_same_calls_give_the_same_plans() -> None:
    requests = [Request(0.02 * i, 5 + 7 * i % 40, 1 + 5 * i % 24) for i in range(30)]
    budgets, method = Budgets(rows=80, sequences=4, pages=60), Method(block=BLOCK, commits=2, drawn=True)
    for policy in NAMES:
        first, second = (run(requests, budgets, method, policy) for _ in range(2))
        assert first.served == second.served
        assert first.now == second.now
    starts = [s.admitted for s in first.served.values()]
    assert all(a <= b for a, b in pairwise(starts))
