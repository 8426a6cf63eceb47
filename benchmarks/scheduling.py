"""Scheduling policies over load, in the simulator: LLaDA-8B's shape on an H200 by its cost model.

    python -m benchmarks.scheduling --markdown out.md

Load is a share of the capacity: what the scheduler of the paper (fcfs) serves in a closed loop of 128 clients. Every
scheduler has the same requests, and a request commits the same tokens in its steps under each.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import Cell, Report
from dgraph.bench.arrivals import Lengths, Request, arrivals, drawn
from dgraph.bench.simulate import Method, simulate
from dgraph.engine.scheduling.jobs import Budgets
from dgraph.lowering.buckets import Buckets

SEQUENCES = 64


@dataclass(frozen=True)
class Workload:
    """What is served, and in how many rows a step."""

    name: str
    method: Method
    prompt: str = "512"
    new: str = "256"
    rows: int = 8192

    def requests(self, times: list[float], seed: int) -> list[Request]:
        return drawn(times, Lengths(self.prompt), Lengths(self.new, "--tokens"), seed)

    @property
    def budgets(self) -> Budgets:
        return Budgets(self.rows, SEQUENCES, SEQUENCES * 80)  # 80 pages hold the longest

    def capacity(self) -> float:
        """Requests per second."""
        found = simulate(
            self.requests([0.0] * 1500, 0), self.budgets, self.method, "fcfs", clients=2 * SEQUENCES, pad=PAD
        )
        return found.summary.requests_per_second


PARALLEL = Method(commits=5.0, drawn=True)
WORKLOADS = (
    Workload("parallel commits (a refresh every 7 steps)", PARALLEL),
    Workload("one token a step (a refresh every 32)", Method()),
    Workload("parallel commits, prompts of 64 to 2048, 32 to 512 new", PARALLEL, "uniform:64-2048", "uniform:32-512"),
    Workload("the same, 3072 rows a step", PARALLEL, "uniform:64-2048", "uniform:32-512", 3072),
)


SCHEDULERS = ("fcfs", "look_ahead", "prefill_first")
"""The paper's first: the others are compared with it. Static batches under open load are not predicted (see
`benchmarks.simulated`).
"""
PAD = Buckets.of("hybrid")

Run = tuple[Workload, float, str, int, int]


def measure(run: Run) -> tuple[float, ...]:
    """Tokens per second, mean, p99, first p99, and the most steps that one sat out."""
    workload, rate, scheduler, count, seed = run
    requests = workload.requests(arrivals("poisson", rate, count, seed), seed)
    found = simulate(requests, workload.budgets, workload.method, scheduler, pad=PAD, seed=seed)
    s = found.summary
    return s.tokens_per_second, s.mean, s.p99, s.first_p99, float(found.counters.skipped)


def rows_of(workload: Workload, args: argparse.Namespace, pool: ProcessPoolExecutor) -> Iterator[list[Cell]]:
    """A row of the table per load and scheduler."""
    capacity, seeds = workload.capacity(), range(args.seeds)
    grid = [(load, scheduler) for load in args.loads for scheduler in SCHEDULERS]
    runs = [(workload, load * capacity, scheduler, args.requests, seed) for load, scheduler in grid for seed in seeds]
    found = list(pool.map(measure, runs))
    base: list[tuple[float, ...]] = []
    for i, (load, scheduler) in enumerate(grid):
        mine = found[i * len(seeds) : (i + 1) * len(seeds)]
        base = mine if scheduler == SCHEDULERS[0] else base
        speed, mean, p99, first, _ = (statistics.mean(values) for values in zip(*mine, strict=True))
        against = [statistics.mean(m[at] / b[at] for m, b in zip(mine, base, strict=True)) for at in (0, 2)]
        sat_out = int(max(values[4] for values in mine))
        ratios = [f"{ratio:.3f}" for ratio in against]
        yield [scheduler, load, round(speed), ratios[0], mean, p99, ratios[1], first, sat_out]


def main() -> None:
    """Parse the command line, simulate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 0.9, 1.0, 1.1, 1.5])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report("Scheduling policies over load, simulated")
    columns = ["scheduler", "load", "tok/s", "of fcfs", "mean s", "p99 s", "of fcfs", "first block p99 s", "sat out"]
    with ProcessPoolExecutor(args.processes) as pool:
        for workload in WORKLOADS:
            report.table(workload.name, columns, list(rows_of(workload, args, pool)))
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
