"""Distributions of decodes as tables and as a plot; see `dgraph.evaluate.distributions`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dgraph.bench.report import Table, check_plot, number
from dgraph.errors import InputError
from dgraph.evaluate.distributions import COSINES, KINDS, SIGMAS, Distributions

SPANS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, None))
"""Ranges of tokens per step of a table's columns."""
SHOWN_COSINES = (0.9, 0.95, 0.99, 0.995, 0.999)
SHOWN_SIGMAS = (-2.0, -1.0, 0.0, 1.0, 2.0)

Found = Mapping[str, Distributions]


def tables(found: Found) -> list[Table]:
    """All tables that have rows."""
    made = (make(found) for make in (steps_table, importance_table, delta_table, cosine_table))
    return [(titles, rows) for titles, rows in made if rows]


def steps_table(found: Found) -> Table:
    """Share of steps by the tokens that they decode (FOCUS, Figure 2)."""
    rows: list[tuple[str, ...]] = []
    for label, one in found.items():
        steps = sum(one.committed.values())
        if steps:
            shares = [_between(one, first, last) / steps for first, last in ((0, 0), *SPANS)]
            rows.append((label, str(steps), number(one.tokens_per_step), *map(_percent, shares)))
    spans = ("0", *(f"{a}+" if b is None else str(a) if a == b else f"{a}-{b}" for a, b in SPANS))
    return ("tokens of a step, % of steps", "steps", "mean", *spans), rows


def importance_table(found: Found) -> Table:
    """Mean importance by layer and kind of row, as a multiple of an equal share (FOCUS, Figure 3)."""
    rows = [
        (label, str(layer), *(number(x) for x in (*whole, *masked[1:])))
        for label, one in _probed(found)
        for layer, (whole, masked) in enumerate(zip(one.means(one.block), one.means(one.candidates), strict=True))
        if any(x is not None for x in whole)
    ]
    block, masks = (tuple(f"{kind}, {among}" for kind in KINDS) for among in ("block", "masks"))
    return ("importance (1: equal share)", "layer", *block, *masks[1:]), rows


def delta_table(found: Found) -> Table:
    """Share of rows by the importance delta in standard deviations of its step (FOCUS, Figure 14 and appendix D)."""
    rows: list[tuple[str, ...]] = []
    for label, one in _probed(found):
        gamma, missed, bound = (number(x) for x in one.signal() or (None,) * 3)
        for kind, counts in zip(KINDS[1:], one.delta[1:].tolist(), strict=True):
            if total := sum(counts):
                places = [0, *(SIGMAS.index(edge) + 1 for edge in SHOWN_SIGMAS), len(counts)]
                shares = [sum(counts[a:b]) / total for a, b in itertools.pairwise(places)]
                signal = (gamma, missed, bound) if kind == "decodable" else ("",) * 3
                rows.append((label, kind, str(total), *map(_percent, shares), *signal))
    edges = [f"{edge:+g}" for edge in SHOWN_SIGMAS]
    bins = (f"< {edges[0]}", *(f"{a} to {b}" for a, b in itertools.pairwise(edges)), f"> {edges[-1]}")
    return ("delta in sigma, % of rows", "kind", "rows", *bins, "gamma", "P_err", "bound D.1"), rows


def cosine_table(found: Found) -> Table:
    """Rows whose context has turned since the step before, by layer (DyLLM, Figure 2)."""
    rows: list[tuple[str, ...]] = []
    for label, one in _probed(found):
        shares = [one.below(edge) for edge in SHOWN_COSINES]
        for layer, mean in enumerate(one.cosine_means()):
            if mean is not None:
                rows.append((label, str(layer), f"{mean:.4f}", *(_percent(share[layer]) for share in shares)))
    return ("cosine of contexts, % of rows", "layer", "mean", *(f"< {edge}" for edge in SHOWN_COSINES)), rows


def can_plot(path: Path) -> bool:
    """True if matplotlib is there, and draws files of the path's suffix."""
    try:
        check_plot(path)
    except InputError:
        return False
    return True


def plot(found: Found, path: Path, title: str) -> None:
    """Draw a row of panels for each arm.

    Raises:
        InputError: as `check_plot`, or the file cannot be written.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (17, 3.6 * max(1, len(found)) + 0.5)
    figure, axes = plt.subplots(max(1, len(found)), 4, figsize=size, layout="constrained", squeeze=False)
    for row, (label, one) in zip(axes, found.items(), strict=False):
        _draw_steps(row[0], one)
        row[0].set_title(label, fontsize="small")
        if one.probed:
            _draw_importance(row[1], one)
            _draw_delta(row[2], one)
            _draw_cosine(row[3], one)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be written: {error}.") from None
    finally:
        plt.close(figure)


def _draw_steps(axis: Any, one: Distributions) -> None:
    steps = sum(one.committed.values()) or 1
    axis.bar(list(one.committed), [100 * n / steps for n in one.committed.values()])
    axis.set(xlabel="tokens decoded in a step", ylabel="% of steps")


def _draw_importance(axis: Any, one: Distributions) -> None:
    for place, kind in enumerate(KINDS):
        axis.plot([_or_nan(row[place]) for row in one.means(one.block)], label=f"{kind}, of the block")
    for place, kind in list(enumerate(KINDS))[1:]:
        axis.plot([_or_nan(row[place]) for row in one.means(one.candidates)], linestyle="--", label=f"{kind}, of masks")
    axis.set(xlabel="layer", ylabel="importance (1: equal share)")
    axis.legend(fontsize="x-small")


def _draw_delta(axis: Any, one: Distributions) -> None:
    width = SIGMAS[1] - SIGMAS[0]
    centres = [SIGMAS[0] - width / 2, *(edge + width / 2 for edge in SIGMAS)]
    for kind, counts in zip(KINDS[1:], one.delta[1:].tolist(), strict=True):
        axis.step(centres, [100 * n / (sum(counts) or 1) for n in counts], where="mid", label=kind)
    axis.axvline(1.0, linestyle="--", color="grey")
    axis.set(xlabel="importance delta, in sigma of its step", ylabel="% of rows")
    axis.legend(fontsize="x-small")


def _draw_cosine(axis: Any, one: Distributions) -> None:
    for edge in COSINES[3:]:
        axis.plot([100 * _or_nan(share) for share in one.below(edge)], label=f"< {edge}")
    axis.set(xlabel="layer", ylabel="% of rows by cosine of contexts")
    axis.legend(fontsize="x-small")


def _probed(found: Found) -> Sequence[tuple[str, Distributions]]:
    return [(label, one) for label, one in found.items() if one.probed]


def _between(one: Distributions, first: int, last: int | None) -> int:
    return sum(count for n, count in one.committed.items() if n >= first and (last is None or n <= last))


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f}"


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
