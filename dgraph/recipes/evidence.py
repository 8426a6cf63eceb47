"""Measured speed of recipes by setting: evidence.json, excerpts of benchmarks/results/records that install with dgraph.

Each excerpt names its record and cells; tests/recipes/test_evidence.py holds them to these.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from dgraph.recipes.costs import Cost, measured


@dataclass(frozen=True)
class Measured:
    """One arm of a measured table.

    Attributes:
        attention: of its model; see `ModelSpec`.
        device: kind of device, "cuda" or "cpu".
        sequences: decoded at a time.
        prompt: tokens of a prompt; None where they differ.
        recipe: of the arm.
        against: the arm of the table that has the speed 1.
        speed: as a multiple of that; None where no time was measured.
        rows_per_token: rows that pass the last layers for a decoded token; None where they were not counted.
        work: the model, and its text.
        record: name of the record in benchmarks/results/records.
        row, over, speed_column, rows_column: its cells; `over` is the row by which a speed is divided.
        hardware, commit, date: of the measurement.
    """

    attention: str
    device: str
    sequences: int
    prompt: int | None
    recipe: str
    against: str
    speed: float | None
    rows_per_token: float | None
    work: str
    record: str
    row: int
    over: int | None
    speed_column: str | None
    rows_column: str | None
    hardware: str
    commit: str
    date: str

    @property
    def setting(self) -> str:
        """Sequences and prompt, as text."""
        prompt = "" if self.prompt is None else f", prompts of {self.prompt}"
        return f"{self.sequences} at a time{prompt}"

    @property
    def page(self) -> str:
        """The page of results that has the record."""
        return f"benchmarks/results/{self.record.partition('/')[0]}.md"

    def better(self) -> float:
        """A number that is larger for the better arm of one table."""
        return self.speed if self.speed is not None else 1 / (self.rows_per_token or math.inf)

    def distance(self, sequences: int, prompt: int) -> float:
        """Doublings between its setting and another."""
        far = 0.0 if self.prompt is None else abs(math.log2(prompt / self.prompt))
        return far + abs(math.log2(sequences / self.sequences))


@dataclass(frozen=True)
class FormatCost:
    """Cost of a weight format: the NLL per token of responses under a judge, times that of weights as they are.

    Attributes:
        format: of weights, as `--weights` takes it.
        cell: the ratio and its 95 % interval.
        record, row, column: its place in benchmarks/results/records.
        hardware, commit, date: of the measurement.
    """

    format: str
    cell: str
    record: str
    row: int
    column: str
    hardware: str
    commit: str
    date: str


def nearest(
    attention: str, device: str, sequences: int, prompt: int, recipes: Collection[str] | None = None
) -> list[Measured]:
    """The arms of the table whose setting is nearest to one, best first; none where nothing was measured.

    Args:
        attention, device: as of `Measured`.
        sequences, prompt: the setting.
        recipes: that may be among them; None for all.
    """
    found = [m for m in speeds() if (m.attention, m.device) == (attention, device)]
    if not found:
        return []
    first = min(found, key=lambda m: m.distance(sequences, prompt))
    table = [m for m in found if (m.record, m.sequences, m.prompt) == (first.record, first.sequences, first.prompt)]
    return sorted((m for m in table if recipes is None or m.recipe in recipes), key=Measured.better, reverse=True)


def costs_of(recipe: str) -> list[Cost]:
    """Measured costs of a recipe, or of the parts of a combination."""
    return [cost for part in recipe.split("+") for cost in measured(part)]


def losses(recipe: str) -> Sequence[Cost]:
    """Costs whose whole interval lies below 0."""
    return [cost for cost in costs_of(recipe) if cost.within is not None and cost.within[1] < 0]


@functools.cache
def speeds() -> tuple[Measured, ...]:
    """All arms."""
    return tuple(Measured(**value) for value in _read()["recipes"])


@functools.cache
def formats() -> dict[str, FormatCost]:
    """Costs of weight formats, by their names."""
    return {value["format"]: FormatCost(**value) for value in _read()["formats"]}


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("dgraph.recipes").joinpath("evidence.json").read_text(encoding="utf-8"))
    return found
