"""The engine against batches that wait for their last request, its policies side by side, and over concurrency.

    python -m benchmarks.engine_load --shape llada-8b --recipe fast_dllm --commits benchmarks/traces/text.json
    python -m benchmarks.engine_load --shape sdar-8b --recipe focus -o alpha=1.2 --steps 8

Three parts, each of which can be left out:

* offline: all requests are there at the start. The engine under the first policy, under the policy `static`, and
  `Optimized.generate` batch by batch, each batch as large as the same memory holds and as long as its longest response.
* policies: at shares of the capacity of the first policy in a closed loop; the same requests at the same times.
* clients: closed loops. `floor %` is the share of the time that matrix products take, timed alone in the same process
  at the mean rows of a step and stage, and at the prompts' rows. A bound from below: attention, logits and uneven
  steps are not in it.

Weights of a shape are random; a trace commits as a trained model did, `--steps` the same number of tokens in each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import dgraph
from benchmarks.recipes import add_recipe, chosen
from benchmarks.tables import Cell, Report
from dgraph.bench.floor import Device, StepCount, floor_of, row_sets_of, work_of
from dgraph.bench.load import named, shape_of
from dgraph.bench.serve import LoadTest, ServedLoad, prompts_for
from dgraph.bench.traces import read_trace
from dgraph.engine.build import EngineSettings
from dgraph.engine.load import Lengths, drawn
from dgraph.engine.policies import POLICIES
from dgraph.engine.served import Served, Summary, summarise
from dgraph.engine.stats import EngineStats
from dgraph.models.shapes import SHAPES
from dgraph.optimized import Optimized

COLUMNS = ("req/s", "tok/s", "ratio", "mean s", "p50", "p99", "sigma", "span", "first s")
INSIDE = ("queue s", "fill %", "refresh/s", "sat out", "gave way")
PARTS = ("offline", "policies", "clients")
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
    """`Optimized.generate` batch by batch, in order; a request ends, and shows its first block, with its batch."""
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


def offline(test: LoadTest, report: Report, policy: str, generate: bool) -> None:
    """All requests at once."""
    done: list[tuple[str, Summary, list[Cell]]] = []
    pages = 0
    for name in dict.fromkeys(["static", policy]):
        found = test.run(name)
        pages = found.stats.pages
        done.append((f"engine, {name}", found.summary, inside(found)))
        report.data[f"offline, {name}"] = found.to_json()
        print(f"{name}: {found.summary.tokens_per_second:.1f} tokens/s", flush=True)
    note = f"{len(test.requests)} requests at the start, {pages} pages of keys and values; ratio: to `engine, static`."
    if generate:
        size = fitting(test, pages)
        batches(first_of(test, size), size)  # compiles, and captures what its steps need
        done.insert(0, (f"generate, batches of {size}", batches(test, size), ["-"] * len(INSIDE)))
        note += f" `generate` runs batches of {size}, each as long as its longest response."
    base = next(summary for label, summary, _ in done if label == "engine, static")
    rows = [[label, *cells(summary, base), *rest] for label, summary, rest in done]
    report.table("Offline", ["arm", *COLUMNS, *INSIDE], rows, note)


def first_of(test: LoadTest, count: int) -> LoadTest:
    """The same test with the first requests alone."""
    return replace(test, requests=test.requests[:count], prompts=test.prompts[:count])


def side_by_side(test: LoadTest, report: Report, policies: Sequence[str], loads: Sequence[float]) -> None:
    """Policies at shares of the capacity."""
    slots = test.settings.max_sequences or 1
    capacity = test.capacity(policies[0], slots)
    report.data["capacity"] = capacity.to_json()
    rows: list[list[Cell]] = []
    for load in loads:
        base: Summary | None = None
        for policy in policies:
            found = test.run(policy, load * capacity.steady)
            base = base or found.summary
            ratio = found.summary.p99 / base.p99
            rows.append([policy, load, *cells(found.summary, base), ratio, *inside(found)])
            report.data[f"{policy} at {load:g}"] = found.to_json()
            print(f"{policy} at {load:g}: p99 {found.summary.p99:.2f} s", flush=True)
    note = f"Capacity: {capacity.steady:.3g} requests/s, {slots} clients under {policies[0]}; ratios: to {policies[0]}."
    report.table("Policies", ["policy", "load", *COLUMNS, "p99 ratio", *INSIDE], rows, note)


def products_seconds(program: Optimized, stats: EngineStats, device: Device) -> float:
    """Seconds that the products of all steps take at the mean rows of each stage, and those of prompts where these have
    a forward of their own. What only the device counts (rows with logits, masked rows) is taken to be none.
    """

    def floor(phase: str, rows: Sequence[int]) -> float:
        graph = program.graph(phase)
        work, sets = work_of(graph), len(row_sets_of(graph))
        keys = tuple(dict.fromkeys(work.windows, 0) for _ in range(sets))
        return floor_of(work, [StepCount((*rows, *[0] * sets)[:sets], keys, 0)], device).total

    found = stats.steps * floor("step", [round(rows / max(1, stats.steps)) for rows in stats.rows.values()])
    if "prefill" in program.phases and stats.refresh_rows:
        found += stats.refresh_rows / PROMPT_ROWS * floor("prefill", [PROMPT_ROWS])
    return found


def concurrency(test: LoadTest, report: Report, policy: str, clients: Sequence[int], each: int) -> None:
    """Closed loops, in which every client has so many requests, one after the other."""
    rows: list[list[Cell]] = []
    base: Summary | None = None
    device = Device(test.optimized.captured.device)
    for count in clients:
        found = test.run(policy, clients=count, count=max(8, each * count))
        base = base or found.summary
        share = products_seconds(test.optimized, found.stats, device) / found.summary.seconds
        rows.append([count, *cells(found.summary, base), *inside(found), 100 * share])
        report.data[f"{count} clients"] = {**found.to_json(), "products_share": share}
        print(f"{count} clients: {found.summary.tokens_per_second:.1f} tokens/s, floor {share:.0%}", flush=True)
    note = f"Under {policy}, {each} requests a client and 8 at least; ratio: to {clients[0]} clients."
    report.table("Concurrency", ["clients", *COLUMNS, *INSIDE, "floor %"], rows, note)


def test_of(args: argparse.Namespace) -> LoadTest:
    """The model and its requests."""
    recipe, device = chosen(args), torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    trace = None if args.commits is None else read_trace(args.commits)
    block = trace.block if trace is not None else args.block
    if args.model is None:
        model = shape_of(args.shape, device, dtype, args.layers, block)
    else:
        model = named(args.model, device, dtype, random_weights=False, block=block)
    steps = None if trace is not None else args.steps
    decoding = dgraph.Decoding(policy=trace.script() if trace else None, steps=steps, ignore_eos=True)
    requests = drawn([0.0] * args.requests, Lengths(args.prompt), Lengths(args.tokens, "--tokens"), args.seed)
    settings = EngineSettings(
        max_sequences=args.sequences,
        max_tokens=max(request.prompt + request.new for request in requests),
        max_batched_rows=args.rows,
        max_logit_rows=args.logit_rows,
        kv_bytes=None if args.kv_gib is None else int(args.kv_gib * 2**30),
    )
    running = {"backend": args.backend, "buckets": args.buckets}
    optimized = dgraph.optimize(model, recipe.name, **running, **recipe.options)
    prompts = prompts_for(model, requests, seed=args.seed)
    return LoadTest(optimized, requests, prompts, decoding, settings)


def add_load(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """What `test_of` asks for, and where results go; defaults: other ones than here."""
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--model", help="instead: an embedded model or a checkpoint folder, with its weights")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a trial")
    parser.add_argument("--block", type=int, default=32, help="without a trace")
    add_recipe(parser, "fast_dllm")
    parser.add_argument("--commits", help="a trace of commits that every arm follows")
    parser.add_argument(
        "--steps", type=int, default=32, help="instead: steps per block; as many as it has rows: one token a step"
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", default="uniform:64-2048", help="tokens of a prompt")
    parser.add_argument("--tokens", default="uniform:32-512", help="new tokens")
    parser.add_argument("--sequences", type=int, default=64, help="slots")
    parser.add_argument("--rows", type=int, help="of a step; default the engine's")
    parser.add_argument("--logit-rows", type=int, help="rows whose logits exist at a time; default the recipe's")
    parser.add_argument("--kv-gib", type=float, help="memory of keys and values; default the engine's")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--buckets", help="exact, hybrid or fine; default that of the device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.set_defaults(**defaults)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["look_ahead", "fcfs", "prefill_first", "static"]
    )
    parser.add_argument("--no-generate", action="store_true", help="leave batches of Optimized.generate out")
    parser.add_argument("--load", type=float, nargs="+", default=[0.9], help="as shares of the capacity")
    parser.add_argument(
        "--load-requests", type=int, default=160, help="of policies; latencies leave the first 10 %% out"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--each", type=int, default=4, help="requests of a client")
    args = parser.parse_args(arguments)
    began = time.perf_counter()
    test = test_of(args)
    report = Report(f"The engine, {test.optimized.model.name} under {chosen(args)}")
    test.prepare(args.policies[0], args.sequences)
    print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
    parts: dict[str, Callable[[], Any]] = {
        "offline": lambda: offline(test, report, args.policies[0], not args.no_generate),
        "policies": lambda: side_by_side(first_of(test, args.load_requests), report, args.policies, args.load),
        "clients": lambda: concurrency(test, report, args.policies[0], args.clients, args.each),
    }
    for part in args.parts:
        parts[part]()
        report.write(args.markdown, args.json)
        print(f"{part}: over after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
