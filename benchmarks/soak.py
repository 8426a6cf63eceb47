"""Minutes of random load on two engines: responses are those that requests get alone, and memory stays flat.

    python -m benchmarks.soak --minutes 10 --threads 1 --markdown out.md

The engines serve the embedded models at the same time, a block-causal one whose pool is too small for all that run, so
that requests give way, and a bidirectional one. Requests come in bursts, each with settings of its own; some are
cancelled, and some have a sampler that raises. Read after every round, with both engines still open and idle: the
memory of the process, the bytes and objects of Python, and pages that do not come back.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

import dgraph
from benchmarks.tables import Report
from dgraph.engine.engine import Engine
from dgraph.engine.io.events import Event
from dgraph.models.tasks import TASKS, make
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.sampling.sampler import RowContext, Sampler

CASES = 40
"""Requests of a model that are known with their responses."""
BURST = 12
"""Requests that arrive together at most."""
RULES: list[dict[str, Any]] = [
    *({"threshold": t} for t in (0.6, 0.9)),
    *({"steps": n} for n in (4, 16)),
    {"threshold": 0.7, "temperature": 0.8},
    {"policy": "sequential"},
    {"policy": "factor"},
    {"threshold": 0.8, "top_k": 5, "temperature": 1.0},
]


class Fails:
    """A logits processor that fails."""

    def __call__(self, logits: torch.Tensor, context: RowContext) -> torch.Tensor:
        raise ArithmeticError("this request is to fail")


@dataclass(frozen=True)
class Case:
    """A request, and what it gets alone; None where it is to fail."""

    prompt: str
    decoding: Decoding
    token_ids: list[int] | None


class Load:
    """Random load on one engine.

    Attributes:
        ends: requests by how they ended, wrong responses among them.
        tokens: of all responses.
    """

    def __init__(self, model: str, recipe: str, seed: int, **settings: Any):
        self._draw = random.Random(seed)
        made = dgraph.optimize(model, recipe, backend="eager")
        self._cases = [self._case(made) for _ in range(CASES)]
        self.engine: Engine = made.engine(max_sequences=6, max_tokens=256, **settings)
        self.ends: Counter[str] = Counter()
        self.tokens = 0

    def _case(self, made: dgraph.CompiledModel) -> Case:
        draw = self._draw
        prompt = make(draw.choice([task for task in TASKS if task != "needle"]), draw).prompt
        settings: dict[str, Any] = {"max_new_tokens": draw.choice([4, 16, 32, 48]), "seed": draw.randrange(3)}
        if draw.random() < 0.1:
            return Case(prompt, Decoding(**settings, sampler=Sampler(processors=(Fails(),))), None)
        settings |= {"ignore_eos": draw.random() < 0.3, "stop": draw.choice([(), ("e",), ("1 ", "ab")])}
        decoding = Decoding(**settings, **draw.choice(RULES))
        return Case(prompt, decoding, made.generate(prompt, decoding).token_ids[0])

    def burst(self) -> None:
        """Some requests at once, some of them cancelled, and wait for all of them."""
        arrived: SimpleQueue[tuple[Case, Event]] = SimpleQueue()
        count = self._draw.randint(1, BURST)
        for _ in range(count):
            case = self._draw.choice(self._cases)
            name = self.engine.submit(
                case.prompt,
                case.decoding,
                sink=lambda event, case=case: arrived.put((case, event)),  # type: ignore[misc]
                priority=self._draw.randint(-1, 1),
                draft=self._draw.random() < 0.2,
            )
            if self._draw.random() < 0.15:
                time.sleep(self._draw.random() * 0.05)
                self.engine.cancel(name)
        said: dict[str, list[int]] = {}
        while count:
            case, event = arrived.get()
            said.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is None:
                continue
            count -= 1
            ids, end = said.pop(event.request_id), event.finish_reason
            self.tokens += len(ids)
            # What is to fail may be cancelled before it does.
            right = {"cancelled": True, "error": case.token_ids is None}.get(end, ids == case.token_ids)
            self.ends[end if right else "wrong"] += 1


@dataclass(frozen=True)
class Reading:
    """What is read after a round. resident: bytes of the process; allocated, objects: of Python; taken: pages that are
    not free.
    """

    minutes: float
    requests: int
    tokens: int
    resident: int
    allocated: int
    objects: int
    taken: int


def read(began: float, loads: Sequence[Load]) -> Reading:
    gc.collect()
    stats = [load.engine.stats for load in loads]
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return Reading(
        minutes=(time.monotonic() - began) / 60,
        requests=sum(sum(load.ends.values()) for load in loads),
        tokens=sum(load.tokens for load in loads),
        resident=pages * os.sysconf("SC_PAGE_SIZE"),
        allocated=tracemalloc.get_traced_memory()[0],
        objects=len(gc.get_objects()),
        taken=sum(one.pages - one.free_pages for one in stats),
    )


def soak(loads: Sequence[Load], minutes: float, rounds: int) -> list[Reading]:
    """Keep the engines busy, and read so many times."""
    tracemalloc.start()
    began, readings = time.monotonic(), []
    for number in range(rounds):
        while time.monotonic() - began < 60 * minutes * (number + 1) / rounds:
            for load in loads:
                load.burst()
        readings.append(read(began, loads))
        print(readings[-1], flush=True)
    return readings


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, help="of torch; default as it is")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    loads = [
        Load("tiny_sdar", "focus", 0, kv_bytes=2 << 20, max_batched_rows=160),
        Load("tiny_llada", "fast_dllm", 1, max_batched_rows=400),
    ]
    readings = soak(loads, arguments.minutes, arguments.rounds)
    report = Report("Random load on two engines, tiny_sdar with focus and tiny_llada with fast_dllm")
    report.table(
        "Memory after each round",
        ["minutes", "requests", "tokens", "resident MiB", "Python MiB", "objects", "pages taken"],
        [
            [f"{r.minutes:.1f}", r.requests, r.tokens, _mib(r.resident), _mib(r.allocated), r.objects, r.taken]
            for r in readings
        ],
    )
    ends = sorted({end for load in loads for end in load.ends})
    report.table(
        "How requests ended",
        ["engine", *ends, "gave way", "prompt tokens found"],
        [
            [name, *(load.ends[end] for end in ends), stats.preempted, stats.prefix_found]
            for name, load, stats in zip(
                ("tiny_sdar", "tiny_llada"), loads, [load.engine.stats for load in loads], strict=True
            )
        ],
        "A response that differed from the one of its request alone would stand under 'wrong'.",
    )
    for load in loads:
        load.engine.close()
    report.write(arguments.markdown, arguments.json)


if __name__ == "__main__":
    main()
