"""Lines of the input: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgraph.dataset.lines import Question, question_of, read_line, read_questions
from dgraph.errors import InputError
from dgraph.runtime.decoding import Decoding

TURN = {"role": "user", "content": "why"}
USUAL = Decoding(max_new_tokens=32, steps=4, seed=7)


def written(folder: Path, *lines: Any) -> Path:
    """A file of these lines: texts as they are, others as JSON."""
    path = folder / "in.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_line_has_a_number_for_an_id_and_settings_of_its_own(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"prompt": "why"},
        "",
        {"prompt": [3, 1], "id": "b", "max_new_tokens": 8, "temperature": None},
        {"messages": [TURN], "threshold": 0.5, "stop": ["x"], "steps": None},
    )
    first, second, third = read_questions(path, USUAL)
    assert (first.id, first.index, first.prompt, first.decoding) == (1, 1, "why", USUAL)
    assert (second.id, second.index, second.prompt) == ("b", 3, [3, 1])
    assert second.decoding == Decoding(max_new_tokens=8, steps=4, seed=7)
    assert (third.id, third.prompt, third.messages) == (4, None, [TURN])
    assert third.decoding == Decoding(max_new_tokens=32, threshold=0.5, seed=7, stop=("x",))  # a rule replaces a rule


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "naïve"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (question,) = read_questions(path, USUAL)
    assert question.prompt == "naïve"


def test_a_row_that_is_no_line_has_no_half_of_a_character() -> None:
    with pytest.raises(InputError, match="no half of a character"):
        question_of({"messages": [{"role": "user", "content": "\ud800"}]}, 1, USUAL)


def test_the_line_that_a_question_keeps_makes_the_same_question_elsewhere(tmp_path: Path) -> None:
    found = read_questions(written(tmp_path, {"prompt": "why", "top_k": 3}, {"messages": [TURN], "id": -1}), USUAL)
    assert [read_line(each.line, each.index, USUAL) for each in found] == found
    assert all(isinstance(each, Question) for each in found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "a line is a JSON object"),
        ({"id": 1}, "a line has either a prompt or messages"),
        ({"prompt": "a", "messages": [TURN]}, "either a prompt or messages, not both"),
        ({"prompt": " "}, "a prompt is a text or a list of ids, and not empty, got ' '"),
        ({"prompt": [1, True]}, "a prompt is a text or a list of ids"),
        ({"prompt": []}, "a prompt is a text or a list of ids"),
        ({"messages": []}, "messages are a list of"),
        ({"messages": [{"role": "user"}]}, "messages are a list of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'a list of {"role": TEXT, "content": TEXT}',
        ),
        ({"prompt": "a", "id": True}, "an id is a text or a whole number, got True"),
        ({"prompt": "a", "id": "\ud800"}, r"a text has no half of a character (a lone surrogate), got '\ud800'"),
        ({"prompt": "a\udc00b"}, r"a text has no half of a character (a lone surrogate), got '\udc00'"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "a text has no half of a character"),
        ({"prompt": "a", "stop": ["\ud83d"]}, "a text has no half of a character"),
        ('{"prompt": ' + "[" * 100_000, "not JSON"),
        ({"prompt": "a", "id": 1.5}, "an id is a text or a whole number, got 1.5"),
        ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'. Did you mean 'temperature'"),
        ({"prompt": "a", "threshold": 2}, "threshold is a probability in (0, 1], got 2"),
        ({"prompt": "a", "max_new_tokens": "8"}, "max_new_tokens must be at least 1, got '8'"),
        ({"prompt": "a", "stop": 5}, "stop strings are a list, got 5"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_questions(written(tmp_path, {"prompt": "good"}, line), USUAL)
    first, named = str(error.value).split("\n")
    assert first.endswith("in.jsonl has 1 line that cannot be used:")
    assert named.startswith("line 2: ")
    assert message in named


def test_all_bad_lines_are_counted_and_the_first_ones_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        read_questions(written(tmp_path, *[{"prompt": "a", "id": "same"}] * 15), USUAL)
    lines = str(error.value).split("\n")
    assert "14 lines" in lines[0]
    assert lines[1] == "line 2: the id 'same' is that of line 1 too"
    assert (len(lines), lines[-1]) == (12, "and 4 more")


def test_the_number_of_a_line_and_an_id_may_be_the_same_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="line 2: the id 2 is that of line 1 too"):
        read_questions(written(tmp_path, {"prompt": "a", "id": 2}, {"prompt": "b"}), USUAL)


@pytest.mark.parametrize(("content", "message"), [("\n\n", "has no line"), (None, "cannot be read: No such file")])
def test_a_file_with_nothing_in_it_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_questions(path, USUAL)
