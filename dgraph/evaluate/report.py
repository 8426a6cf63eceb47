"""Scores as tables and as a plot: quality against rows per token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgraph.bench.report import Table, check_plot, number
from dgraph.errors import InputError
from dgraph.evaluate.questions import Question
from dgraph.evaluate.run import Evaluation
from dgraph.evaluate.scores import Score, wilson

QUALITY = "EM % (95 %)"
TITLES = ("arm", "n", QUALITY, "steps", "tok/step", "rows/tok", "same %", "same tok %")
"""n: prompts; same: those with the same response as the arm that this one is compared with; same tok: equal tokens."""


def percent(share: float | None) -> str:
    """A share in per cent, one decimal where it has one; "n/a" without a value."""
    return "n/a" if share is None else f"{100 * share:.1f}".removesuffix(".0")


def quality(score: Score) -> str:
    """The exact match and its 95 % interval, in per cent; "n/a" without answers."""
    if not score.scored:
        return "n/a"
    low, high = wilson(score.hits, score.scored)
    return f"{percent(score.exact_match)} ({100 * low:.0f} to {100 * high:.0f})"


def arms_table(evaluation: Evaluation) -> Table:
    """A row per arm that has results, over all tasks."""
    rows: list[tuple[str, ...]] = []
    for arm in evaluation.arms:
        score = evaluation.score(arm)
        if not score.prompts:
            continue
        same = score.agreement
        shares = (None, None) if same is None else (same.identical_share, same.equal_share)
        rows.append(
            (
                arm.label,
                str(score.prompts),
                quality(score),
                number(score.steps_per_prompt),
                number(score.tokens_per_step),
                number(score.rows_per_token),
                *map(percent, shares),
            )
        )
    return TITLES, rows


def tasks_table(evaluation: Evaluation) -> Table:
    """Exact match with its interval by arm and task; no rows where there is one task."""
    tasks = [t for t in evaluation.tasks if any(q.task == t and q.answer is not None for q in evaluation.questions)]
    rows: list[tuple[str, ...]] = []
    for arm in evaluation.arms if len(tasks) > 1 else ():
        scores = [evaluation.score(arm, task) for task in tasks]
        if any(score.prompts for score in scores):
            rows.append((arm.label, *map(quality, scores)))
    return (QUALITY, *tasks), rows


def tables(evaluation: Evaluation) -> list[Table]:
    """All that have rows."""
    return [(titles, rows) for titles, rows in (arms_table(evaluation), tasks_table(evaluation)) if rows]


def lines(evaluation: Evaluation) -> dict[str, list[tuple[str, Score]]]:
    """What a plot connects: by label, points with the swept value they stand for ("" for an arm without one).

    The first option that was swept on an arm runs along its line; each value of the others has a line of its own.
    """
    found: dict[str, list[tuple[str, Score]]] = {}
    for arm in evaluation.arms:
        score = evaluation.score(arm)
        if not score.scored:
            continue
        key = next(iter(arm.swept), None)
        label = arm.label if key is None else f"{arm.line(key)}; over {key}"
        found.setdefault(label, []).append(("" if key is None else str(arm.swept[key]), score))
    return found


def check(questions: Sequence[Question]) -> None:
    """Whether a plot can be drawn of what these questions will give.

    Raises:
        InputError: matplotlib is not installed, or none of them has an answer.
    """
    check_plot()
    if all(question.answer is None for question in questions):
        raise InputError("--plot draws exact match, and none of these prompts has an answer; leave it out.")


def plot(evaluation: Evaluation, path: Path, title: str) -> None:
    """Draw exact match with its 95 % interval against rows per token.

    Raises:
        InputError: as `check`, or the file cannot be written.
    """
    check(evaluation.questions)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for label, points in lines(evaluation).items():
        _draw(axis, label, [value for value, _ in points], [score for _, score in points])
    axis.set(xlabel="rows per token", ylabel="exact match, % (95 % interval)", title=title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {path} cannot be written: {error}.") from None
    finally:
        plt.close(figure)


def _draw(axis: Any, label: str, values: Sequence[str], scores: Sequence[Score]) -> None:
    at = [score.rows_per_token for score in scores]
    shares = [100 * (score.exact_match or 0.0) for score in scores]
    bounds = [wilson(score.hits, score.scored) for score in scores]
    below = [max(0.0, share - 100 * low) for share, (low, _) in zip(shares, bounds, strict=True)]
    above = [max(0.0, 100 * high - share) for share, (_, high) in zip(shares, bounds, strict=True)]
    axis.errorbar(at, shares, yerr=(below, above), marker="o", capsize=3, label=label)
    for x, y, value in zip(at, shares, values, strict=True):
        if value:
            axis.annotate(value, (x, y), textcoords="offset points", xytext=(5, 5), fontsize="small")
