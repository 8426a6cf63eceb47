"""Tables and plots of `benchmarks.dllm_serve`: the figures of dLLM-Serve (arXiv 2512.17077) from loads as plain values.

A load has the case (`case_of`), its rate as a share of the capacity or "capacity", its seed, and what was measured.
Figures are means over seeds. Baselines are all arms but those of `dllm_serve`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import Run
from benchmarks.tables import Cell

Load = dict[str, Any]

CASE = ("lengths", "commits", "memory")
LOAD = (
    *("arm", *CASE, "load", "seed", "keys GB", "slots", "offered/s", "tok/s", "mean s", "p50", "p99", "sigma", "span"),
    *("refresh rows/s", "peak GB", "simulated p50", "simulated p99"),
)
LOAD_NOTE = "Load: requests per second as a share of the first arm's capacity. Simulated: to the measured one."
STEPS = (
    ("Sparse-dLLM in static batches", "sparse_dllm", "static+all"),
    ("keys per head", "dllm_serve", "static+all"),
    ("fcfs", "dllm_serve", "fcfs+all"),
    ("fcfs, logit budget", "dllm_serve", "fcfs"),
    ("look_ahead, logit budget", "dllm_serve", "look_ahead"),
)
"""Steps of figure 8: what each adds to the one before, and its recipe and scheduler as an arm spells them."""


def case_of(arm: str, lengths: str, commits: str, memory: str) -> Load:
    """The names by which a load is found."""
    return {"arm": arm, "lengths": lengths, "commits": commits, "memory": memory}


def load_rows(loads: Sequence[Load]) -> list[list[Cell]]:
    """What `LOAD` says, a row for each load."""
    return [
        [
            *(one[name] for name in ("arm", *CASE, "load", "seed")),
            one["keys"] / 2**30,
            one["slots"],
            "-" if one["offered"] is None else one["offered"],
            *(one[name] for name in ("tokens_per_second", "mean", "p50", "p99", "sigma", "span")),
            one["refresh_rows_per_second"],
            one["peak"] / 2**30 if one["peak"] else "-",
            *(_simulated(one, name) for name in ("p50", "p99")),
        ]
        for one in loads
    ]


def _simulated(one: Load, name: str) -> Cell:
    return one["simulated"][name] / one[name] if one.get("simulated") else "-"


def figures(run: Run, loads: Sequence[Load]) -> None:
    """Every figure for which there are loads."""
    rated = [one for one in loads if one["load"] != "capacity"]
    rates = sorted({one["load"] for one in rated})
    if rated:
        columns = [*CASE, "arm", *(f"{rate:g}" for rate in rates)]
        by_rate = _by(rated, *CASE, "arm")
        for title, name in (("Figure 3: tok/s by rate", "tokens_per_second"), ("Figure 4: mean latency, s", "mean")):
            rows = [[*key, *(_mean(_at(found, rate), name) for rate in rates)] for key, found in by_rate.items()]
            run.table(title, columns, rows, "Rates are shares of the capacity of the first arm.")
        highest = _at(rated, rates[-1])
        run.table(
            f"Figure 5: latency at {rates[-1]:g} of the capacity, best baseline over arm",
            [*CASE, "arm", "sigma s", "span s", "sigma, times", "span, times"],
            _to_baseline(highest, ("sigma", "span"), min, lambda best, own: best / own),
            "More is steadier.",
        )
        run.table(
            f"Table 4: at {rates[-1]:g} of the capacity",
            [*CASE, "arm", "mean s", "tok/s", "mean, times", "tok/s, times"],
            _table_4(highest),
            "Times: latency of the best baseline over that of the arm, and tok/s of the arm over that of the best one.",
        )
        _figure_8(run, highest)
    _figure_7(run, [one for one in loads if one["load"] == "capacity" and "+" in one["lengths"]])


def _table_4(loads: Sequence[Load]) -> list[list[Cell]]:
    mean = _to_baseline(loads, ("mean",), min, lambda best, own: best / own)
    speed = _to_baseline(loads, ("tokens_per_second",), max, lambda best, own: own / best)
    return [[*m[:5], s[4], m[5], s[5]] for m, s in zip(mean, speed, strict=True)]


def _to_baseline(
    loads: Sequence[Load],
    names: Sequence[str],
    best: Callable[[Sequence[float]], float],
    ratio: Callable[[float, float], float],
) -> list[list[Cell]]:
    """Rows of the case, the arm, its figures by name, and the ratios of these and the best baseline's."""
    rows: list[list[Cell]] = []
    for case, found in _by(loads, *CASE).items():
        arms = {arm: [_mean(own, name) for name in names] for (arm,), own in _by(found, "arm").items()}
        baselines = [values for arm, values in arms.items() if not arm.startswith("dllm_serve")]
        for arm, values in arms.items():
            bests = [best(each) for each in zip(*baselines, strict=True)] if baselines else []
            ratios: list[Cell] = (
                [ratio(b, v) if v else "-" for b, v in zip(bests, values, strict=True)] if bests else []
            )
            rows.append([*case, arm, *values, *(ratios or ["-"] * len(names))])
    return rows


def _figure_8(run: Run, loads: Sequence[Load]) -> None:
    rows: list[list[Cell]] = []
    for case, found in _by(loads, *CASE).items():
        base: float | None = None
        for what, recipe, rest in STEPS:
            own = [one for one in found if _is(one, recipe, rest)]
            if own:
                speed = _mean(own, "tokens_per_second")
                base = base or speed
                rows.append([*case, what, speed, speed / base])
    if rows:
        run.table("Figure 8: what each part adds", [*CASE, "arm", "tok/s", "to the first"], rows)


def _is(one: Load, recipe: str, rest: str) -> bool:
    own, _, scheduler = one["arm"].partition("@")
    return own.partition(":")[0] == recipe and scheduler == rest


def _figure_7(run: Run, loads: Sequence[Load]) -> None:
    rows: list[list[Cell]] = []
    for (lengths, memory), found in _by(loads, "lengths", "memory").items():
        prompt, _, new = lengths.partition("+")
        base = [one for one in found if _is(one, "sparse_dllm", "static+all")]
        for one in found:
            speed = one["tokens_per_second"]
            rows.append(
                [
                    int(prompt),
                    int(new),
                    memory,
                    one["arm"],
                    speed,
                    speed / _mean(base, "tokens_per_second") if base else "-",
                ]
            )
    if rows:
        columns = ["prompt", "new", "memory", "arm", "tok/s", "to sparse_dllm@static+all"]
        run.table("Figure 7: throughput by lengths", columns, rows)


def _by(loads: Sequence[Load], *names: str) -> dict[tuple[Any, ...], list[Load]]:
    """Loads by the values of their names."""
    found: dict[tuple[Any, ...], list[Load]] = {}
    for one in loads:
        found.setdefault(tuple(one[name] for name in names), []).append(one)
    return found


def _at(loads: Sequence[Load], rate: float) -> list[Load]:
    return [one for one in loads if one["load"] == rate]


def _mean(loads: Sequence[Load], name: str) -> Any:
    return statistics.mean(one[name] for one in loads) if loads else "-"


def plot(loads: Sequence[Load], path: Path) -> None:
    """Draw throughput, mean latency and sigma by rate: a row of panels for each case, a line for each arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rated = [one for one in loads if one["load"] != "capacity"]
    cases = _by(rated, *CASE)
    panels = (("tokens_per_second", "tok/s"), ("mean", "mean latency, s"), ("sigma", "sigma of latency, s"))
    figure, axes = plt.subplots(
        max(1, len(cases)), len(panels), figsize=(14, 4 * max(1, len(cases))), layout="constrained", squeeze=False
    )
    for row, (case, found) in zip(axes, cases.items(), strict=False):
        for axis, (name, label) in zip(row, panels, strict=True):
            for (arm,), own in _by(found, "arm").items():
                rates = sorted({one["load"] for one in own})
                axis.plot(rates, [_mean(_at(own, rate), name) for rate in rates], marker="o", label=arm)
            axis.set(xlabel="share of the capacity", ylabel=label, title=", ".join(case), ylim=(0, None))
            axis.grid(alpha=0.3)
        row[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
