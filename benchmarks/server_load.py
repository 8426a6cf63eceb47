"""What a server takes from its engine: clients that stream over HTTP, and the same requests by `Engine.stream`.

    python -m benchmarks.server_load --model tiny_sdar --clients 64 --requests 256
    python -m benchmarks.server_load --shape sdar-8b --recipe focus --commits benchmarks/traces/text.json --clients 64

Both arms ask one engine, in turns, for the same requests: so many clients, each with one request at a time. The clients
over HTTP are a process of their own, those of `Engine.stream` tasks of one event loop beside the engine's thread. The
time to the first tokens begins when a client asks; ratios are to the mean of the engine's arms.

Weights of a shape are random; a trace commits as a trained model did, `--steps` the same number of tokens in each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

import dgraph
from benchmarks.engine_load import add_load, test_of
from benchmarks.tables import Cell, Report
from dgraph.bench.serve import LoadTest
from dgraph.engine.engine import Engine
from dgraph.engine.served import quantile


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
    """One request as its client saw it. Times in seconds from when it asked; tokens: of the response."""

    first: float
    ended: float
    tokens: int


@dataclass(frozen=True)
class Arm:
    """What the clients of one arm saw together; `first_p50` and `first_p99`: seconds to the first tokens. loop: seconds
    of CPU that the event loop took, which has the server, or the tasks that read `Engine.stream`.
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
    first = sorted(one.first for one in asked)
    return Arm(label, seconds, sum(one.tokens for one in asked), quantile(first, 0.5), quantile(first, 0.99), loop)


def cpu_of(thread: threading.Thread) -> float:
    """Seconds of CPU that a thread has had."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


async def in_turns(count: int, clients: int, ask: Any) -> list[Asked]:
    """Requests 0 to count, by so many clients that each ask for the next one when they have the last."""
    left = iter(range(count))
    done: list[Asked] = []

    async def client() -> None:
        for place in left:
            done.append(await ask(place))

    await asyncio.gather(*(client() for _ in range(clients)))
    return done


# -- the arms ---------------------------------------------------------------------------------------------------------


def by_engine(engine: Engine, test: LoadTest, clients: int) -> Arm:
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
    asked = asyncio.run(in_turns(len(test.requests), clients, ask))
    return arm_of("Engine.stream", asked, time.perf_counter() - began, cpu_of(here) - before)


def by_http(url: str, server: threading.Thread, test: LoadTest, clients: int) -> Arm:
    """From another process."""
    bodies = [
        {"prompt": list(prompt), "max_tokens": request.new, "ignore_eos": True}
        for prompt, request in zip(test.prompts, test.requests, strict=True)
    ]
    load = json.dumps({"url": url, "clients": clients, "bodies": bodies})
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
    began = time.perf_counter()
    asked = asyncio.run(
        in_turns(len(contents), load["clients"], lambda place: over_http(host, int(port), contents[place]))
    )
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


def measure(test: LoadTest, clients: int, rounds: int) -> list[Arm]:
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
            for load, kept in [(few, False)] + [(test, True)] * rounds:
                for arm in (by_engine(engine, load, clients), by_http(url[0], thread, load, clients)):
                    if kept:
                        arms.append(arm)
                        print(f"{arm.label}: {arm.rate:.1f} tokens/s, {1e3 * arm.first_p50:.2f} ms", flush=True)
        finally:
            host.handle_exit(15, None)
            thread.join()
    return arms


def report_of(arms: Sequence[Arm], clients: int, title: str) -> Report:
    """The table, and the ratios of the means."""
    report = Report(title)
    base = mean(arm.rate for arm in arms if arm.label == arms[0].label)
    rows: list[list[Cell]] = [
        [arm.label, arm.rate, arm.rate / base, 1e3 * arm.first_p50, 1e3 * arm.first_p99, arm.tokens, arm.loop]
        for arm in arms
    ]
    for label in dict.fromkeys(arm.label for arm in arms):
        same = [arm for arm in arms if arm.label == label]
        rate, first = mean(arm.rate for arm in same), 1e3 * mean(arm.first_p50 for arm in same)
        last, loop = 1e3 * mean(arm.first_p99 for arm in same), mean(arm.loop for arm in same)
        rows.append([f"{label}, mean", rate, rate / base, first, last, "", loop])
    titles = ["arm", "tok/s", "ratio", "first p50 ms", "first p99 ms", "tokens", "CPU s of the loop"]
    report.table("Streams", titles, rows, f"{clients} clients, each with one request at a time.")
    report.data["arms"] = [{**asdict(arm), "rate": arm.rate} for arm in arms]
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as-client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="of both arms")
    add_load(parser, shape="sdar-8b", recipe="focus", steps=8, prompt="uniform:64-512", tokens="256")
    args = parser.parse_args(arguments)
    if args.as_client:
        as_client()
        return
    test = with_words(test_of(args))
    arms = measure(test, args.clients, args.rounds)
    title = f"A server over its engine, {test.optimized.model.name} under {args.recipe}, dgraph {dgraph.__version__}"
    report_of(arms, args.clients, title).write(args.markdown, args.json)


if __name__ == "__main__":
    main()
