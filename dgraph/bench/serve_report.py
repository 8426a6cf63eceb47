"""Reports of engines under load: tables, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgraph.bench.report import Table, check_plot, number
from dgraph.bench.serve import ServedLoad
from dgraph.errors import InputError

Row = tuple[str, ServedLoad]
"""Name of a load, and the measurements under it."""

LATENCY = ("scheduler", "load", "offered/s", "served/s", "tok/s", "mean s", "p50", "p99", "sigma", "span", "good/s")
INSIDE = ("scheduler", "load", "queue s", "queue p99", "first block s", "first p99", "fill", "refresh rows/s",
          "sat out", "gave way", "prefix hits")  # fmt: skip
"""Titles of the tables; times are seconds.

served: requests that ended; good: requests within the latency limit; sat out: most steps in a row in which a running
request took no part; gave way: number of times that a request gave way because pages ran out.
"""


def latency_table(rows: Sequence[Row]) -> Table:
    """Throughput and latency."""
    found = []
    for label, m in rows:
        s = m.summary
        values = (m.offered, s.requests_per_second, s.tokens_per_second, s.mean, s.p50, s.p99, s.sigma, s.span)
        found.append((m.scheduler, label, *map(number, values), number(s.goodput)))
    return LATENCY, found


def inside_table(rows: Sequence[Row]) -> Table:
    """Times in the queue and to the first block, and the scheduler's counts."""
    found = []
    for label, m in rows:
        s, stats = m.summary, m.stats
        times = (s.queue_mean, s.queue_p99, s.first_mean, s.first_p99)
        found.append(
            (
                m.scheduler,
                label,
                *map(number, times),
                f"{stats.budget_fill:.1%}",
                number(m.refresh_rows_per_second),
                str(stats.longest_wait),
                str(m.preempted),
                f"{m.prefix_hit_rate:.0%}",
            )
        )
    return INSIDE, found


def to_json(rows: Sequence[Row], setting: dict[str, Any]) -> dict[str, Any]:
    """Settings and loads as plain values."""
    return {"setting": setting, "loads": [{"load": label, **m.to_json()} for label, m in rows]}


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw throughput, latency and the time to the first block over load, a line per scheduler.

    Raises:
        InputError: as `check_plot`, or the file cannot be written.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    closed = all(m.clients for _, m in rows)
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    drawn = [m for _, m in rows if bool(m.clients) == closed]
    for scheduler in dict.fromkeys(m.scheduler for m in drawn):
        mine = [((m.clients if closed else m.offered or 0.0), m) for m in drawn if m.scheduler == scheduler]
        mine.sort(key=lambda point: point[0])
        at = [x for x, _ in mine]
        axes[0].plot(at, [m.summary.tokens_per_second for _, m in mine], marker="o", label=scheduler)
        (line,) = axes[1].plot(at, [m.summary.p99 for _, m in mine], marker="o", label=f"{scheduler}, p99")
        axes[1].plot(at, [m.summary.p50 for _, m in mine], ls="--", color=line.get_color(), label=f"{scheduler}, p50")
        axes[2].plot(at, [m.summary.first_mean for _, m in mine], marker="o", label=scheduler)
    names = ("output tokens per second", "latency, s", "first block, mean s")
    for axis, name in zip(axes, names, strict=True):
        axis.set(xlabel="clients" if closed else "requests per second offered", ylabel=name, ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {path} cannot be written: {error}.") from None
    finally:
        plt.close(figure)
