"""The simulator against loads that an H200 has served."""

from __future__ import annotations

from pathlib import Path

from benchmarks.simulated import COLUMNS, FIGURES, TRACE, compared, loads
from dgraph.bench.traces import read_trace

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
NOT_PREDICTED = ["fast_dllm, 0.9 of capacity", "static"]
"""Its engine recorded CUDA graphs while it served."""


def test_measured_loads_are_predicted_within_a_fifth() -> None:
    rows = [row for load in loads(read_trace(TRACES / TRACE)) for row in compared(load)]
    assert len(rows) == 11
    assert all(len(row) == len(COLUMNS) for row in rows)
    for row in rows:
        known = [ratio for ratio in row[-len(FIGURES) :] if isinstance(ratio, float)]
        assert len(known) >= 2
        if row[:2] != NOT_PREDICTED:
            assert all(0.8 < ratio < 1.2 for ratio in known), row
