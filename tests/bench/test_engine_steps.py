"""benchmarks.engine_steps: how long kernels ran, and where none did."""

from __future__ import annotations

import pytest

from benchmarks.engine_steps import waits_between


def test_waits_are_what_no_kernel_covers() -> None:
    apart = [(100.0 * i, 100.0 * i + 60.0, "ab"[i % 2]) for i in range(8)]
    beside = [(20.0, 50.0, "within"), (0.0, 60.0, "alike")]
    assert waits_between(apart[::-1] + beside).busy == pytest.approx(8 * 60e-6)
    waits = waits_between(apart)  # the middle half is of kernels 2 to 5
    assert waits.share == pytest.approx(3 * 40 / 360)
    assert waits.between == [("a", "b", 2, 80.0), ("b", "a", 1, 40.0)]
