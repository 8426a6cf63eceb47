"""Questions: files, the embedded models' prompts, fresh ones; what counts as right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgraph.errors import InputError, UnknownName
from dgraph.evaluate.comparisons import exact
from dgraph.evaluate.questions import Question, choose, drawn, expand, hard_tasks, read_questions, stored
from dgraph.models.tasks import Example, is_held_out, matches

ANSWERS = [
    ("12 + 5 = 17. #### 17", "12 + 5 = 17. #### 17"),
    ("12 + 5 = 17. #### 17", "nothing of it ####17 "),
    ("12 + 5 = 17. #### 17", "a #### 3 #### 17"),
    ("12 + 5 = 17. #### 17", "12 + 5 = 17. 17"),
    ("12 + 5 = 17. #### 17", "#### 170"),
    ("TIGER - TIGER", " TIGER - TIGER\n"),
    ("TIGER - TIGER", "TIGER - TIGER #### TIGER"),
    ("TIGER - TIGER", ""),
]


@pytest.mark.parametrize(("answer", "text"), ANSWERS)
def test_exact_is_what_the_training_tasks_call_a_match(answer: str, text: str) -> None:
    assert exact(answer, text) == matches(Example("math", "?", answer), text)


def test_exact_knows_both() -> None:
    assert [exact(*pair) for pair in ANSWERS] == [True, True, True, False, False, True, False, False]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "why"}', encoding="utf-8-sig")
    assert read_questions(file) == [Question("data", "why", None)]


def test_a_file_has_answers_or_references_and_tasks(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "a\u2028b", "answer": "x"},  # a line separator that is none in JSON
        {"prompt": "b", "reference": "y", "task": "sums", "more": 1},
        {"prompt": "c"},
    ]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
    expected = [Question("data", "a\u2028b", "x"), Question("sums", "b", "y"), Question("data", "c", None)]
    assert read_questions(file) == expected


BAD = [
    ("", "has no questions"),
    ("{", "line 1: not JSON"),
    ("[" * 100_000, "line 1: not JSON"),
    ('{"prompt": ' + '{"a":' * 100_000, "line 1: not JSON"),
    ('{"prompt": "a\\ud800"}', "line 1: a text has no half of a character"),
    ('["a"]', "line 1: expected an object"),
    ('{"prompt": "a"}\n{"answer": "b"}', "line 2: prompt must be a text of at least one character, got None"),
    ('{"prompt": "a", "answer": 7}', "answer must be a text, got 7"),
    ('{"prompt": "a", "task": 7}', "task must be a text, got 7"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[m for _, m in BAD])
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        read_questions(tmp_path / "data.jsonl")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")


def test_choose_takes_the_first_of_each_task_once() -> None:
    sums = [Question("sums", str(i), "x") for i in (1, 2, 2, 3)]
    text = [Question("text", "a", None)]
    assert [q.prompt for q in choose([*text, *sums], [], 2)] == ["1", "2"], "open text only where it is asked for"
    assert [q.prompt for q in choose([*text, *sums], ["text", "sums"], None)] == ["a", "1", "2", "3"]
    assert choose(text, [], None) == text, "or where there is nothing else"
    with pytest.raises(UnknownName, match="unknown task 'sum'"):
        choose(sums, ["sum"], None)


def test_stored_prompts_of_an_embedded_model() -> None:
    questions = stored("tiny_sdar")
    assert {q.task for q in questions} == {"math", "needle", "sort", "follow", "trace", "text"}
    assert all((q.answer is None) == (q.task == "text") for q in questions)
    with pytest.raises(InputError, match="comes with no held-out prompts"):
        stored("elsewhere")


def test_fresh_prompts_are_held_out_and_repeat_by_seed() -> None:
    questions = drawn("tiny_llada", ["sort", "math"], 5, 7)
    assert [q.task for q in questions] == ["sort"] * 5 + ["math"] * 5
    assert all(is_held_out(q.prompt) for q in questions)
    assert questions == drawn("tiny_llada", ["sort", "math"], 5, 7)
    assert questions != drawn("tiny_llada", ["sort", "math"], 5, 8)
    with pytest.raises(UnknownName, match="unknown task 'sorting'"):
        drawn("tiny_llada", ["sorting"], 5, 7)
    with pytest.raises(InputError, match="distinct held-out prompts"):
        drawn("tiny_llada", ["follow"], 5000, 7)


@pytest.mark.parametrize("model", ["tiny_sdar", "tiny_llada"])
def test_hard_prompts_are_drawn_by_name_and_longer(model: str) -> None:
    tasks = hard_tasks(model)
    assert tasks == ("hard/math", "hard/needle", "hard/sort", "hard/trace")
    questions = drawn(model, tasks, 4, 0)
    assert questions == drawn(model, tasks, 4, 0)
    assert all(is_held_out(q.prompt) for q in questions)
    assert not {q.task for q in drawn(model, [], 1, 0)} & set(tasks)
    easy = {q.task: q for q in drawn(model, ["needle", "sort"], 1, 0)}
    for question in questions:
        if (name := question.task.removeprefix("hard/")) in easy:
            assert len(question.prompt.split()) > len(easy[name].prompt.split())
    assert hard_tasks("/a/folder") == ()


def test_a_name_stands_for_the_tasks_below_it() -> None:
    known = ["hard/a", "hard/b", "bbh/c", "sums"]
    assert expand(["hard", "sums", "hard/a", "other"], known) == ["hard/a", "hard/b", "sums", "other"]
