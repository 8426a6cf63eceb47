"""The cost of hostile clients to the others: `dgraph serve` under streams, alone and beside `benchmarks.attacks`.

    python -m benchmarks.hostile_clients --streams 200 50 --each 30
    python -m benchmarks.hostile_clients --streams 8 --each 10 --serve --backend eager

Each number of streams gets the longest gap between two steps of any of them (as drafts tell of them), the time that
/health takes, and the resident memory of the server before the attacks and some seconds after them. The streams, the
attacks and the server are processes of one machine, so the figures have the clients' own work in them; `late` is by how
much the process of the streams was late itself. Streams alone are the measure: a model that needs longer for a step has
longer gaps. `--elsewhere` has an arm in which the attacks go to a second server on the same processors: what differs
from it is what they do to a server, beside the work that they are. `--apart` has an arm for each attack.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import dgraph
from benchmarks.attacks import ATTACKS
from benchmarks.http_clients import served
from benchmarks.runs import Run, add_run
from benchmarks.tables import Cell

COLUMNS = ("streams", "beside", "gap s, longest", "p99", "p50", "late s", "/health ms, p50", "longest", "failed")
MEMORY = ("streams", "MB before", "MB after", "ratio")
NAMES = tuple(attack.__name__ for attack in ATTACKS)
SETTLED = 5.0
"""Seconds after the attacks until the memory is read."""


@dataclass(frozen=True)
class Arm:
    """The waits of streams, in seconds. told: counts of what each attack was told; elsewhere: by another server."""

    streams: int
    gaps: list[float]
    health: list[float]
    failed: int
    late: float
    cut: int
    told: dict[str, dict[str, int]]
    elsewhere: bool = False

    @property
    def row(self) -> list[Cell]:
        """As the table has it."""
        gaps, health = sorted(self.gaps), sorted(1e3 * took for took in self.health)
        times = [share_of(gaps, 1.0), share_of(gaps, 0.99), share_of(gaps, 0.5)]
        beside = ", ".join(self.told) if len(self.told) < 2 else f"attacks{' elsewhere' if self.elsewhere else ''}"
        return [
            self.streams,
            beside or "nothing",
            *times,
            self.late,
            share_of(health, 0.5),
            share_of(health, 1.0),
            self.failed,
        ]


def share_of(values: Sequence[float], share: float) -> float:
    """The value that a share of ascending values is not above; nan of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def resident(url: str) -> float:
    """Megabytes of the server, as its metrics say."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        found = re.search(r"^process_resident_memory_bytes (\S+)$", answer.read().decode(), re.MULTILINE)
    if found is None:
        raise RuntimeError("the server's metrics say nothing of its memory.")
    return float(found[1]) / (1 << 20)


def begin(module: str, told: Mapping[str, Any]) -> subprocess.Popen[str]:
    """A module in a process of its own, with something on its stdin."""
    command = [sys.executable, "-m", f"benchmarks.{module}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(told))
    process.stdin.close()
    return process


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON that it wrote."""
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.read() or "null") or {}
    if process.wait() or not found:
        raise RuntimeError(f"clients ended with {process.returncode}.")
    return found


def measure(
    url: str, streams: int, seconds: float, tokens: int, attacks: Sequence[str] = (), attacked: str | None = None
) -> Arm:
    """Streams for some time, each of which tells of every step. attacked: the server that is; None for theirs."""
    body = {
        "messages": [{"role": "user", "content": "Tell a story"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_mode": "draft",
    }
    patient = begin("gap_clients", {"url": url, "streams": streams, "seconds": seconds, "body": body})
    told = (
        result(begin("attacks", {"url": attacked or url, "seconds": seconds - 1, "attacks": attacks}))
        if attacks
        else {}
    )
    seen = result(patient)
    kept = ("gaps", "health", "failed", "late", "cut")
    return Arm(streams, told=told, elsewhere=attacked is not None, **{name: seen[name] for name in kept})


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_sdar")
    parser.add_argument("--recipe", default="focus")
    parser.add_argument("--streams", type=int, nargs="+", default=[200], help="at a time")
    parser.add_argument("--each", type=float, default=30.0, help="seconds of an arm")
    parser.add_argument("--tokens", type=int, default=512, help="new tokens of a stream")
    parser.add_argument("--elsewhere", action="store_true", help="an arm whose attacks go to another server")
    parser.add_argument("--apart", action="store_true", help="an arm for each attack")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more for `dgraph serve`, as the last")
    add_run(parser)
    args = parser.parse_args(arguments)
    title = f"Hostile clients of {args.model} under {args.recipe}, dgraph {dgraph.__version__}"
    slots = ["--max-sequences", str(max(args.streams)), *args.serve]
    rows: list[list[Cell]] = []
    memory: list[list[Cell]] = []
    outcomes: list[list[Cell]] = []
    with Run(args, title, arguments is None) as run, ExitStack() as open_:
        url, _ = open_.enter_context(served(args.model, args.recipe, slots))
        other = open_.enter_context(served(args.model, args.recipe, args.serve))[0] if args.elsewhere else None
        for streams in args.streams:
            measure(url, streams, min(args.each, 10.0), args.tokens)  # compiles for that many

            def arm(attacks: Sequence[str] = (), attacked: str | None = None, streams: int = streams) -> Arm:
                found = measure(url, streams, args.each, args.tokens, attacks, attacked)
                rows.append(found.row)
                run.arm("Streams", COLUMNS, rows, "Gaps are between two steps of a stream.")
                return found

            arm()
            if other is not None:
                arm(NAMES, other)
            for attacks in [(name,) for name in NAMES] if args.apart else [NAMES]:
                before = resident(url)
                told = arm(attacks).told
                time.sleep(SETTLED)
                after = resident(url)
                memory.append([streams, before, after, after / before])
                run.arm("Resident memory", MEMORY, memory)
                for name, counts in told.items():
                    said = ", ".join(f"{count} x {outcome}" for outcome, count in counts.items())
                    outcomes.append([name.replace("_", " "), streams, said])
                run.table("Attacks, and what they were told", ["attack", "streams", "outcomes"], outcomes)


if __name__ == "__main__":
    main()
