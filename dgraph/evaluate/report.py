"""Scores as tables and as plots: quality against rows per token, salient rows by layer and step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgraph.bench.report import Table, check_plot, number
from dgraph.errors import InputError
from dgraph.evaluate.judge import NGRAM
from dgraph.evaluate.paired import Difference
from dgraph.evaluate.questions import Question
from dgraph.evaluate.run import Evaluation
from dgraph.evaluate.salience import Salience
from dgraph.evaluate.scores import Score, wilson

QUALITY = "EM % (95 %)"
JUDGED = ("arm", "judged", "NLL/token", "perplexity", f"repeated {NGRAM}-grams %", "tokens")
"""Titles: NLL in nats per token of the judge; tokens of a response, by the tokenizer of the model that wrote it."""
PAIRED = ("against", "n", "EM points (95 %)", "right only here, there", "p", "NLL/token (95 %)", "repeated (95 %)")
"""Titles of differences: an arm's figure less that of the other arm, on the same prompts.

p: exact McNemar test, for one comparison; repeated: in points.
"""
SALIENT = "salient rows, % of a sparse step"
RUN = "rows that a layer ran on, per token"
PARTS = 4
"""Number of layers after the first, and of ranges of steps, for which a table shows the salient rows."""
TITLES = ("arm", "n", QUALITY, "steps", "tok/step", "rows/tok", "same %", "same tok %")
"""Titles. n: prompts; same: prompts with the same response as the arm of comparison; same tok: equal tokens."""


def percent(share: float | None) -> str:
    """A share in per cent with one decimal, which is left out if it is 0; "n/a" without a value."""
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


def judged_table(evaluation: Evaluation) -> Table:
    """The judge's figures of each arm, with repetition and length.

    With several tasks there is a row for each, since a dialogue and a sum read quite differently. Without a judge there
    are no rows.
    """
    tasks: list[tuple[str, ...]] = [(task,) for task in evaluation.tasks] if len(evaluation.tasks) > 1 else [()]
    rows: list[tuple[str, ...]] = []
    for arm, task in itertools.product(evaluation.arms if evaluation.judge is not None else (), tasks):
        score = evaluation.score(arm, *task)
        if score.prompts:
            nll = (score.nll_per_token, score.perplexity)
            cells = (*("n/a" if x is None else f"{x:.3f}" for x in nll), percent(score.repetition))
            rows.append((arm.label, *task, str(score.judged), *cells, number(score.tokens_per_response)))
    return (JUDGED if tasks == [()] else (JUDGED[0], "task", *JUDGED[1:])), rows


def paired_table(evaluation: Evaluation) -> Table:
    """Differences of each arm to the one that it is compared with; the title gives the number of comparisons."""
    rows: list[tuple[str, ...]] = []
    for arm in evaluation.arms:
        paired, reference = evaluation.paired(arm), evaluation.references.get(arm)
        if paired is None or reference is None:
            continue
        right = paired.accuracy
        marks = ("n/a",) * 3
        if right is not None:
            marks = (signed(right.difference(), 100, 1), f"{right.mine}, {right.other}", f"{right.p:.2g}")
        read = (signed(paired.nll, 1, 3), signed(paired.repetition, 100, 1))
        rows.append((arm.label, reference.recipe.name, str(paired.prompts), *marks, *read))
    return (f"difference ({evaluation.comparisons} compared)", *PAIRED), rows


def signed(found: Difference | None, scale: float, digits: int, missing: str = "n/a") -> str:
    """A difference and its interval with signs; `missing` for None."""
    if found is None:
        return missing
    value, low, high = (f"{scale * x:+.{digits}f}" for x in (found.value, found.low, found.high))
    return f"{value} ({low} to {high})"


def tasks_table(evaluation: Evaluation) -> Table:
    """Exact match with its interval by arm and task; no rows unless several tasks have answers."""
    tasks = [t for t in evaluation.tasks if any(q.task == t and q.answer is not None for q in evaluation.questions)]
    rows: list[tuple[str, ...]] = []
    for arm in evaluation.arms if len(tasks) > 1 else ():
        scores = [evaluation.score(arm, task) for task in tasks]
        if any(score.prompts for score in scores):
            rows.append((arm.label, *map(quality, scores)))
    return (QUALITY, *tasks), rows


def salience_table(evaluation: Evaluation) -> Table:
    """Mean share of salient rows in sparse steps by arm: over all, at quarters of the layers, at quarters of the steps.

    There are no rows if no recipe counts them. The columns are those of the DyLLM paper's Table 4.
    """
    shown = _shown(evaluation)
    found = saliences(evaluation)
    longest = max((len(salience.sparse) for _, salience in found), default=0)
    bounds = [longest * i // PARTS for i in range(PARTS + 1)]
    spans = [(first, last) for first, last in itertools.pairwise(bounds) if last > first]
    rows: list[tuple[str, ...]] = []
    for label, salience in found:
        by_layer = dict(zip(salience.layers, salience.by_layer or (), strict=False))
        cells = [salience.mean(), *map(by_layer.get, shown), *(salience.mean(*span) for span in spans)]
        rows.append((label, *map(percent, cells)))
    steps = (f"steps {first}-{last - 1}" if last - first > 1 else f"step {first}" for first, last in spans)
    return (SALIENT, "all", *(f"layer {layer}" for layer in shown), *steps), rows


def rows_table(evaluation: Evaluation) -> Table:
    """Rows that the counting layers ran on per decoded token by arm: their mean, and those at quarters of the layers.

    Full steps are included. There are no rows if no recipe counts them.
    """
    shown, rows = _shown(evaluation), []
    for arm in evaluation.arms:
        if found := evaluation.rows_run(arm):
            cells = [sum(found.values()) / len(found), *map(found.get, shown)]
            rows.append((arm.label, *("n/a" if cell is None else f"{cell:.1f}" for cell in cells)))
    return (RUN, "mean", *(f"layer {layer}" for layer in shown)), rows


def _shown(evaluation: Evaluation) -> list[int]:
    """The layers that a table shows: the first one, and the last of each quarter."""
    layers = evaluation.model.spec.layers
    return sorted({0, *(max(1, -(-layers * i // PARTS)) - 1 for i in range(1, PARTS + 1))})


def saliences(evaluation: Evaluation) -> list[tuple[str, Salience]]:
    """Labels and counts of the arms that count salient rows."""
    found = ((arm.label, evaluation.salience(arm)) for arm in evaluation.arms)
    return [(label, salience) for label, salience in found if salience is not None]


def tables(evaluation: Evaluation) -> list[Table]:
    """All tables that have rows."""
    makers = (arms_table, tasks_table, judged_table, paired_table, rows_table, salience_table)
    found = (make(evaluation) for make in makers)
    return [(titles, rows) for titles, rows in found if rows]


def lines(evaluation: Evaluation) -> dict[str, list[tuple[str, Score]]]:
    """Points of each line of a plot by its label, as (swept value, score); the value is "" for an arm without one.

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


def check(questions: Sequence[Question], path: Path) -> None:
    """Refuse a plot that cannot be drawn from the results of these questions.

    Raises:
        InputError: as `check_plot`, or no question has an answer.
    """
    check_plot(path)
    if all(question.answer is None for question in questions):
        raise InputError("--plot draws exact match, and none of these prompts has an answer; leave it out.")


def plot(evaluation: Evaluation, path: Path, title: str) -> None:
    """Draw exact match with its 95 % interval against rows per token.

    Raises:
        InputError: as `check`, or the file cannot be written.
    """
    check(evaluation.questions, path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for label, points in lines(evaluation).items():
        _draw(axis, label, [value for value, _ in points], [score for _, score in points])
    axis.set(xlabel="rows per token", ylabel="exact match, % (95 % interval)", title=title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    _save(figure, path)


def salience_path(path: Path) -> Path:
    """Path of the plot of salient rows, beside the plot at `path`."""
    return path.with_stem(f"{path.stem}-salient")


def plot_salience(evaluation: Evaluation, path: Path, title: str) -> None:
    """Draw the share of salient rows by layer and step as a heat map per arm.

    Full steps are left white. All arms share one scale. If no recipe counts salient rows, no file is written.

    Raises:
        InputError: as `check_plot`, or the file cannot be written.
    """
    found = saliences(evaluation)
    if not found:
        return
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    maps = [[_percents(s, step) for step in range(len(s.sparse))] for _, s in found]
    highest = max((x for one in maps for row in one for x in row if not math.isnan(x)), default=1.0)
    size = (9, 2.8 * len(found) + 0.6)
    figure, axes = plt.subplots(len(found), 1, figsize=size, layout="constrained", squeeze=False, sharex=True)
    for axis, (label, salience), one in zip(axes[:, 0], found, maps, strict=True):
        by_layer = list(zip(*one, strict=True))
        image = axis.imshow(by_layer, aspect="auto", origin="lower", vmin=0, vmax=highest, interpolation="nearest")
        every = -(-len(salience.layers) // 8)
        axis.set_yticks(range(0, len(salience.layers), every), list(map(str, salience.layers[::every])))
        axis.set(ylabel="layer", xlim=(-0.5, max(map(len, maps)) - 0.5))
        axis.set_title(label, fontsize="small")
    axes[-1, 0].set(xlabel="step")
    figure.colorbar(image, ax=axes[:, 0].tolist(), label="salient rows, % of those forwarded")
    figure.suptitle(title)
    _save(figure, path)


def _percents(salience: Salience, step: int) -> list[float]:
    cells = (salience.cell(step, layer) for layer in range(len(salience.layers)))
    return [math.nan if cell is None else 100 * cell for cell in cells]


def _save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

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
