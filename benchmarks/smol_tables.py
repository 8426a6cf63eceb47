"""Tables of benchmarks/results/smol.md from files of `dgraph eval --out`: every arm against `dense`, prompt by prompt.

    python -m benchmarks.smol_tables OUT.jsonl... --model smol_sdar --judge base

An arm is compared with `dense` under its rule, over the prompts that both answered; `dense` under another rule, and an
arm whose rule `dense` was not run under, with `dense` at a threshold of 0.9 (or --against). Intervals and tests are of
`dgraph eval`: Wilson's for a share, Newcombe's for a difference of shares, prompts drawn anew for NLL and repetition,
McNemar's exact test. Arms may be of several commands, and of commands that were cut.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.tables import markdown_of
from dgraph.evaluate.judge import Judge, Judged
from dgraph.evaluate.paired import Paired
from dgraph.evaluate.questions import Question, stored
from dgraph.evaluate.report import percent, signed
from dgraph.evaluate.results import Result, Store, digest_of
from dgraph.evaluate.salience import Salience
from dgraph.evaluate.scores import Score, wilson
from dgraph.evaluate.tasks import TASKS, questions_of
from dgraph.families.causal import load_causal

STANDARD = "dense; threshold=0.9"
RIGHT = ("right", "of", "% (95 %)", "points to dense (95 %)", "right only here, there", "p")
READ = ("n", "NLL/token", "to dense (95 %)", "repeated, %", "points to dense (95 %)")
COSTS = ("tokens/step", "steps to dense", "rows/token", "rows/step", "tokens", "salient rows, %")


@dataclass
class Files:
    """What files of `dgraph eval --out` hold: results by task, arm and prompt, and what a judge made of them."""

    paths: Sequence[Path]
    judge: Judge | None = None
    results: dict[str, dict[str, dict[str, Result]]] = field(default_factory=dict)
    stores: list[Store] = field(default_factory=list)

    def __post_init__(self) -> None:
        for path in self.paths:
            self.stores.append(Store(path))
            for line in path.read_text("utf-8").splitlines():
                value = json.loads(line)
                if "arm" in value:
                    result = Result.from_json(value)
                    arms = self.results.setdefault(result.task, {})
                    arms.setdefault(result.arm, {}).setdefault(result.prompt, result)

    def judged(self, result: Result) -> Judged | None:
        """What the judge made of a response."""
        if self.judge is None:
            return None
        key = self.judge.key(result.prompt, result.text)
        return next((found for store in self.stores if (found := store.judged(key)) is not None), None)

    def salient(self, results: Iterable[Result]) -> str:
        """Share of rows that a sparse step computes, in per cent; "" of a recipe that counts none."""
        keys = [result.key for result in results]
        found = Salience.of([record for store in self.stores for record in store.counted(keys)])
        return "" if found is None else percent(found.mean())


class Line:
    """An arm on one or more tasks, with the arm that it is compared with."""

    def __init__(
        self, label: str, arms: dict[str, dict[str, Result]], asked: dict[str, Question], files: Files, to: str
    ):
        self.label = label
        self.mine = arms[label]
        rule = label.partition("; ")[2]
        same = f"dense; {rule}"
        self.other = same if same in arms and same != label else to if to in arms and to != label else None
        self.score = Score.of([(asked[p], r) for p, r in self.mine.items()], judged=files.judged)
        self.paired: Paired | None = None
        self.steps = 1.0
        if self.other is not None:
            both = [(asked[p], r, arms[self.other][p]) for p, r in self.mine.items() if p in arms[self.other]]
            self.paired = Paired.of(both, files.judged)
            self.steps = sum(a.steps for _, a, _ in both) / max(sum(b.steps for *_, b in both), 1)
        self.salient = files.salient(self.mine.values())

    def right(self) -> list[str]:
        """Cells of `RIGHT`."""
        hits, count = self.score.hits, self.score.scored
        low, high = wilson(hits, count)
        cells = [str(hits), str(count), f"{100 * hits / count:.2f} ({100 * low:.1f} to {100 * high:.1f})"]
        if self.paired is None or self.paired.accuracy is None:
            return [*cells, "", "", ""]
        found = self.paired.accuracy
        return [*cells, signed(found.difference(), 100, 1, ""), f"{found.mine}, {found.other}", f"{found.p:.2g}"]

    def read(self) -> list[str]:
        """Cells of `READ`."""
        nll = "" if self.score.nll_per_token is None else f"{self.score.nll_per_token:.3f}"
        to = [None, None] if self.paired is None else [self.paired.nll, self.paired.repetition]
        repeated = percent(self.score.repetition)
        return [str(self.score.prompts), nll, signed(to[0], 1, 2, ""), repeated, signed(to[1], 100, 1, "")]

    def costs(self) -> list[str]:
        """Cells of `COSTS`."""
        score = self.score
        figures = (score.tokens_per_step, self.steps), (score.rows_per_token, score.rows / score.steps)
        cells = [f"{x:.2f}" for x in figures[0]] + [f"{x:.1f}" for x in figures[1]]
        return [*cells, f"{score.tokens_per_response:.0f}", self.salient]


def order(label: str) -> tuple[bool, str, str]:
    """`dense` first, then by recipe; at a falling threshold."""
    recipe, _, rule = label.partition("; ")
    number = rule.removeprefix("threshold=")
    return recipe.split(",")[0] != "dense", recipe, rule if number == rule else f" {1 - float(number):.3f}"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is of words; columns that say nothing are left out."""
    rows = [list(row) for row in rows]
    kept = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    return "\n".join(markdown_of([titles[i] for i in kept], [[row[i] for i in kept] for row in rows]))


def lines_of(files: Files, tasks: Sequence[str], asked: dict[str, Question], against: str = STANDARD) -> list[Line]:
    """Every arm on some tasks together; one that has not run on all of them counts where it has."""
    arms: dict[str, dict[str, Result]] = {}
    for task in tasks:
        for label, found in files.results.get(task, {}).items():
            arms.setdefault(label, {}).update(found)
    return [Line(label, arms, asked, files, against) for label in sorted(arms, key=order)]


def table(lines: Sequence[Line]) -> str:
    """The table of a task, and how many comparisons it makes."""
    open_text = not any(line.score.scored for line in lines)
    cells: Callable[[Line], list[str]] = Line.read if open_text else Line.right
    titles = ("recipe; rule", *(READ if open_text else RIGHT), *COSTS)
    text = markdown(titles, [[f"`{line.label}`", *cells(line), *line.costs()] for line in lines])
    return f"{text}\n\n{sum(line.paired is not None for line in lines)} comparisons."


def main() -> None:
    """Parse the command line, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="of `dgraph eval --out`, all of one model")
    parser.add_argument("--model", default="smol_sdar", help="an embedded model, whose stored prompts were asked")
    parser.add_argument("--judge", help="whose judgements the files hold, as for `dgraph eval`; loaded on the CPU")
    parser.add_argument("--against", default=STANDARD, help="the arm for those without a `dense` under their rule")
    args = parser.parse_args()
    judge = None
    if args.judge is not None:
        causal = load_causal(args.judge)
        judge = Judge(causal, digest_of(type(causal.module).__name__, causal.files))
    files = Files(args.files, judge)
    asked = {q.prompt: q for q in stored(args.model)} | {q.prompt: q for name in TASKS for q in questions_of(name)}
    several = {"svamp, mawps": ["svamp", "mawps"], "bbh": [name for name in TASKS if name.startswith("bbh/")]}
    for title, tasks in {**{name: [name] for name in files.results}, **several}.items():
        if all(task in files.results for task in tasks):
            print(f"## {args.model}: {title}\n\n{table(lines_of(files, tasks, asked, args.against))}\n")


if __name__ == "__main__":
    main()
