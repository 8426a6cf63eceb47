"""What a server takes from its engine: clients that stream over HTTP, and the same requests by `Engine.stream`.

    python -m benchmarks.server_load --model tiny_sdar --clients 64 --requests 256
    python -m benchmarks.server_load --shape sdar-8b --recipe focus --commits benchmarks/traces/text.json --clients 64

Both arms ask one engine, in turns, for the same requests: so many clients, each with one request at a time. The clients
over HTTP are a process of their own, those of `Engine.stream` tasks of one event loop beside the engine's thread. The
time to the first tokens begins when a client asks, and is told of all requests but the first of each client: those come
in one burst, which an engine answers as fast as it reads their prompts. Ratios are to the mean of the engine's arms.

Who asks the moment that it was answered asks between two steps. With `--think` clients pause before each request, for
times that are drawn alike in both arms, so that requests come at any moment of a step in both.

Weights of a shape are random; a trace commits as a trained model did, `--steps` the same number of tokens in each.
`benchmarks.engine_load --parts server` measures the same beside other loads. A run that is cut leaves what it has (see
`benchmarks.runs`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean, median

import dgraph
from benchmarks.loads import add_load, first_of, ready
from benchmarks.recipes import chosen
from benchmarks.runs import Run
from benchmarks.stream_clients import Asked, in_turns
from benchmarks.tables import Cell
from dgraph.bench.serve import LoadTest
from dgraph.engine.engine import Engine
from dgraph.engine.io.timings import quantile

ENGINE, HTTP = "Engine.stream", "over HTTP"
"""The arms; ratios are to the first."""


class Words:
    """A tokenizer for shapes, which come without: every id is a word."""

    def encode(self, prompt: str) -> list[int]:
        """Never asked: prompts are ids."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The ids as words."""
        return "".join(f" w{id}" for id in ids)


@dataclass(frozen=True)
class Arm:
    """What the clients of one arm saw together.

    Attributes:
        first_p50, first_p99: seconds to the first tokens, of requests that were not their client's first.
        loop: seconds of CPU that the event loop took, which has the server, or the tasks that read `Engine.stream`.
    """

    label: str
    seconds: float
    tokens: int
    first_p50: float
    first_p99: float
    loop: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def arm_of(label: str, asked: Sequence[Asked], seconds: float, loop: float) -> Arm:
    """What requests tell together."""
    first = sorted(one.first for one in asked if not one.opening)
    return Arm(label, seconds, sum(one.tokens for one in asked), quantile(first, 0.5), quantile(first, 0.99), loop)


def cpu_of(thread: threading.Thread) -> float:
    """Seconds of CPU that a thread has had."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def by_engine(engine: Engine, test: LoadTest, clients: int, think: float) -> Arm:
    """In this process."""

    async def ask(place: int) -> Asked:
        began, first, tokens = time.perf_counter(), 0.0, 0
        decoding = replace(test.decoding, max_new_tokens=test.requests[place].new)
        async for event in engine.stream(test.prompts[place], decoding):
            if not first and event.token_ids:
                first = time.perf_counter() - began
            tokens = event.usage.completion_tokens
        return Asked(first, time.perf_counter() - began, tokens)

    here = threading.current_thread()
    began, before = time.perf_counter(), cpu_of(here)
    asked = asyncio.run(in_turns(len(test.requests), clients, think, ask))
    return arm_of(ENGINE, asked, time.perf_counter() - began, cpu_of(here) - before)


def by_http(url: str, server: threading.Thread, test: LoadTest, clients: int, think: float) -> Arm:
    """From another process."""
    bodies = [
        {"prompt": list(prompt), "max_tokens": request.new, "ignore_eos": True}
        for prompt, request in zip(test.prompts, test.requests, strict=True)
    ]
    load = json.dumps({"url": url, "clients": clients, "think": think, "bodies": bodies})
    before = cpu_of(server)
    command = [sys.executable, "-m", "benchmarks.stream_clients"]
    done = subprocess.run(command, input=load, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout)
    return arm_of(HTTP, [Asked(*one) for one in told["asked"]], told["seconds"], cpu_of(server) - before)


def with_words(test: LoadTest) -> LoadTest:
    """The same test of a model that writes texts."""
    if test.optimized.model.tokenizer is None:
        test.optimized.model = replace(test.optimized.model, tokenizer=Words())
    return test


def measure(run: Run, test: LoadTest, clients: int, rounds: int, think: float = 0.0) -> list[Arm]:
    """Both arms in turns, after a brief one of each; those that were begun in time."""
    from dgraph.serve import ServerConfig
    from dgraph.serve.host import Host, bind

    arms: list[Arm] = []
    if run.late("the server"):
        return arms
    settings = ServerConfig(decoding=replace(test.decoding, ignore_eos=True), max_body_bytes=64 << 20)
    host, up, url = Host(bind("127.0.0.1", 0), settings, 5.0), threading.Event(), []
    brief = 2 * test.optimized.spec.block_length
    few = first_of(test, 2 * clients)
    few.requests = [replace(request, new=min(request.new, brief)) for request in few.requests]
    with test.optimized.engine(test.settings) as engine:

        def begun(address: str) -> None:
            url.append(address)
            up.set()

        serving = {"load": lambda tell: {"model": engine}, "tell": lambda what: None, "ready": begun}
        thread = threading.Thread(target=host.serve_with, kwargs=serving)
        thread.start()
        try:
            while not up.wait(0.1):
                if not thread.is_alive():
                    raise RuntimeError("the server ended before it was ready.")
            both = {ENGINE: partial(by_engine, engine), HTTP: partial(by_http, url[0], thread)}
            for i, label in turns(rounds):
                if not run.late(f"{label}, round {i}"):
                    arm = both[label](test if i else few, clients, think)
                    if i:
                        arms.append(arm)
                        tell(run, arms, clients)
        finally:
            host.handle_exit(15, None)
            thread.join()
    return arms


def turns(rounds: int) -> Iterator[tuple[int, str]]:
    """Which arm comes when, by round; that of number 0 is not counted."""
    for i in range(rounds + 1):
        for label in (ENGINE, HTTP)[:: 1 if i % 2 else -1]:  # a machine that gets slower slows neither arm more
            yield i, label


def tell(run: Run, arms: Sequence[Arm], clients: int) -> None:
    """The last arm, and the table so far: the ratios to the mean of the engine's arms, the means, and by how much first
    tokens come later over HTTP, round by round.
    """
    own, http = ([arm for arm in arms if arm.label == label] for label in (ENGINE, HTTP))
    base = mean(arm.rate for arm in own or arms)
    rows: list[list[Cell]] = [
        [arm.label, arm.rate, arm.rate / base, 1e3 * arm.first_p50, 1e3 * arm.first_p99, arm.tokens, arm.loop]
        for arm in arms
    ]
    said = rows[-1]
    for same in filter(None, (own, http)):
        rate, first = mean(arm.rate for arm in same), 1e3 * mean(arm.first_p50 for arm in same)
        last, loop = 1e3 * mean(arm.first_p99 for arm in same), mean(arm.loop for arm in same)
        rows.append([f"{same[0].label}, mean", rate, rate / base, first, last, "", loop])
    titles = ["arm", "tok/s", "ratio", "first p50 ms", "first p99 ms", "tokens", "CPU s of the loop"]
    note = f"{clients} clients, each with one request at a time."
    if later := [1e3 * (b.first_p50 - a.first_p50) for a, b in zip(own, http, strict=False)]:
        each = ", ".join(f"{ms:.1f}" for ms in later)
        note += f" First tokens come later over HTTP (p50, ms), by round: {each}; median {median(later):.1f}."
    run.report.data["streams"] = [{**asdict(arm), "rate": arm.rate} for arm in arms]
    run.arm("Streams", titles, rows, note, said)


def add_server(parser: argparse.ArgumentParser, clients: str, default: int | None, told: str | None = None) -> None:
    """What `measure` asks for; clients: the name of their option."""
    parser.add_argument(clients, type=int, default=default, help=told)
    parser.add_argument("--rounds", type=int, default=3, help="of both arms of the server")
    parser.add_argument(
        "--think", type=float, default=0.0, help="ms that such a client pauses before a request, in the mean"
    )


def check_clients(parser: argparse.ArgumentParser, clients: int, requests: int) -> None:
    """Every client must have more than its first request."""
    if requests < 2 * clients:
        parser.error(f"{requests} requests must be at least twice the {clients} clients of the server")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server(parser, "--clients", 64)
    add_load(parser, shape="sdar-8b", recipe="focus", steps=8, prompt="uniform:64-512", tokens="256")
    args = parser.parse_args(arguments)
    check_clients(parser, args.clients, args.requests)
    title = f"A server over its engine, {args.model or args.shape} under {chosen(args)}, dgraph {dgraph.__version__}"
    with Run(args, title, arguments is None) as run:
        test = with_words(ready(args, run, "look_ahead", args.clients))
        measure(run, test, args.clients, args.rounds, 1e-3 * args.think)


if __name__ == "__main__":
    main()
