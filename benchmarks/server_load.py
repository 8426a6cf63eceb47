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
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any

import dgraph
from benchmarks.engine_load import add_load, test_of
from benchmarks.recipes import chosen
from benchmarks.tables import Cell, Report
from dgraph.bench.serve import LoadTest
from dgraph.engine.engine import Engine
from dgraph.engine.served import quantile

ENGINE = "Engine.stream"
"""The arm that ratios are to."""


class Words:
    """A tokenizer for shapes, which come without: every id is a word."""

    def encode(self, prompt: str) -> list[int]:
        """Never asked: prompts are ids."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The ids as words."""
        return "".join(f" w{id}" for id in ids)


@dataclass(frozen=True)
class Asked:
    """One request as its client saw it. Times in seconds from when it asked; tokens: of the response; opening: whether
    it was its client's first.
    """

    first: float
    ended: float
    tokens: int
    opening: bool = False


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


async def in_turns(count: int, clients: int, think: float, ask: Any) -> list[Asked]:
    """Requests 0 to count, by so many clients that each ask for the next one when they have the last.

    Args:
        think: seconds in the mean that a client pauses before a request, drawn for each (exponential).
    """
    left, draw = iter(range(count)), random.Random(0)
    pauses = [draw.expovariate(1 / think) if think else 0.0 for _ in range(count)]
    done: list[Asked] = []

    async def client() -> None:
        opening = True
        for place in left:
            if think:
                await asyncio.sleep(pauses[place])
            done.append(replace(await ask(place), opening=opening))
            opening = False

    await asyncio.gather(*(client() for _ in range(clients)))
    return done


# -- the arms ---------------------------------------------------------------------------------------------------------


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
    command = [sys.executable, "-m", "benchmarks.server_load", "--as-client"]
    done = subprocess.run(command, input=load, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout)
    return arm_of("over HTTP", [Asked(*one) for one in told["asked"]], told["seconds"], cpu_of(server) - before)


def as_client() -> None:
    """The process of the clients: a load on stdin, what they saw on stdout."""
    load = json.loads(sys.stdin.read())
    host, port = load["url"].removeprefix("http://").split(":")
    common = {"stream": True, "stream_options": {"include_usage": True}}
    contents = [json.dumps({**body, **common}).encode() for body in load["bodies"]]

    async def ask(place: int) -> Asked:
        return await over_http(host, int(port), contents[place])

    began = time.perf_counter()
    asked = asyncio.run(in_turns(len(contents), load["clients"], load["think"], ask))
    print(json.dumps({"seconds": time.perf_counter() - began, "asked": [list(asdict(one).values()) for one in asked]}))


async def over_http(host: str, port: int, content: bytes) -> Asked:
    """One request on a connection of its own, with as little work as can be: this machine serves, too."""
    began, first = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection(host, port)
    head = ["POST /v1/completions HTTP/1.1", "Host: dgraph", "Content-Type: application/json", "Connection: close"]
    writer.write("\r\n".join([*head, f"Content-Length: {len(content)}", "", ""]).encode() + content)
    text = b""
    while piece := await reader.read(1 << 16):
        text += piece
        if not first and b'"text":"' in text:
            first = time.perf_counter() - began
    writer.close()
    if b"data: [DONE]" not in text:
        raise RuntimeError(f"a stream was cut: {text[:200]!r}")
    usage = json.loads(text[text.rindex(b'"usage":') + len(b'"usage":') :].partition(b"}\n\n")[0])
    return Asked(first, time.perf_counter() - began, usage["completion_tokens"])


# -- the run ----------------------------------------------------------------------------------------------------------


def with_words(test: LoadTest) -> LoadTest:
    """The same test of a model that writes texts."""
    if test.optimized.model.tokenizer is None:
        test.optimized.model = replace(test.optimized.model, tokenizer=Words())
    return test


def measure(test: LoadTest, clients: int, rounds: int, think: float = 0.0) -> list[Arm]:
    """Both arms in turns, after one of each that compiles and records what their steps need."""
    from dgraph.serve import ServeSettings
    from dgraph.serve.host import Host, bind

    arms: list[Arm] = []
    settings = ServeSettings(decoding=replace(test.decoding, ignore_eos=True), max_body_bytes=64 << 20)
    host, ready, url = Host(bind("127.0.0.1", 0), settings, 5.0), threading.Event(), []
    with test.optimized.engine(test.settings) as engine:
        few = replace(test, requests=test.requests[: 2 * clients], prompts=test.prompts[: 2 * clients])

        def begun(address: str) -> None:
            url.append(address)
            ready.set()

        serving = {"load": lambda tell: {"model": engine}, "tell": lambda what: None, "ready": begun}
        thread = threading.Thread(target=host.serve_with, kwargs=serving)
        thread.start()
        try:
            ready.wait()
            for i in range(rounds + 1):
                load = test if i else few
                both = [partial(by_engine, engine), partial(by_http, url[0], thread)]
                for ask in both[:: 1 if i % 2 else -1]:  # a machine that gets slower slows neither arm more
                    arm = ask(load, clients, think)
                    if i:
                        arms.append(arm)
                        print(f"{arm.label}: {arm.rate:.1f} tokens/s, {1e3 * arm.first_p50:.2f} ms", flush=True)
        finally:
            host.handle_exit(15, None)
            thread.join()
    return arms


def report_of(arms: Sequence[Arm], clients: int, title: str) -> Report:
    """The table, the ratios of the means, and by how much first tokens come later over HTTP, round by round."""
    report = Report(title)
    own, http = ([arm for arm in arms if (arm.label == ENGINE) is mine] for mine in (True, False))
    base = mean(arm.rate for arm in own)
    rows: list[list[Cell]] = [
        [arm.label, arm.rate, arm.rate / base, 1e3 * arm.first_p50, 1e3 * arm.first_p99, arm.tokens, arm.loop]
        for arm in arms
    ]
    for same in (own, http):
        rate, first = mean(arm.rate for arm in same), 1e3 * mean(arm.first_p50 for arm in same)
        last, loop = 1e3 * mean(arm.first_p99 for arm in same), mean(arm.loop for arm in same)
        rows.append([f"{same[0].label}, mean", rate, rate / base, first, last, "", loop])
    titles = ["arm", "tok/s", "ratio", "first p50 ms", "first p99 ms", "tokens", "CPU s of the loop"]
    later = [1e3 * (b.first_p50 - a.first_p50) for a, b in zip(own, http, strict=True)]
    note = (
        f"{clients} clients, each with one request at a time. First tokens come later over HTTP (p50, ms), by round: "
    )
    report.table(
        "Streams", titles, rows, note + ", ".join(f"{ms:.1f}" for ms in later) + f"; median {median(later):.1f}."
    )
    report.data["arms"] = [{**asdict(arm), "rate": arm.rate} for arm in arms]
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as-client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="of both arms")
    parser.add_argument(
        "--think", type=float, default=0.0, help="ms that a client pauses before a request, in the mean"
    )
    add_load(parser, shape="sdar-8b", recipe="focus", steps=8, prompt="uniform:64-512", tokens="256")
    args = parser.parse_args(arguments)
    if args.as_client:
        as_client()
        return
    if args.requests < 2 * args.clients:
        parser.error(f"--requests {args.requests} must be at least twice --clients {args.clients}")
    test = with_words(test_of(args))
    arms = measure(test, args.clients, args.rounds, 1e-3 * args.think)
    title = f"A server over its engine, {test.optimized.model.name} under {chosen(args)}, dgraph {dgraph.__version__}"
    report_of(arms, args.clients, title).write(args.markdown, args.json)


if __name__ == "__main__":
    main()
