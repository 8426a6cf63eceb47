"""The problems that are installed with dgraph."""

from __future__ import annotations

import pytest

from dgraph.errors import UnknownName
from dgraph.evaluate.comparisons import COMPARISONS
from dgraph.evaluate.tasks import FOLDER, TASKS, questions_of

SIZES = {"facts": 128, "gsm8k": 1319, "svamp": 1000, "mawps": 373}
LICENSED = ("gsm8k", "svamp", "bbh")
LARGEST = 3 * 2**20


@pytest.mark.parametrize("name", TASKS)
def test_every_problem_has_an_answer_that_its_comparison_finds(name: str) -> None:
    questions = questions_of(name)
    assert len(questions) == len({q.prompt for q in questions}) == SIZES.get(name, 250)
    for question in questions:
        assert question.task == name
        assert question.prompt.endswith(TASKS[name].ask)
        assert question.answer is not None
        assert question.right(f"Some 7 steps of (Z), false and true. #### {question.answer}"), question
        assert question.right(f"So it is: {question.answer}"), question
        assert question.right("") is False


def test_a_known_problem() -> None:
    first = questions_of("gsm8k", 1)[0]
    assert first.prompt.startswith("Janet’s ducks lay 16 eggs per day.")
    assert (first.answer, first.compare) == ("18", "number")
    assert questions_of("mawps", 1)[0].prompt.startswith(
        "Bryan took a look at his books as well. If Bryan has 56 books"
    )


def test_a_selection_repeats_by_seed() -> None:
    assert questions_of("svamp", 20) == questions_of("svamp")[:20]
    some = questions_of("svamp", 20, seed=1)
    assert some == questions_of("svamp", 20, seed=1)
    assert some != questions_of("svamp", 20, seed=2)
    assert {q.prompt for q in some} <= {q.prompt for q in questions_of("svamp")}
    assert len(questions_of("mawps", 10_000)) == SIZES["mawps"]


def test_an_unknown_task_suggests_the_closest() -> None:
    with pytest.raises(UnknownName, match=r"unknown task 'bbh/navigator'\. Did you mean 'bbh/navigate'"):
        questions_of("bbh/navigator")


def test_all_files_belong_to_tasks_have_a_licence_and_are_small() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {str(p.relative_to(FOLDER)) for p in files if p.suffix == ".gz"} == {f"{name}.jsonl.gz" for name in TASKS}
    assert {p.name for p in files if p.suffix != ".gz"} == {"README.md", *(f"LICENSE-{n}" for n in LICENSED)}
    assert sum(path.stat().st_size for path in files) < LARGEST
    assert {task.compare for task in TASKS.values()} <= set(COMPARISONS)
