"""Reports of measured arms: tables, JSON and a plot."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dgraph.bench.measure import Measured
from dgraph.errors import InputError

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Titles and rows."""

STEPS = (
    "arm", "ms/step", "median ms", "speed-up", "tokens/s", "rows/token", "steps", "floor ms", "ratio",
    "host reads/step", "graphs", "build s",
)  # fmt: skip

MOST, LEAST, WIDEST = 12, 0.02, 60
"""Limits of the kernels in a table: most kernels of an arm, least share of its device time, most letters of a name."""


def number(value: float | None, unit: float = 1.0) -> str:
    """Three significant digits; "n/a" without a value."""
    if value is None:
        return "n/a"
    value /= unit
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def steps_table(done: Sequence[Measured]) -> Table:
    """A row per arm; the first is the baseline of the speed-up."""
    rows: list[tuple[str, ...]] = []
    for m in done:
        reads = None if m.profile is None else m.profile.host_reads
        rows.append(
            (
                m.label,
                number(1e3 * m.step),
                number(1e3 * m.median),
                number(done[0].step * done[0].steps / (m.step * m.steps)),
                number(m.tokens_per_second),
                number(m.stats.rows_per_token),
                str(m.steps),
                number(1e3 * m.floor.total),
                number(m.ratio),
                number(reads),
                "n/a" if m.graphs is None else str(m.graphs),
                number(m.built),
            )
        )
    return STEPS, rows


def stages_table(done: Sequence[Measured]) -> Table:
    """Milliseconds per step: stages as host and device measured them, and the floor by part."""
    rows: list[tuple[str, ...]] = []
    for m in done:
        parts = {f"{name} (host)": ms for name, ms in m.stage_ms().items()}
        parts |= {f"{name} (device)": ms for name, ms in (m.profile.stages if m.profile else {}).items()}
        parts |= {f"{name} (floor)": ms for name, ms in m.floor.to_json().items() if name != "total"}
        rows += [(m.label, name, number(ms)) for name, ms in parts.items()]
    return ("arm", "stage", "ms/step"), rows


def groups_table(done: Sequence[Measured]) -> Table:
    """Milliseconds per step on the device by group of kernels; no rows on a CPU."""
    profiles = [(m.label, m.profile) for m in done if m.profile is not None]
    groups = list(dict.fromkeys(name for _, p in profiles for name in p.groups))
    rows = [
        (label, *(number(p.groups.get(g, 0.0)) for g in groups), number(p.launches), number(p.waits))
        for label, p in profiles
    ]
    return ("arm", *groups, "kernels/step", "waits/step"), rows


def kernels_table(done: Sequence[Measured]) -> Table:
    """The kernels that take most of the time of each arm's steps; no rows on a CPU."""
    rows: list[tuple[str, ...]] = []
    for m in done:
        if m.profile is not None:
            busy = sum(spent.ms for spent in m.profile.kernels)
            for spent in m.profile.kernels[:MOST]:
                if spent.ms >= LEAST * busy:
                    name = spent.name if len(spent.name) <= WIDEST else f"{spent.name[: WIDEST - 3]}..."
                    each = number(1e3 * spent.ms / spent.calls)
                    rows.append((m.label, name, spent.group, number(spent.calls), each, number(spent.ms)))
    return ("arm", "kernel", "group", "calls/step", "us each", "ms/step"), rows


def memory_table(done: Sequence[Measured]) -> Table:
    """GB on the device by use, a row per arm."""
    rows = [
        (m.label, *(number(x, 1e9) for x in (m.memory.weights, m.memory.kv, m.memory.other, m.memory.peak)))
        for m in done
    ]
    return ("arm", "weights GB", "KV GB", "activations and graphs GB", "peak allocated GB"), rows


def tables(done: Sequence[Measured]) -> list[Table]:
    """All tables that have rows."""
    found = [steps_table(done), stages_table(done), groups_table(done), kernels_table(done), memory_table(done)]
    return [(titles, rows) for titles, rows in found if rows]


def to_json(done: Sequence[Measured], failed: dict[str, str], setting: dict[str, Any]) -> dict[str, Any]:
    """Settings, arms and failures as plain values."""
    return {"setting": setting, "arms": [m.to_json() for m in done], "failed": failed}


def machine(device: torch.device) -> dict[str, str]:
    """Hardware, versions and date."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"CPU, {os.cpu_count()} cores ({platform.machine()}), {torch.get_num_threads()} threads"
    return {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be drawn, before the work whose results it shows.

    Raises:
        InputError: matplotlib is not installed, or draws no files of the path's suffix.
    """
    try:
        from matplotlib import backend_bases
    except ImportError:
        raise InputError("--plot needs matplotlib; install it with: pip install 'dgraph[bench]'.") from None
    known, suffix = backend_bases.FigureCanvasBase.get_supported_filetypes(), path.suffix.removeprefix(".").lower()
    if suffix and suffix not in known:  # without one matplotlib adds that of its default
        raise InputError(f"--plot {path} cannot be written: {suffix!r} is not one of the formats {', '.join(known)}.")


def plot(done: Sequence[Measured], path: Path, title: str) -> None:
    """Draw time per step with its floor, and the rows of the last stage from step to step.

    Raises:
        InputError: as `check_plot`, or the file cannot be written.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.5 * len(done) + 3.5), layout="constrained")
    labels = [m.label for m in done]
    if all(m.profile is not None for m in done):
        at = [0.0] * len(done)
        for group in dict.fromkeys(g for m in done for g in (m.profile.groups if m.profile else ())):
            widths = [m.profile.groups.get(group, 0.0) if m.profile else 0.0 for m in done]
            left.barh(labels, widths, left=at, label=group)
            at = [a + w for a, w in zip(at, widths, strict=True)]
    else:
        left.barh(labels, [1e3 * m.step for m in done], color="tab:blue", label="measured")
    for y, m in enumerate(done):
        floor = 1e3 * m.floor.total
        left.plot([floor, floor], [y - 0.45, y + 0.45], color="black", label="floor" if y == 0 else None)
    left.set(xlabel="ms per step")
    left.invert_yaxis()
    left.legend(fontsize="small")
    for m in done:
        right.plot([c.rows[-1] for c in m.counts], label=m.label)
    right.set(xlabel="step", ylabel="rows of the last stage", ylim=(0, None))
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {path} cannot be written: {error}.") from None
    finally:
        plt.close(figure)
