"""`dgraph simulate`: schedulers on a trace, with a clock that a cost model moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import options as given
from dgraph.cli.output import print_json, print_table, print_text, status
from dgraph.errors import InputError, warn

if TYPE_CHECKING:
    from dgraph.bench.arrivals import Request
    from dgraph.bench.simulate import Method, Simulated
    from dgraph.engine.scheduling.cost_model import CostModel


def simulate(
    trace: Annotated[
        str | None,
        typer.Option(
            help='JSON lines {"arrival": s, "prompt": tokens, "new": tokens}, or a CSV file as BurstGPT\'s.',
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Number of requests to draw.", show_default="1000, without a trace")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, on average.", show_default=False)] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma:CV (bursts above 1) or constant.")] = "poisson",
    clients: Annotated[
        int | None,
        typer.Option(help="Number of clients instead of a rate, each with one request at a time.", show_default=False),
    ] = None,
    prompt: Annotated[
        str, typer.Option(help="Tokens of a prompt: a number, uniform:128-1024, lognormal:MEDIAN,SIGMA, or a file.")
    ] = "uniform:64-2048",
    tokens: Annotated[str, typer.Option(help="New tokens per request, in the forms of --prompt.")] = "256",
    scheduler: Annotated[
        list[str] | None,
        typer.Option(help="A scheduler; may be repeated.", show_default="all of them"),
    ] = None,
    policy: given.OldScheduler = None,
    rows: Annotated[int, typer.Option(help="Budget of rows of a step.")] = 8192,
    sequences: Annotated[int, typer.Option(help="Requests that decode at a time.")] = 64,
    pages: Annotated[
        int | None, typer.Option(help="Pages of the KV pool.", show_default="enough for all slots")
    ] = None,
    page: Annotated[int, typer.Option(help="Tokens per page.")] = 32,
    by_block: Annotated[bool, typer.Option("--by-block", help="Allocate pages block by block.")] = False,
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 32,
    causal: Annotated[bool, typer.Option("--causal", help="A block-causal model, not a bidirectional one.")] = False,
    mixed: Annotated[
        int | None,
        typer.Option(
            help="Rows of prompts that first steps forward, with --causal; 0 for none.",
            show_default="the engine's, 512",
        ),
    ] = None,
    refresh_every: Annotated[int, typer.Option(help="Steps between refreshes; 0 for none.")] = 0,
    full_steps: Annotated[int, typer.Option(help="Refreshes at the start of a block.")] = 1,
    buckets: Annotated[
        str, typer.Option(help="Row counts that steps are padded to: exact, hybrid (as on a GPU), fine, or a list.")
    ] = "hybrid",
    commits: Annotated[
        str, typer.Option(help="Tokens that a step commits: a whole number, or drawn:MEAN.")
    ] = "drawn:5",
    costs: Annotated[
        str | None,
        typer.Option(help="A cost model as JSON.", show_default="LLaDA-8B on an H200, from single measurements"),
    ] = None,
    limit: Annotated[
        float | None, typer.Option(help="Latency target in seconds, for goodput.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of arrivals and lengths.")] = 0,
    json: given.Json = False,
) -> None:
    """Compare schedulers without a model: those of the engine under a clock that a cost model moves.

    \b
    dgraph simulate --rate 3
    dgraph simulate --rate 5 --prompt 512 --commits 1 --scheduler fcfs --scheduler look_ahead
    dgraph simulate --trace burst.csv --scheduler look_ahead --rows 4096 --json
    dgraph simulate --requests 2000 --clients 128 --causal --costs costs.json
    """
    from dgraph.bench.simulate import simulate as run
    from dgraph.engine.scheduling.schedulers import SCHEDULERS, scheduler_of
    from dgraph.lowering.buckets import Buckets

    pad = Buckets.of(given.bucket_list(buckets))
    model, method = _costs(costs), _method(block, causal, mixed, refresh_every, full_steps, commits, page, by_block)
    found = _requests(trace, requests, rate, arrivals, clients, prompt, tokens, seed)
    budgets = _budgets(found, method, rows, sequences, pages)
    schedulers = [scheduler_of(name) for name in given.schedulers(scheduler, policy) or SCHEDULERS]
    done: list[Simulated] = []
    with status("simulating") as tell:
        for chosen in schedulers:
            tell(chosen.name)
            settings: dict[str, Any] = {"clients": clients or 0, "pad": pad, "seed": seed, "limit": limit}
            done.append(run(found, budgets, method, chosen, model, **settings))
    if refused := done[0].refused:
        warn(f"{len(refused)} of {len(found)} requests are refused, as the first one: {refused[0]}")
    if json:
        print_json({"requests": len(found), "schedulers": [result.to_json() for result in done]})
        return
    load = f"{clients} clients" if clients else f"{len(found) / max(found[-1].arrival, 1e-9):.3g} requests/s"
    print_text(f"{len(found)} requests, {load}; {rows} rows, {sequences} slots, {budgets.pages} pages")
    print_text("")
    print_table(_TITLES, [_row(result) for result in done])


_TIMES = ("mean s", "p50", "p99", "sigma", "queue", "first", "first p99")
_TITLES = ("scheduler", "tok/s", *_TIMES, "good/s", "rows", "fill", "refresh", "active", "sat out", "gave way")


def _row(result: Simulated) -> tuple[str, ...]:
    s, counters = result.summary, result.counters
    times = (s.mean, s.p50, s.p99, s.sigma, s.queue_mean, s.first_mean, s.first_p99)
    return (
        result.scheduler,
        f"{s.tokens_per_second:.0f}",
        *(f"{value:.2f}" for value in times),
        "-" if s.goodput is None else f"{s.goodput:.2f}",
        f"{counters.rows / max(1, result.steps):.0f}",
        f"{result.fill:.0%}",
        f"{counters.refresh_rows / max(1, counters.rows):.0%}",
        f"{result.active:.1f}",
        str(counters.skipped),
        str(counters.requeued),
    )


def _costs(path: str | None) -> CostModel:
    from dgraph.engine.scheduling.cost_model import LLADA_8B_H200, CostModel

    return LLADA_8B_H200 if path is None else CostModel.read(path)


def _method(
    block: int,
    causal: bool,
    mixed: int | None,
    refresh_every: int,
    full_steps: int,
    commits: str,
    page: int,
    by_block: bool,
) -> Method:
    from dgraph.bench.simulate import Method
    from dgraph.engine.scheduling.jobs import MIXED_ROWS

    kind, colon, mean = commits.partition(":")
    try:
        per_step = float(mean if colon else commits)
    except ValueError:
        per_step = 0.0
    if per_step < 1 or (colon and kind != "drawn"):
        raise InputError(f"--commits takes a whole number of tokens, or drawn:MEAN, at least 1, got {commits!r}.")
    mixed = MIXED_ROWS * causal if mixed is None else mixed
    return Method(
        block, causal, refresh_every, per_step, bool(colon), page, by_block, mixed=mixed, full_steps=full_steps
    )


def _requests(
    trace: str | None,
    count: int | None,
    rate: float | None,
    arrivals: str,
    clients: int | None,
    prompt: str,
    tokens: str,
    seed: int,
) -> list[Request]:
    from dgraph.bench.arrivals import Lengths, drawn, read_trace
    from dgraph.bench.arrivals import arrivals as times_of

    for name, value in (("--requests", count), ("--clients", clients)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}.")
    if trace is not None:
        if count is not None or rate is not None:
            raise InputError("--trace says how many requests come and when; leave out --requests and --rate.")
        return read_trace(trace)
    if (rate is None) == (clients is None):
        raise InputError("give --trace, or --rate, or --clients, and only one of the last two.")
    times = [0.0] * (count or 1000) if rate is None else times_of(arrivals, rate, count or 1000, seed)
    return drawn(times, Lengths(prompt), Lengths(tokens, "--tokens"), seed)


def _budgets(requests: Sequence[Request], method: Method, rows: int, sequences: int, pages: int | None) -> Any:
    from dgraph.engine.scheduling.jobs import Budgets

    if pages is None:
        pages = max(sequences, 1) * max(method.pages(r, r.new) for r in requests)
    return Budgets(rows, sequences, pages)
