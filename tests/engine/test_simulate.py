"""The simulated engine: times by hand, and policies against each other on many requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dgraph.bench.arrivals import Lengths, Request, arrivals, drawn
from dgraph.bench.simulate import Method, Simulated, simulate
from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.engine.scheduling.jobs import Budgets
from dgraph.engine.scheduling.schedulers import SCHEDULERS
from dgraph.errors import InputError

SECOND = CostModel((1,), (0.0,), constant=1.0)
WIDE = Budgets(rows=1000, sequences=8, pages=1000)


def test_a_request_alone_takes_its_steps() -> None:
    served = simulate([Request(3.0, 40, 12)], WIDE, Method(block=4, commits=2), costs=SECOND).served[0]
    assert (served.arrived, served.admitted, served.first, served.ended) == (3.0, 3.0, 5.0, 9.0)


def test_one_that_comes_during_a_step_starts_two_steps_later() -> None:
    """The next step is planned while this one runs, so it is the one after that which the newcomer is part of."""
    requests = [Request(0.0, 40, 12), Request(0.5, 40, 4)]
    late = simulate(requests, WIDE, Method(block=4), "fcfs", SECOND).served[1]
    soon = simulate(requests, WIDE, Method(block=4), "fcfs", SECOND, overlap=False).served[1]
    assert (late.admitted, late.ended) == (2.0, 6.0)
    assert (soon.admitted, soon.ended) == (1.0, 5.0)


def test_rows_of_a_bidirectional_request() -> None:
    found = simulate([Request(0.0, 40, 8)], WIDE, Method(block=4, commits=1, refresh_every=3), costs=SECOND)
    assert found.counters.refresh_rows == 48 * 4, "the first step of a block, and the third after it"
    assert found.counters.rows == 48 * 4 + 4 * 4


def test_a_block_may_begin_with_several_refreshes() -> None:
    """As those of dllm_serve with delay=1 do."""
    found = simulate([Request(0.0, 40, 8)], WIDE, Method(block=4, full_steps=2), costs=SECOND)
    assert found.counters.refresh_rows == 48 * 2 * 2
    assert found.counters.rows == 48 * 4 + 4 * 4
    short = simulate([Request(0.0, 40, 8)], WIDE, Method(block=4, commits=4, full_steps=2), costs=SECOND)
    assert short.counters.rows == short.counters.refresh_rows == 48 * 2, "a block that is done begins no second one"


def test_kept_keys_are_packed_and_the_prompt_has_no_pages() -> None:
    request, method = Request(0.0, 40, 8), Method(block=4, page=4)
    assert method.job(request, 0).pages_life == 12
    assert replace(method, kept=0.5).job(request, 0).pages_life == 2
    assert replace(method, kept=0.5).job(Request(0.0, 42, 8), 0).pages_life == 3
    assert replace(method, kept=0.5, causal=True).job(request, 0).pages_life == 12


def test_a_block_commits_what_a_trace_says() -> None:
    asked: list[tuple[int, int, int]] = []

    def counts(request: int, start: int, masks: int) -> list[int]:
        asked.append((request, start, masks))
        return [3, 1] if masks == 4 else [masks]

    requests = [Request(0.0, 40, 6), Request(99.0, 7, 4)]
    found = simulate(requests, WIDE, Method(block=4, counts=counts), costs=SECOND)
    assert asked == [(0, 40, 4), (0, 44, 2), (1, 7, 4)]
    assert found.served[0].ended == 3.0
    assert found.served[1].ended - found.served[1].admitted == 2.0


def test_a_step_runs_with_the_rows_of_its_bucket() -> None:
    per_row = CostModel((1, 1000), (1.0, 1000.0))
    plain = simulate([Request(0.0, 40, 8)], WIDE, Method(block=4), costs=per_row)
    padded = simulate([Request(0.0, 40, 8)], WIDE, Method(block=4), costs=per_row, pad=lambda rows: -(-rows // 16) * 16)
    assert plain.busy == pytest.approx(2 * 48 + 6 * 4)
    assert padded.busy == pytest.approx(2 * 48 + 6 * 16)
    assert padded.counters.rows == plain.counters.rows


def test_rows_of_a_block_causal_request() -> None:
    found = simulate([Request(0.0, 42, 8)], WIDE, Method(block=4, causal=True, commits=2), costs=SECOND)
    assert found.counters.refresh_rows == 40, "the prompt's full blocks"
    assert found.counters.rows == 40 + 4 * 4 + 4, "and the block that is done goes along with the next one's first step"
    narrow = simulate([Request(0.0, 42, 8)], Budgets(16, 1, 99), Method(block=4, causal=True, commits=2), costs=SECOND)
    assert narrow.counters.rows == found.counters.rows
    assert narrow.steps == found.steps + 2


def test_prompts_of_a_block_causal_model_have_a_forward_of_their_own() -> None:
    """The last step of the first request comes after the prompt of the second: two seconds together."""
    requests = [Request(0.0, 40, 8), Request(2.5, 40, 4)]
    causal = Method(block=4, causal=True, commits=2)
    alone = simulate(requests[:1], WIDE, causal, "fcfs", SECOND, overlap=False)
    both = simulate(requests, WIDE, causal, "fcfs", SECOND, overlap=False)
    assert (alone.served[0].ended, alone.steps, alone.busy) == (5.0, 5, 5.0), "the prompt, and two steps of each block"
    assert (both.served[0].ended, both.steps) == (6.0, 6)
    assert both.busy == both.steps + 1


def test_prompts_of_few_rows_go_with_the_first_steps() -> None:
    """The second request's prompt and its first step are rows of the first one's third step."""
    requests = [Request(0.0, 40, 8), Request(1.5, 40, 4)]
    for mixed, ended in ((40, (4.0, 4.0)), (39, (6.0, 6.0))):
        causal = Method(block=4, causal=True, commits=2, mixed=mixed)
        found = simulate(requests, WIDE, causal, "fcfs", SECOND, overlap=False)
        assert tuple(one.ended for one in found.served.values()) == ended
        assert found.counters.refresh_rows == 80
        assert found.counters.rows == 80 + (4 * 4 + 4) + 2 * 4
        assert found.counters.committed >= 12
    at_once = [replace(request, arrival=0.0) for request in requests]
    for mixed, steps in ((80, 4), (79, 5)):  # of both prompts together
        assert simulate(at_once, WIDE, replace(causal, mixed=mixed), costs=SECOND).steps == steps
    for rows, steps in ((44, 4), (43, 5)):  # of the prompt and a block
        assert simulate(requests[:1], Budgets(rows, 1, 99), replace(causal, mixed=40), costs=SECOND).steps == steps


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    requests = [Request(99.0, 40, 4) for _ in range(10)]
    found = simulate(requests, WIDE, Method(block=4), "fcfs", SECOND, clients=5, overlap=False)
    assert found.active == 5.0
    assert found.summary.seconds == 8.0


def test_what_never_fits_is_left_out() -> None:
    requests = [Request(0.0, 40, 4), Request(1.0, 999, 4), Request(2.0, 40, 4)]
    found = simulate(requests, WIDE, Method(block=4), costs=SECOND)
    assert (list(found.served), found.counters.refused) == ([0, 2], 1)
    assert "request 1 needs 1003 rows" in str(found.refused[0])
    with pytest.raises(InputError, match="request 0 needs 1003 rows"):
        simulate([Request(0.0, 999, 4)], WIDE, Method(block=4), costs=SECOND)


def test_no_requests() -> None:
    with pytest.raises(InputError, match="at least 1 request, got none"):
        simulate([], WIDE, Method())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block": 0}, "block and page must be at least 1"),
        ({"commits": 0}, "commits must be at least 1 token a step"),
        ({"commits": 1.5}, "whole unless drawn, got 1.5"),
        ({"kept": 0.0}, r"share in \(0, 1\], got 0"),
        ({"causal": True, "refresh_every": 2}, "for bidirectional models"),
        ({"causal": True, "mixed": -1}, "mixed must be a number of rows, at least 0, got -1"),
        ({"mixed": 8}, "mixed is for block-causal models"),
        ({"full_steps": 0}, "full_steps is at least 1"),
        ({"causal": True, "full_steps": 2}, "1 for a block-causal model"),
    ],
)
def test_methods_that_make_no_sense(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Method(**settings)  # type: ignore[arg-type]


def compared(load: float, count: int = 1500) -> dict[str, Simulated]:
    """Every policy on LLaDA-8B's shape with parallel commits, at a share of what 64 slots serve (5.35 requests/s)."""
    budgets, method = Budgets(rows=8192, sequences=64, pages=64 * 24), Method(commits=5.0, drawn=True)
    requests = drawn(arrivals("poisson", load * 5.35, count), Lengths("512"), Lengths("256", "--tokens"))
    return {name: simulate(requests, budgets, method, name) for name in SCHEDULERS}


def test_look_ahead_has_the_shorter_tail_below_saturation() -> None:
    found = compared(0.9)
    tails = {name: result.summary.p99 for name, result in found.items()}
    assert tails["look_ahead"] < 0.9 * min(tails["fcfs"], tails["static"], tails["prefill_first"]), tails
    assert found["look_ahead"].counters.skipped <= found["fcfs"].counters.skipped


def test_look_ahead_loses_no_throughput_above_it() -> None:
    rates = {name: result.summary.tokens_per_second for name, result in compared(1.5, 800).items()}
    assert rates["look_ahead"] > 0.98 * max(rates.values()), rates


@pytest.mark.release
def test_twenty_thousand_requests_all_end() -> None:
    requests = drawn(
        arrivals("gamma:2", 30.0, 20_000), Lengths("lognormal:100,0.8"), Lengths("uniform:8-96", "--tokens")
    )
    budgets, method = Budgets(rows=4096, sequences=64, pages=2000), Method(commits=4.0, drawn=True, by_block=True)
    found = simulate(requests, budgets, method)
    assert found.counters.finished == found.summary.requests == len(requests)
    assert 0 < found.fill <= 1
