"""Tables and heat maps of retrieval; see `benchmarks.needle`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import Cell, Report
from dgraph.evaluate.report import percent
from dgraph.evaluate.scores import wilson

PER_BLOCK = ("dllm_serve", "sparse_dllm")
DENSE = "dense"


@dataclass(frozen=True)
class Arm:
    """A line of the tables (`name`), and the budget on it: pairs of MaskKV, a ratio of the others, 0 for dense."""

    name: str
    budget: float
    recipe: str
    options: dict[str, Any] = field(compare=False)

    @property
    def label(self) -> str:
        """In words."""
        return self.name if self.recipe == DENSE else f"{self.name}, {self.budget:g}"


@dataclass(frozen=True)
class Score:
    """Sums over prompts.

    Attributes:
        prompts, hits: how many, and how many of them were answered rightly.
        steps, reused: steps of all of them, and those that forwarded no row of the prompt: they read kept keys.
        tokens, late: tokens of their responses, and those that such steps committed.
    """

    prompts: int = 0
    hits: int = 0
    steps: int = 0
    reused: int = 0
    tokens: int = 0
    late: int = 0

    @classmethod
    def of(cls, scores: Iterable[Score]) -> Score:
        """All of them together."""
        sums = [0] * 6
        for s in scores:
            sums = [a + b for a, b in zip(sums, (s.prompts, s.hits, s.steps, s.reused, s.tokens, s.late), strict=True)]
        return cls(*sums)

    def __str__(self) -> str:
        low, high = wilson(self.hits, self.prompts)
        return f"{percent(self.hits / self.prompts)} ({100 * low:.0f} to {100 * high:.0f})" if self.prompts else "n/a"


Scores = dict[tuple[int, float], Score]
"""By length and depth."""


def cells_of(found: dict[Arm, Scores]) -> list[dict[str, Any]]:
    """Plain values of every cell."""
    return [
        {"arm": arm.name, "budget": arm.budget, **arm.options, "length": length, "depth": depth, **vars(score)}
        for arm, scores in found.items()
        for (length, depth), score in scores.items()
    ]


def lines(found: dict[Arm, Scores], per_block: bool) -> dict[str, list[Arm]]:
    """The arms of one kind by line, each with its budgets in order; without the dense one."""
    grouped: dict[str, list[Arm]] = {}
    for arm in found:
        if arm.recipe != DENSE and (arm.recipe in PER_BLOCK) == per_block:
            grouped.setdefault(arm.name, []).append(arm)
    return grouped


def tables(report: Report, found: dict[Arm, Scores], grid: dict[bool, float], skipped: dict[str, str]) -> None:
    """All tables; grid: the budget whose cells are shown, by whether it is that of a method per block (a ratio)."""
    dense = [scores for arm, scores in found.items() if arm.recipe == DENSE]
    for per_block, unit in ((False, "pairs"), (True, "ratio")):
        grouped = lines(found, per_block)
        budgets = sorted({arm.budget for arms in grouped.values() for arm in arms})
        if not budgets:
            continue
        rows: list[list[Cell]] = [[DENSE, *(str(Score.of(s.values())) for _ in budgets)] for s in dense]
        for name, arms in grouped.items():
            by_budget = {arm.budget: str(Score.of(found[arm].values())) for arm in arms}
            rows.append([name, *(by_budget.get(budget, "n/a") for budget in budgets)])
        note = " ".join(f"{name} was left out: {why}" for name, why in skipped.items())
        title = f"Exact match, % (95 %), over all lengths and depths, by {unit} kept"
        report.table(title, [unit, *(f"{b:g}" for b in budgets)], rows, "" if per_block else note)
        _by_length(report, grouped, found, unit)
        _grid(report, [arm for arms in grouped.values() for arm in arms if arm.budget == grid[per_block]], found)
    _reuse(report, found)


def _by_length(report: Report, grouped: dict[str, list[Arm]], found: dict[Arm, Scores], unit: str) -> None:
    rows: list[list[Cell]] = []
    lengths = sorted({length for arms in grouped.values() for arm in arms for length, _ in found[arm]})
    budgets = sorted({arm.budget for arms in grouped.values() for arm in arms})
    for name, arms in grouped.items():
        by_budget = {arm.budget: found[arm] for arm in arms}
        for length in lengths:
            cells = (_share(by_budget.get(b, {}), lambda n, d, length=length: n == length) for b in budgets)
            rows.append([f"{name}, {length} tokens", *cells])
    report.table(f"Exact match, %, by length and {unit} kept", [unit, *(f"{b:g}" for b in budgets)], rows)


def _grid(report: Report, arms: Sequence[Arm], found: dict[Arm, Scores]) -> None:
    if not arms:
        return
    cells = [cell for arm in arms for cell in found[arm]]
    lengths, depths = sorted({n for n, _ in cells}), sorted({d for _, d in cells})
    rows: list[list[Cell]] = [
        [f"{arm.label}, {n} tokens", *(_share(found[arm], lambda a, b, n=n, d=d: (a, b) == (n, d)) for d in depths)]
        for arm in arms
        for n in lengths
    ]
    report.table("Exact match, %, by length and depth", ["depth", *(f"{d:g}" for d in depths)], rows)


def _reuse(report: Report, found: dict[Arm, Scores]) -> None:
    rows: list[list[Cell]] = []
    by_name: dict[str, list[Score]] = {}
    for arm, scores in found.items():
        by_name.setdefault(arm.name, []).extend(scores.values())
    for name, of in by_name.items():
        s = Score.of(of)
        shares = (s.reused / s.steps, s.late / s.tokens if s.tokens else None)
        rows.append([name, s.steps / s.prompts, *map(percent, shares)])
    title = "Steps that read kept keys, and tokens of responses that they committed"
    report.table(title, ["arm", "steps per prompt", "such steps, %", "such tokens, %"], rows)


def _share(scores: Scores, where: Callable[..., bool]) -> str:
    s = Score.of(score for cell, score in scores.items() if where(*cell))
    return percent(s.hits / s.prompts) if s.prompts else "n/a"


def plot(found: dict[Arm, Scores], grid: dict[bool, float], path: Path, title: str) -> None:
    """Draw a column per line: depth against length at the budget of `grid` above, depth against budget below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = [(kind, name, arms) for kind in (False, True) for name, arms in lines(found, kind).items()]
    size = (2.1 * len(columns) + 1, 5.4)
    figure, axes = plt.subplots(2, len(columns), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for (above, below), (per_block, name, arms) in zip(axes.T, columns, strict=True):
        unit = "ratio" if per_block else "pairs"
        chosen = [arm for arm in arms if arm.budget == grid[per_block]]
        above.set_title(f"{name}\n{unit} {grid[per_block]:g}", fontsize="small")
        if chosen:
            scores = found[chosen[0]]
            _draw(above, scores, sorted({n for n, _ in scores}), lambda n, scores=scores: {n: scores})
            above.set(xlabel="tokens")
        by_budget = {arm.budget: found[arm] for arm in arms}
        image = _draw(below, found[arms[0]], sorted(by_budget), lambda b, of=by_budget: {None: of[b]})
        below.set(xlabel=f"{unit}, all lengths")
    for axis in axes[:, 0]:
        axis.set(ylabel="depth")
    figure.colorbar(image, ax=axes.ravel().tolist(), label="exact match, %")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _draw(axis: Any, cells: Scores, ticks: Sequence[float], choose: Callable[..., dict[Any, Scores]]) -> Any:
    """A heat map of depth against ticks; choose: of a tick, scores by their length, None for all lengths."""
    depths = sorted({d for _, d in cells})
    shares = torch.zeros(len(depths), len(ticks))
    for column, tick in enumerate(ticks):
        for length, scores in choose(tick).items():
            for row, depth in enumerate(depths):
                s = Score.of(v for (n, d), v in scores.items() if d == depth and length in (None, n))
                shares[row, column] = 100 * s.hits / s.prompts
    axis.set_xticks(range(len(ticks)), [f"{t:g}" for t in ticks], fontsize="x-small")
    axis.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
    return axis.imshow(shares.numpy(), aspect="auto", cmap="RdYlGn", vmin=0, vmax=100, interpolation="nearest")
