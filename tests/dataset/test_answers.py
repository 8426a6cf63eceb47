"""The output: each id once, whatever ended the runs before this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dgraph.dataset.answers import Answer, Answers
from dgraph.dataset.lines import Id
from dgraph.errors import InputError

IDS: set[Id] = {1, 2, "b"}


def answer(id: Id, text: str = "ü") -> Answer:
    return Answer(id, text, 3, "stop")


def line(id: Id) -> str:
    return json.dumps(answer(id).to_json(), ensure_ascii=False) + "\n"


def test_answers_are_lines_and_each_id_has_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(path, IDS) as answers:
        assert answers.add(answer(1))
        assert not answers.add(answer(1, "another"))
        assert answers.add(Answer("b", None, 0, "error", "too long"))
        assert (answers.present, answers.done, answers.errors) == (frozenset(), {1, "b"}, 1)
    assert path.read_text(encoding="utf-8") == (
        '{"id": 1, "text": "ü", "tokens": 3, "finish_reason": "stop"}\n'
        '{"id": "b", "text": null, "tokens": 0, "finish_reason": "error", "error": "too long"}\n'
    )
    with Answers(path, IDS) as answers:
        assert answers.present == {1, "b"}
        assert not answers.add(answer("b"))
        assert answers.add(answer(2))
    assert path.read_text(encoding="utf-8").count("\n") == 3
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("cut", range(1, len(line(2).encode()) + 1))
def test_a_line_that_was_cut_off_anywhere_is_written_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    torn = line(2).encode()[:-cut]
    path.write_bytes(line(1).encode() + torn)
    with Answers(path, IDS) as answers:
        assert answers.present == ({1, 2} if cut == 1 else {1})  # whole but for its end of line
        answers.add(answer(2))
        answers.add(answer("b"))
    assert path.read_text(encoding="utf-8") == line(1) + line(2) + line("b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (line(1) + "{\n" + line(2), "line 2, is no answer; give another file"),
        ('{"id": 1}\n', "line 1, is no answer"),
        (line(1) + line(1), "line 2: the id 1 is there twice"),
        (line("c"), "line 1: the id 'c' is not one of the questions"),
    ],
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        Answers(path, IDS)
    assert path.read_text(encoding="utf-8") == content
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


def test_one_process_at_a_time_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(path, IDS), pytest.raises(InputError, match="is being written by another process"):
        Answers(path, IDS)
    with Answers(path, IDS):
        pass


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no folder" / "out.jsonl", tmp_path):
        with pytest.raises(InputError, match=f"--out {path} cannot be written"):
            Answers(path, IDS)
