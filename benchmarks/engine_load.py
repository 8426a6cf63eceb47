"""The engine: its steps, a server over it, policies side by side, concurrency, and batches that wait for their last.

    python -m benchmarks.engine_load --shape llada-8b --recipe fast_dllm --commits benchmarks/traces/text.json
    python -m benchmarks.engine_load --shape sdar-8b --recipe focus -o alpha=1.2 --steps 8 --parts steps clients

Parts on one program, in the order of `--parts`:

* steps: as `benchmarks.engine_steps` of an engine: one batch, the first prompt of every slot, each with as many new
  tokens. With it among the parts, two events are nodes of every CUDA graph of the program.
* server: as `benchmarks.server_load`: clients over HTTP and by `Engine.stream`, in turns.
* policies: at shares of the capacity of the first scheduler in a closed loop; the same requests at the same times.
* clients: closed loops. `floor %` is the share of the time that matrix products take, timed alone in the same process
  at the mean rows of a step and stage, and at the prompts' rows. A bound from below: attention, logits and uneven
  steps are not in it.
* offline: all requests are there at the start. The engine under the scheduler `static`, under the first scheduler, and
  `CompiledModel.generate` batch by batch, each as large as the same memory holds and as long as its longest response.

Where the time of the start went is said first. Each arm is printed and written when it is over; a run that is cut, by
`--seconds` or a signal, leaves what it has (see `benchmarks.runs`), and a part that fails is passed over.

Weights of a shape are random; a trace commits as a trained model did, `--steps` the same number of tokens in each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks import engine_steps, server_load
from benchmarks.loads import add_load, first_of, ready
from benchmarks.recipes import chosen
from benchmarks.runs import Run
from benchmarks.tables import Cell
from dgraph.bench.floor import Device, StepCount, floor_of, row_sets_of, work_of
from dgraph.bench.serve import LoadTest, ServedLoad
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.io.timings import Served, Summary, summarise
from dgraph.engine.scheduling.schedulers import SCHEDULERS
from dgraph.engine.stats import EngineStats

COLUMNS = ("req/s", "tok/s", "ratio", "mean s", "p50", "p99", "sigma", "span", "first s")
INSIDE = ("queue s", "fill %", "refresh/s", "sat out", "gave way")
PARTS = ("steps", "server", "policies", "clients", "offline")
PROMPT_ROWS = 2048
"""Rows of a forward of prompts, of which products take what time the floor says."""


def cells(summary: Summary, base: Summary) -> list[Cell]:
    """What `COLUMNS` say; the ratio is of tokens per second."""
    s = summary
    ratio = s.tokens_per_second / base.tokens_per_second
    return [s.requests_per_second, s.tokens_per_second, ratio, s.mean, s.p50, s.p99, s.sigma, s.span, s.first_mean]


def inside(found: ServedLoad) -> list[Cell]:
    """What `INSIDE` says."""
    fill = 100 * found.stats.budget_fill
    wait = found.stats.longest_wait
    return [found.summary.queue_mean, fill, found.refresh_rows_per_second, wait, found.preempted]


def batches(test: LoadTest, size: int) -> Summary:
    """`CompiledModel.generate` batch by batch, in order; a request ends, and shows its first block, with its batch."""
    served: list[Served] = []
    begin = time.perf_counter()
    for first in range(0, len(test.requests), size):
        group = test.requests[first : first + size]
        admitted = time.perf_counter() - begin
        decoding = replace(test.decoding, max_new_tokens=max(request.new for request in group))
        test.optimized.generate(decoding=decoding, input_ids=test.prompts[first : first + size])
        ended = time.perf_counter() - begin
        served += [Served(0.0, admitted, ended, ended, request.new) for request in group]
    return summarise(served, test.warm_up)


def fitting(test: LoadTest, pages: int) -> int:
    """Requests that so many pages hold, however long they are, at most as many as the engine has slots."""
    longest = max(r.prompt for r in test.requests) + max(r.new for r in test.requests)
    return max(1, min(test.settings.max_sequences or 1, pages // -(-longest // test.optimized.page_size)))


def steps(run: Run, test: LoadTest, tokens: int, graphs: engine_steps.GraphTimes) -> None:
    """One batch, of a prompt for every slot; graphs: within whose `recording()` the test was made, and this runs."""
    prompts = test.prompts[: test.settings.max_sequences]
    lengths, traced = [len(prompt) for prompt in prompts], test.optimized.captured.device.type == "cuda"
    room = (test.settings.max_tokens or 0) - max(lengths)
    decoding = replace(test.decoding, max_new_tokens=min(tokens, room))
    if run.late("steps"):
        return
    columns = ["sequences", *engine_steps.COLUMNS]
    note = f"Prompts of {min(lengths)} to {max(lengths)} tokens, {decoding.max_new_tokens} new ones."
    with test.optimized.engine(test.settings) as engine:
        for found in engine_steps.steps_of(engine, prompts, decoding, graphs, traced):
            run.report.data["steps"] = found.to_json()
            run.arm("Steps of a batch", columns, [[len(prompts), *found.cells()]], note)
            engine_steps.waits_table(run, {len(prompts): found})


def server(run: Run, test: LoadTest, clients: int, rounds: int, think: float) -> None:
    """A server over the engine, and the engine alone."""
    server_load.measure(run, server_load.with_words(test), clients, rounds, think)


def side_by_side(run: Run, test: LoadTest, policies: Sequence[str], loads: Sequence[float]) -> None:
    """Policies at shares of the capacity."""
    slots = test.settings.max_sequences or 1
    if run.late("policies"):
        return
    capacity = test.capacity(policies[0], slots)
    run.report.data["capacity"] = capacity.to_json()
    note = f"Capacity: {capacity.steady:.3g} requests/s, {slots} clients under {policies[0]}; ratios: to {policies[0]}."
    run.say(note)
    run.write()
    rows: list[list[Cell]] = []
    for load in loads:
        base: Summary | None = None
        for scheduler in policies:
            if run.late(f"{scheduler} at {load:g}"):
                continue
            found = test.run(scheduler, load * capacity.steady)
            base = base or found.summary
            ratio = found.summary.p99 / base.p99
            rows.append([scheduler, load, *cells(found.summary, base), ratio, *inside(found)])
            run.report.data[f"{scheduler} at {load:g}"] = found.to_json()
            run.arm("Policies", ["scheduler", "load", *COLUMNS, "p99 ratio", *INSIDE], rows, note)


def products_seconds(program: CompiledModel, stats: EngineStats, device: Device) -> float:
    """Seconds that the products of all steps take at the mean rows of each stage, and those of prompts where these have
    a forward of their own. What only the device counts (rows with logits, masked rows) is taken to be none.
    """

    def floor(phase: str, rows: Sequence[int]) -> float:
        graph = program.graph(phase)
        work, sets = work_of(graph), len(row_sets_of(graph))
        keys = tuple(dict.fromkeys(work.windows, 0) for _ in range(sets))
        return floor_of(work, [StepCount((*rows, *[0] * sets)[:sets], keys, 0)], device).total

    each = [stats.rows.get(name, 0) / max(1, stats.steps) for name in program.programs["step"].stage_names]
    found = stats.steps * floor("step", [round(rows) for rows in each])
    if prompts := stats.rows.get("prefill", 0):
        found += prompts / PROMPT_ROWS * floor("prefill", [PROMPT_ROWS])
    return found


def concurrency(
    run: Run, test: LoadTest, scheduler: str, clients: Sequence[int], each: int, mixed: Sequence[int | None]
) -> None:
    """Closed loops, in which every client has so many requests, one after the other; of each number of clients one for
    each bound of the prompts' rows in a step.
    """
    rows: list[list[Cell]] = []
    base: Summary | None = None
    device, several = Device(test.optimized.captured.device), len(mixed) > 1
    columns = ["clients", *["mixed rows"] * several, *COLUMNS, *INSIDE, "floor %"]
    for count, mixed_rows in product(clients, mixed):
        name = f"{count} clients, {mixed_rows} mixed rows" if several else f"{count} clients"
        if run.late(name):
            continue
        arm = replace(test, settings=replace(test.settings, max_mixed_rows=mixed_rows))
        found = arm.run(scheduler, clients=count, count=max(8, each * count))
        base = base or found.summary
        share = products_seconds(test.optimized, found.stats, device) / found.summary.seconds
        rows.append([count, *[mixed_rows] * several, *cells(found.summary, base), *inside(found), 100 * share])
        run.report.data[name] = {**found.to_json(), "products_share": share}
        note = f"Under {scheduler}, {each} requests a client and 8 at least; ratio: to the first line."
        run.arm("Concurrency", columns, rows, note)


def offline(run: Run, test: LoadTest, scheduler: str, generate: bool) -> None:
    """All requests at once."""
    columns = ["arm", *COLUMNS, *INSIDE]
    rows: list[list[Cell]] = []
    base: Summary | None = None
    note, pages = "", 0
    for name in dict.fromkeys(["static", scheduler]):
        if run.late(f"offline, {name}"):
            return
        found = test.run(name)
        base, pages = base or found.summary, found.stats.pages
        rows.append([f"engine, {name}", *cells(found.summary, base), *inside(found)])
        run.report.data[f"offline, {name}"] = found.to_json()
        note = f"{len(test.requests)} requests at the start, {pages} pages of keys and values; ratio: to `static`."
        run.arm("Offline", columns, rows, note)
    if generate and base is not None and not run.late("offline, generate"):
        size = fitting(test, pages)
        batches(first_of(test, size), size)  # compiles, and captures what its steps need
        rows.append([f"generate, batches of {size}", *cells(batches(test, size), base), *["-"] * len(INSIDE)])
        note += f" `generate` runs batches of {size}, each as long as its longest response."
        run.arm("Offline", columns, rows, note)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, write; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="in this order")
    parser.add_argument("--step-tokens", type=int, default=128, help="new ones of the batch of steps, if they fit")
    server_load.add_server(parser, "--server-clients", None, "over HTTP; default as many as slots")
    parser.add_argument(
        "--policies", nargs="+", choices=SCHEDULERS, default=["look_ahead", "fcfs", "prefill_first", "static"]
    )
    parser.add_argument("--no-generate", action="store_true", help="leave batches of CompiledModel.generate out")
    parser.add_argument("--load", type=float, nargs="+", default=[0.9], help="as shares of the capacity")
    parser.add_argument(
        "--load-requests",
        type=int,
        default=160,
        help="of policies, where latencies leave the first 10 %% out, and of an arm of the server",
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--each", type=int, default=4, help="requests of a client")
    parser.add_argument(
        "--mixed-rows", type=int, nargs="+", default=[None], help="of prompts in a step; several: an arm for each"
    )
    args = parser.parse_args(arguments)
    scheduler, streams = args.policies[0], args.server_clients or args.sequences
    if "server" in args.parts:
        server_load.check_clients(parser, streams, min(args.requests, args.load_requests))
    graphs = engine_steps.GraphTimes()
    recording = graphs.recording() if "steps" in args.parts else nullcontext()
    title = f"The engine, {args.model or args.shape} under {chosen(args)}"
    with Run(args, title, arguments is None) as run, recording:
        test = ready(args, run, scheduler, args.sequences)
        some = first_of(test, args.load_requests)
        parts: dict[str, Callable[[], Any]] = {
            "steps": lambda: steps(run, test, args.step_tokens, graphs),
            "server": lambda: server(run, some, streams, args.rounds, 1e-3 * args.think),
            "policies": lambda: side_by_side(run, some, args.policies, args.load),
            "clients": lambda: concurrency(run, test, scheduler, args.clients, args.each, args.mixed_rows),
            "offline": lambda: offline(run, test, scheduler, not args.no_generate),
        }
        for part in args.parts:
            with run.told(part):
                parts[part]()
    return min(1, run.failed)


if __name__ == "__main__":
    raise SystemExit(main())
