"""Questions for a model: prompts with one right answer, from a file, an embedded model, or freshly drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgraph.errors import InputError, UnknownName
from dgraph.evaluate.comparisons import COMPARISONS, read_number
from dgraph.families import Embedded, embedded
from dgraph.types.texts import parse_json, read_text

OPEN = "text"
"""The task of stored prompts that go on as open text, without right or wrong."""


@dataclass(frozen=True)
class Question:
    """A prompt of a task and its right answer.

    Attributes:
        task: name of the task, as it is shown.
        prompt: text of the prompt.
        answer: the right answer; None for a prompt without one, of which only steps, rows and agreement count.
        compare: comparison of a response with the answer, a name of `COMPARISONS`.
    """

    task: str
    prompt: str
    answer: str | None
    compare: str = "exact"

    def right(self, text: str) -> bool | None:
        """True if a response is right; None for a question without an answer."""
        return None if self.answer is None else COMPARISONS[self.compare](self.answer, text)


def read_questions(path: str | Path) -> list[Question]:
    """Questions of a JSONL file: an object per line with prompt, answer (or reference) and, optionally, task and
    compare (see `Question`).

    A line without an answer is not scored. A line without a task has the task "data".

    Raises:
        InputError: the file cannot be read, a line is no such object, or there are no lines.
        UnknownName: a comparison that does not exist.
    """
    return parse_questions(read_text(path, f"--data {path}"), str(path))


def parse_questions(text: str, source: str) -> list[Question]:
    """Parse the text of a file as `read_questions` does. source: the file's name, for messages."""
    lines = text.split("\n")  # JSON may hold other ends of lines
    found = [_question(f"{source}, line {i + 1}", line) for i, line in enumerate(lines) if line.strip()]
    if not found:
        raise InputError(f'{source} has no questions; give an object {{"prompt": ..., "answer": ...}} per line.')
    return found


def stored(model: str) -> list[Question]:
    """The held-out prompts that an embedded model, or a folder, comes with; open text has no answer.

    Raises:
        InputError: it comes with no held-out prompts.
    """
    file = Path(model) / "held_out.jsonl"  # of a folder that was made of an embedded model
    if model in embedded() or not file.is_file():
        file = _exam_of(model).folder / "held_out.jsonl"
    return [Question(q.task, q.prompt, None if q.task == OPEN else q.answer) for q in read_questions(file)]


def drawn(model: str, tasks: Sequence[str], count: int, seed: int) -> list[Question]:
    """Fresh held-out prompts of an embedded model's tasks, `count` of each.

    Without `tasks` they are those of all tasks but the hard ones.

    Raises:
        InputError: a model without tasks, or a task with fewer prompts.
        UnknownName: a task that the model does not have.
    """
    exam = _exam_of(model).exam
    if exam is None:
        raise InputError(f"{model} has no tasks to draw from; give its stored prompts (no --seed) or --data FILE.")
    _check_tasks(tasks, (*exam.names, *exam.hard))
    try:
        return [Question(t, *pair) for t in tasks or exam.names for pair in exam.draw(t, count, seed)]
    except ValueError as error:
        raise InputError(f"{error}.") from None


def hard_tasks(model: str) -> tuple[str, ...]:
    """The hard tasks of an embedded model; an empty tuple for a folder."""
    found = embedded().get(model)
    return () if found is None or found.exam is None else found.exam.hard


def expand(tasks: Iterable[str], known: Sequence[str]) -> list[str]:
    """The tasks, each once; a name such as "bbh" becomes all known ones that begin with "bbh/"."""
    below = {task: [name for name in known if name.startswith(f"{task}/")] for task in tasks}
    return list(dict.fromkeys(name for task, names in below.items() for name in names or [task]))


def choose(questions: Iterable[Question], tasks: Sequence[str], count: int | None) -> list[Question]:
    """The first `count` questions (all for None) of each named task, in the order of the names.

    A prompt counts once per task. Without names they are those of all tasks that have answers, or else of all tasks.

    Raises:
        UnknownName: a task without questions.
    """
    by_task: dict[str, dict[str, Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, {}).setdefault(question.prompt, question)
    _check_tasks(tasks, by_task)
    scored = [task for task, found in by_task.items() if any(q.answer is not None for q in found.values())]
    return [q for task in dict.fromkeys(tasks or scored or by_task) for q in list(by_task[task].values())[:count]]


def _check_tasks(tasks: Sequence[str], known: Iterable[str]) -> None:
    names = list(known)
    for task in tasks:
        if task not in names:
            raise UnknownName("task", task, names)


def _exam_of(model: str) -> Embedded:
    found = embedded().get(model)
    if found is None or not (found.folder / "held_out.jsonl").is_file():
        raise InputError(f"{model} comes with no held-out prompts; give --data FILE.jsonl with prompts and answers.")
    return found


def _question(where: str, line: str) -> Question:
    try:
        value = parse_json(line)
    except InputError as error:
        raise InputError(f"{where}: {str(error).rstrip('.')}.") from None
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected an object {{"prompt": ..., "answer": ...}}, got {line[:60]!r}.')
    prompt, task, compare = value.get("prompt"), value.get("task", "data"), value.get("compare") or "exact"
    answer = value.get("answer", value.get("reference"))
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f"{where}: prompt must be a text of at least one character, got {prompt!r}.")
    for name, text in (("answer", answer), ("task", task), ("compare", compare)):
        if text is not None and not isinstance(text, str):
            raise InputError(f"{where}: {name} must be a text, got {text!r}.")
    if compare not in COMPARISONS:
        raise UnknownName(f"comparison in {where}", compare, COMPARISONS)
    if compare == "number" and answer is not None and read_number(answer) is None:
        raise InputError(f"{where}: an answer that is compared as a number must hold one, got {answer!r}.")
    return Question(task or "data", prompt, answer, compare)
