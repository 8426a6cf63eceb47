"""The simulator against loads that an H200 has served."""

from __future__ import annotations

from pathlib import Path

from benchmarks.simulated import COLUMNS, FIGURES, TRACE, compared, loads
from dgraph.bench.traces import read_trace

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
NOT_PREDICTED = ("LLaDA-8B under `fast_dllm`: scheduling policies at 0.9 of the capacity", "static")
"""Its engine recorded CUDA graphs while it served."""


def test_measured_loads_are_predicted_within_a_fifth() -> None:
    rows = [row for load in loads(read_trace(TRACES / TRACE)) for row in compared(load)]
    first = COLUMNS.index("tok/s, ratio")
    ratios = {(row[0], row[1], place): row[first:] for place, row in enumerate(rows)}
    assert len(ratios) == 11
    for (title, scheduler, _), found in ratios.items():
        known = [ratio for ratio in found if isinstance(ratio, float)]
        assert len(found) == len(FIGURES)
        assert len(known) >= 2
        if (title, scheduler) != NOT_PREDICTED:
            assert all(0.8 < ratio < 1.2 for ratio in known), (title, scheduler, known)
