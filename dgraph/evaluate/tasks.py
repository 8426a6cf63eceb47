"""Tasks whose problems are installed with dgraph, for every model that reads English; see data/README.md."""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass
from pathlib import Path

from dgraph.errors import UnknownName
from dgraph.evaluate.questions import Question, parse_questions

FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Task:
    """Instruction and comparison of a task's problems.

    Attributes:
        compare: comparison of a response with the answer, a name of `dgraph.evaluate.comparisons.COMPARISONS`.
        ask: instruction after each problem, on a line of its own; "" for none.
        new_tokens: default length limit of a response.
    """

    compare: str
    ask: str
    new_tokens: int = 256


_STEPS = 'Think step by step, and end with "#### " and'
_SUM = Task("number", f"{_STEPS} the number.")
_VERDICT = f"{_STEPS} Yes or No."

TASKS: dict[str, Task] = {
    "gsm8k": _SUM,
    "svamp": _SUM,
    "mawps": _SUM,
    "bbh/boolean_expressions": Task("verdict", f"{_STEPS} True or False."),
    "bbh/date_understanding": Task("option", f"{_STEPS} the letter of the right option, as (A)."),
    "bbh/multistep_arithmetic_two": _SUM,
    "bbh/navigate": Task("verdict", _VERDICT),
    "bbh/object_counting": _SUM,
    "bbh/web_of_lies": Task("verdict", _VERDICT),
    "bbh/word_sorting": Task("words", f"{_STEPS} the sorted words, separated by spaces."),
    "facts": Task("says", "", 64),
}
"""Tasks by name, which is also the name of the file."""


def questions_of(name: str, count: int | None = None, seed: int | None = None) -> list[Question]:
    """Problems of a task: the first `count`, or as many at random by a seed; all if there are no more or without
    `count`.

    Raises:
        UnknownName: no such task.
    """
    if name not in TASKS:
        raise UnknownName("task", name, TASKS)
    task, path = TASKS[name], FOLDER / f"{name}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        found = parse_questions(file.read(), str(path))
    if seed is not None:
        random.Random(f"{name} {seed}").shuffle(found)
    end = f"\n{task.ask}" if task.ask else ""
    return [Question(name, q.prompt + end, q.answer, task.compare) for q in found[:count]]
