"""Measured costs of recipes: costs.json, which installs with the package."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Cost:
    """Cost of a recipe's defaults against `dense` under the same rule, from a table of benchmarks/results.

    Attributes:
        model, tasks, prompts: the model, tasks and number of prompts on which it was measured.
        points: exact match in percentage points, below 0 where it loses answers.
        within: the 95 % interval of these; None where no paired one was measured.
        steps: steps as a multiple of those of dense; None if they were not measured.
        page: name of the page in benchmarks/results, without its ending.
        hardware: the machine on which it was measured.
        commit: commit of this repository that has the figure.
        date: day of the measurement, as "2026-11-21".
    """

    model: str
    tasks: str
    prompts: int
    points: float
    within: tuple[float, float] | None
    steps: float | None
    page: str
    hardware: str = ""
    commit: str = ""
    date: str = ""

    def __str__(self) -> str:
        within = "" if self.within is None else f" ({self.within[0]:+.1f} to {self.within[1]:+.1f})"
        steps = "" if self.steps is None else f", {self.steps:g} x the steps"
        return f"{self.points:+.1f} points{within}{steps}: {self.model}, {self.prompts} prompts of {self.tasks}"


def measured(recipe: str) -> tuple[Cost, ...]:
    """Costs of one of dgraph's own recipes, table by table; empty if none was measured."""
    return _costs().get(recipe, ())


@functools.cache
def _costs() -> dict[str, tuple[Cost, ...]]:
    found = json.loads(files("dgraph.recipes").joinpath("costs.json").read_text(encoding="utf-8"))
    return {recipe: tuple(map(_cost, costs)) for recipe, costs in found.items()}


def _cost(value: dict[str, object]) -> Cost:
    within = value["within"]
    return Cost(**{**value, "within": tuple(within) if isinstance(within, list) else None})  # type: ignore[arg-type]
