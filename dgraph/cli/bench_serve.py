"""`dgraph bench serve`: an engine under load, in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import options as given
from dgraph.cli import workload
from dgraph.cli.output import print_table, print_text, status, writes
from dgraph.cli.ranks import ranks
from dgraph.errors import InputError, warn

if TYPE_CHECKING:
    from dgraph.bench.arrivals import Request
    from dgraph.bench.serve import LoadTest, ServedLoad
    from dgraph.bench.serve_report import Row

LOADS = "0.5,0.75,0.9,1.1"
EXAMPLES = {"load": LOADS, "rate": "0.5,1", "clients": "1,4,16"}
Tell = Callable[[str], None]


def serve(
    model: workload.Named = None,
    shape: workload.Shape = None,
    random_weights: workload.RandomWeights = False,
    layers: workload.Layers = None,
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="See `dgraph recipes`.")] = "dense",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    scheduler: Annotated[
        list[str] | None,
        typer.Option(help="A scheduler; may be repeated.", show_default="look_ahead"),
    ] = None,
    policy: given.OldScheduler = None,
    load: Annotated[
        str | None,
        typer.Option(
            help="Requests per second as shares of the capacity, which is measured first.",
            show_default=f"{LOADS}, without --rate, --clients and a trace",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Requests per second instead of shares of the capacity, as 0.5,1.", show_default=False),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            help="Numbers of clients instead of a rate, each with one request at a time, as 1,4,16.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help='Requests as JSON lines {"arrival": s, "prompt": tokens, "new": tokens}, or CSV as BurstGPT\'s.',
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="Number of requests; the first ones of a trace.", show_default="100, or the whole trace"),
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma:CV (bursts above 1) or constant.")] = "poisson",
    prompt: Annotated[
        str, typer.Option(help="Tokens of a prompt: a number, uniform:128-1024, lognormal:MEDIAN,SIGMA, or a file.")
    ] = "uniform:32-256",
    shared: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
    tokens: Annotated[str, typer.Option(help="New tokens per request, in the forms of --prompt.")] = "64",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Decode to the length limit, past stop tokens.")
    ] = False,
    block: workload.Block = None,
    commits: workload.Commits = None,
    steps: workload.Steps = None,
    threshold: workload.Threshold = None,
    sequences: Annotated[
        int | None, typer.Option(help="Requests that decode at a time.", show_default="16, or 64 on a GPU")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Budget of rows of a step.", show_default="the engine's")] = None,
    mixed_rows: Annotated[
        int | None,
        typer.Option(help="Rows of prompts within a step's budget; 0 for none.", show_default="the engine's"),
    ] = None,
    logit_rows: Annotated[
        int | None,
        typer.Option(help="Rows of an LM-head chunk: logits in memory at a time.", show_default="the recipe's"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Positions of a request; longer prompts are cut.", show_default="of the longest request"),
    ] = None,
    kv: Annotated[
        str | None, typer.Option(help="Memory of keys and values, as 8G.", show_default="the engine's")
    ] = None,
    pages: Annotated[
        str, typer.Option(help="Page allocation: block (as a request grows) or life (all at admission).")
    ] = "block",
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Do not reuse keys and values of equal prompt prefixes.")
    ] = False,
    limit: Annotated[
        float | None, typer.Option(help="Latency target in seconds, for goodput.", show_default=False)
    ] = None,
    warm_share: Annotated[
        float, typer.Option(help="Share of the first requests to leave out of latencies, as warm-up.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed of arrivals and lengths.")] = 0,
    buckets: given.Buckets = None,
    no_graphs: workload.NoGraphs = False,
    backend: workload.Backend = "inductor",
    weights: given.Weights = None,
    dtype: workload.Dtype = None,
    device: workload.Device = None,
    tp: given.Ranks = 1,
    fact: given.Facts = None,
    json: Annotated[Path | None, typer.Option(help="Write all results to this JSON file.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this file.", show_default=False)] = None,
) -> None:
    """Measure an engine under load: throughput, latency, and what the scheduler made of it.

    The capacity is what a closed loop with a client for every slot is served under the first scheduler. Each gets
    the same requests at the same times. Latency counts from the moment at which a request was due. `sat out` is the
    most steps in a row that a running request took no part in.

    \b
    dgraph bench serve --model tiny_sdar --recipe focus --threshold 0.9 --load 0.5,0.9
    dgraph bench serve --shape llada-8b --recipe fast_dllm --commits benchmarks/traces/text.json --requests 300
        --prompt uniform:64-2048 --tokens uniform:32-512 --scheduler look_ahead --scheduler fcfs --scheduler static
        --limit 20
    dgraph bench serve --model tiny_sdar --steps 32 --clients 1,4,16 --json out.json --plot out.png
    """
    from dataclasses import asdict, replace

    import dgraph
    import dgraph.bench.serve_report as written
    from dgraph.bench import serve as serving
    from dgraph.bench.arrivals import arrivals as times_of
    from dgraph.bench.report import machine
    from dgraph.cache.place import parse_size
    from dgraph.compiler.base_graph import quantising
    from dgraph.engine.build import SEQUENCES, EngineConfig
    from dgraph.engine.scheduling.schedulers import scheduler_of

    options, facts = given.recipe_options(recipe, option, kv_dtype), given.facts(fact)
    workload.check_model(model, shape, layers, facts)
    workload.check_files(json, plot)
    quantising(weights)  # refuses what it does not know
    if not 0 <= warm_share < 1:
        raise InputError(f"--warm-share must be from 0 to below 1, got {warm_share}.")
    if shared < 0:
        raise InputError(f"--shared must be at least 0 tokens, got {shared}.")
    named = [scheduler_of(name).name for name in given.schedulers(scheduler, policy) or ["look_ahead"]]
    loads = _loads(load, rate, clients, trace)
    times_of(arrivals, 1.0, 1)  # refuses what it does not know
    asked = _requests(trace, requests, prompt, tokens, seed)
    decoding, followed = workload.commits_of(commits, steps, threshold, 1, block)
    where = workload.device_of(device)
    slots = SEQUENCES.get(where.type, 16) if sequences is None else sequences
    settings = EngineConfig(
        max_sequences=slots,
        max_tokens=max_tokens,
        max_batched_rows=rows,
        max_mixed_rows=mixed_rows,
        max_logit_rows=logit_rows,
        kv_bytes=None if kv is None else parse_size(kv, "--kv"),
        pages=pages,
        prefix_cache=False if no_prefix_cache else None,
        record=buckets != "exact",
    )
    done: list[Row] = []
    with ranks(tp, str(where)) as mesh, status("loading") as tell:
        length = followed.block if followed else block
        kind = workload.dtype_of(dtype, where)
        opened = mesh is not None or weights is not None
        found = workload.model_of(model, shape, where, kind, random_weights, layers, length, facts, opened)
        chosen = dgraph.recipe(recipe, found.spec, **workload.scripted(recipe, options, followed))
        asked, longest = _fitting(asked, max_tokens, found.spec.max_positions)
        settings = replace(settings, max_tokens=longest, block_length=found.spec.block_length)
        running: dict[str, Any] = {"backend": backend, "buckets": given.bucket_list(buckets), "graphs": not no_graphs}
        optimized = dgraph.optimize(found, chosen, progress=tell, mesh=mesh, weights=weights, **running)
        prompts = serving.prompts_for(found, asked, shared, seed)
        decoding = replace(workload.decided(decoding, found.spec), ignore_eos=ignore_eos)
        test = serving.LoadTest(optimized, asked, prompts, decoding, settings, limit, warm_share)
        test.prepare(named[0], slots, _counted(tell, "warming up"))
        try:
            base = 1.0
            if any(kind == "load" for kind, _ in loads):
                most = test.capacity(named[0], slots, _counted(tell, "capacity"))
                base = most.steady
                done.append(("capacity", most))
            for what, value in loads:
                for name in named:
                    tell(f"{name}, {_label(what, value)}")
                    done.append((_label(what, value), _run(test, name, what, value, base, arrivals, seed, tell)))
        finally:  # after Ctrl-C, too: shows what was measured until then
            over = "" if mesh is None else f", {mesh.size()} ranks"
            over += "" if weights is None else f", weights {weights}"
            title = f"{found.name}, {recipe}{over}: {len(asked)} requests, {slots} slots"
            setting = {**machine(where), "title": title, "model": found.spec.to_json(), "engine": asdict(test.settings)}
            setting["commits"] = commits or workload.written_commits(decoding)
            if json is not None and done:
                workload.write_json(json, written.to_json(done, setting))
            if plot is not None and len(done) > 1 and writes():
                written.plot([row for row in done if row[0] != "capacity"], plot, title)
            for titles, rows_of in (written.latency_table(done), written.inside_table(done)) if done else ():
                print_text("")
                print_table(titles, rows_of)


Load = tuple[str, float]
"""Kind and value: share of the capacity ("load"), requests per second ("rate"), clients ("clients"), or "trace"."""


def _loads(load: str | None, rate: str | None, clients: str | None, trace: str | None) -> list[Load]:
    given = {"load": load, "rate": rate, "clients": clients}
    named = [(name, text) for name, text in given.items() if text is not None]
    if len(named) > 1:
        raise InputError("give one of --load, --rate and --clients.")
    if not named:
        if trace is not None:
            return [("trace", 0.0)]
        named = [("load", LOADS)]
    ((name, text),) = named
    try:
        values = [int(part) if name == "clients" else float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0 or not all(map(math.isfinite, values)):
        kind = "whole numbers" if name == "clients" else "numbers"
        raise InputError(f"--{name} takes {kind} above 0 with commas, as {EXAMPLES[name]}, got {text!r}.")
    return [(name, value) for value in values]


def _label(what: str, value: float) -> str:
    return {"load": f"{value:g}", "rate": f"{value:g}/s", "clients": f"{value:g} clients"}.get(what, what)


def _run(
    test: LoadTest, scheduler: str, what: str, value: float, base: float, pattern: str, seed: int, tell: Tell
) -> ServedLoad:
    count = _counted(tell, f"{scheduler}, {_label(what, value)}")
    if what == "clients":
        return test.run(scheduler, clients=int(value), progress=count)
    rate = None if what == "trace" else value * (base if what == "load" else 1.0)
    return test.run(scheduler, rate, pattern=pattern, seed=seed, progress=count)


def _counted(tell: Tell, what: str) -> Callable[[int, int], None]:
    return lambda done, count: tell(f"{what}: {done} of {count} requests")


def _requests(trace: str | None, count: int | None, prompt: str, tokens: str, seed: int) -> list[Request]:
    from dgraph.bench.arrivals import Lengths, drawn, read_trace

    if count is not None and count < 1:
        raise InputError(f"--requests must be at least 1, got {count}.")
    if trace is not None:
        return read_trace(trace)[:count]
    return drawn([0.0] * (count or 100), Lengths(prompt), Lengths(tokens, "--tokens"), seed)


def _fitting(asked: Sequence[Request], tokens: int | None, most: int) -> tuple[list[Request], int]:
    """The requests, with prompts cut to what the model or --max-tokens allows, and the positions of the longest."""
    from dgraph.bench.serve import cut

    found, shortened = cut(asked, min(tokens or most, most))
    if shortened:
        warn(f"{shortened} of {len(found)} prompts are cut, so that they and their responses fit.")
    return found, max(request.prompt + request.new for request in found)
