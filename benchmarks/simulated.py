"""Loads that were measured on an H200, in the simulator: LLaDA-8B by its cost model, beside the records of the page.

    python -m benchmarks.simulated --markdown out.md

The requests, their times, what each step commits and the rows that steps are padded to are those of the commands in the
records. As there, the rate of an open loop is 0.9 of the capacity; here it is that of the simulator.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.records import record_of
from benchmarks.tables import Cell, Report
from dgraph.bench.arrivals import Lengths, Request, arrivals, drawn
from dgraph.bench.serve import steady
from dgraph.bench.simulate import Method, Simulated, simulate
from dgraph.bench.traces import Trace, read_trace
from dgraph.engine.scheduling.jobs import Budgets
from dgraph.lowering.buckets import Buckets

POSITION = 1 << 19
"""Bytes of a position's keys and values in LLaDA-8B."""
PAGE = 32
ROWS = 8192
PAD = Buckets.of("hybrid")
TRACE = "text.json"
FIGURES = {"tok/s": "tokens_per_second", "mean s": "mean", "p50 s": "p50", "p99 s": "p99"}
"""Columns of the records that are compared, and their names in a summary."""
COLUMNS = ("load", "scheduler", *FIGURES)
NOTE = (
    "Simulated over measured. That engine recorded CUDA graphs while it served open loops, which is not modelled; "
    "static batches meet the most buckets."
)


@dataclass(frozen=True)
class Load:
    """Loads of a record that have the same requests.

    Attributes:
        name: what load it is.
        record: name of the record.
        rows: places of its rows, and the scheduler of each.
        prompt, tokens: lengths of the requests, as they were asked for.
        drawn, requests: numbers of requests that were drawn, and that were served.
        slots: of the engine.
        method: of the recipe.
        gib: memory of keys and values in GiB; 0 where it held all slots.
        clients: of a closed loop; 0 for an open one or where all requests come at once.
        load: share of the capacity at which requests come; 0 where all come at once.
    """

    name: str
    record: str
    rows: dict[int, str]
    prompt: str
    tokens: str
    drawn: int
    requests: int
    slots: int
    method: Method = field(default_factory=Method)
    gib: int = 0
    clients: int = 0
    load: float = 0.0

    def asked(self) -> list[Request]:
        """The requests."""
        found = drawn([0.0] * self.drawn, Lengths(self.prompt), Lengths(self.tokens, "--tokens"))
        return found[: self.requests]

    def run(self, scheduler: str) -> Simulated:
        """Simulate it."""
        requests = self.asked()
        longest = max(self.method.pages(request, request.new) for request in requests)
        budgets = Budgets(ROWS, self.slots, (self.gib << 30) // (PAGE * POSITION) or self.slots * longest)
        clients = self.clients
        if self.load:
            full = simulate(requests, budgets, self.method, "look_ahead", clients=self.slots, pad=PAD)
            capacity = steady(list(full.served.values()), self.slots) or full.summary.requests_per_second
            times = arrivals("poisson", self.load * capacity, len(requests))
            requests = [replace(request, arrival=time) for request, time in zip(requests, times, strict=True)]
        return simulate(requests, budgets, self.method, scheduler, clients=clients, pad=PAD)


def loads(trace: Trace) -> tuple[Load, ...]:
    """The loads of the records of the page `serving` that the simulator models."""
    follows = Method(counts=trace.counts)
    closed = Load("", "dllm_serve", {}, "uniform:200-1000", "128", 64, 64, 32, clients=32)
    return (
        Load(
            "fast_dllm, 0.9 of capacity",
            "llada_policies",
            {0: "look_ahead", 1: "fcfs", 2: "prefill_first", 3: "static"},
            *("uniform:64-512", "uniform:32-128", 256, 192, 64, follows),
            load=0.9,
        ),
        Load(
            "fast_dllm, all at once",
            "llada_static",
            {0: "static", 1: "look_ahead"},
            "uniform:64-2048",
            "uniform:32-512",
            256,
            256,
            64,
            follows,
        ),
        replace(closed, name="fast_dllm, 8 GB", rows={0: "static", 1: "look_ahead"}, gib=8),
        replace(closed, name="fast_dllm, 4 GB", rows={6: "look_ahead"}, gib=4),
        replace(closed, name="dllm_serve, delay=1", rows={2: "look_ahead"}, method=Method(full_steps=2, kept=0.5)),
        replace(closed, name="dllm_serve, delay=0", rows={4: "look_ahead"}, method=Method(kept=0.5)),
    )


def compared(load: Load) -> Iterator[list[Cell]]:
    """Rows of `COLUMNS`: simulated figures over measured ones, "" where none was recorded."""
    record = record_of(f"serving/{load.record}")
    for place, scheduler in load.rows.items():
        row = dict(zip(record.columns, record.rows[place], strict=True))
        summary = load.run(scheduler).summary
        ratios = (
            getattr(summary, name) / float(row[column]) if column in row else "" for column, name in FIGURES.items()
        )
        yield [load.name, scheduler, *ratios]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, simulate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    report, trace = Report("Measured loads, simulated"), read_trace(Path(__file__).parent / "traces" / TRACE)
    report.table("Measured loads, simulated", COLUMNS, [row for load in loads(trace) for row in compared(load)], NOTE)
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
