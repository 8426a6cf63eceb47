"""Time calls on a GPU, and a kernel under a tiling."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import LoweringError
from dgraph.ops import OPS, counters
from dgraph.ops.tuning import Shape

WARM_REPLAYS = 3
"""Replays before those that count."""
RUNS = 9
"""Replays that count, of a kernel under a tiling."""


def graph_seconds(calls: Sequence[Callable[[], Any]], runs: int, settle: float = 0.0) -> float:
    """Seconds of one call on a GPU, from a CUDA graph of all calls in a row: the median over replays.

    settle: seconds of replays before those that count. A card lowers its clocks after some tenths of a second of load;
    so a call that is compared with a long run must have run as long.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which makes the inputs of the calls
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), counters.shared():
        for call in calls:
            call()
    warm = _replay_seconds(graph, WARM_REPLAYS)
    for _ in range(int(settle / max(min(warm), 1e-6))):
        graph.replay()
    return statistics.median(_replay_seconds(graph, runs)) / len(calls)


def _replay_seconds(graph: torch.cuda.CUDAGraph, runs: int) -> list[float]:
    """Seconds of each of several replays, issued one after the other."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    return [1e-3 * begin.elapsed_time(end) for begin, end in pairwise(marks)]


def tiling_seconds(op: str, shape: Shape, device: torch.device) -> Callable[[Any], float]:
    """A function that times tilings of a kernel on random values of a shape.

    It takes a tiling and returns the seconds of a call: the geometric mean over amounts of live data. The other tilings
    must give the results of the first, up to rounding.

    Raises, when called:
        LoweringError: a tiling computes something else.
        Exception: any error of the compiler or the device for a tiling that does not fit.
    """
    trial = OPS[op].tunable.trial(shape, device)
    expected: list[Tensor] = []

    def seconds(tiling: Any) -> float:
        with torch.cuda.device(device):
            trial.reset()
            found = [value.clone() for load in trial.loads for value in _flat(load[0](tiling))]
            if expected:
                check_equal(found, expected)
            else:
                expected.extend(found)
            times = [graph_seconds([partial(call, tiling) for call in load], RUNS) for load in trial.loads]
        return statistics.geometric_mean(times)

    return seconds


def check_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Check that results under two tilings agree up to rounding.

    Raises:
        LoweringError: floats differ by more than 2 % (fp32: 0.1 %) of their norm, or more than 1 % of the integers
            differ. Some integers may differ, since a decision may lie on its threshold.
    """
    for got, want in zip(found, expected, strict=True):
        if want.is_floating_point():
            apart = float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30))
            most = 1e-3 if want.dtype == torch.float32 else 2e-2
        else:
            apart, most = float((got != want).float().mean()), 1e-2
        if not apart <= most:  # NaN is no agreement either
            raise LoweringError(f"its result is {apart:.1e} away from that of the default tiling, expected {most:.0e}.")


def _flat(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)
