"""`benchmarks/needle_text.py`: where the needle stands, and that its files are what `dgraph eval --data` reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.needle_text import SENTENCES, questions
from dgraph.errors import InputError
from dgraph.evaluate.questions import read_questions


def words(text: str) -> int:
    """Tokens of a tokenizer that splits at white space."""
    return len(text.split())


def test_the_needle_is_where_the_depth_says() -> None:
    found = questions([120, 400], [0.0, 0.5, 1.0], 3, words)
    assert len(found) == 18
    for i, line in enumerate(found):
        assert 0.9 * (length := (120, 400)[i // 9]) < words(line["prompt"]) <= length
        text, _, ask = line["prompt"].partition("\n\n")
        sentences = re.split(r"(?<=\.) ", text)
        (at,) = [place for place, sentence in enumerate(sentences) if sentence not in SENTENCES]
        assert abs(at / (len(sentences) - 1) - (0.0, 0.5, 1.0)[i // 3 % 3]) < 0.5 / (len(sentences) - 1) + 1e-9
        town, number = re.findall(r"The special number of (\w+) is (\d+)\.", sentences[at])[0]
        assert (number, f"What is the special number of {town}?") == (line["answer"], ask)
    assert found == questions([120, 400], [0.0, 0.5, 1.0], 3, words)
    assert found != questions([120, 400], [0.0, 0.5, 1.0], 3, words, seed=1)


def test_dgraph_eval_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "needle.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in questions([80], [0.5], 2, words)))
    for one in read_questions(path):
        assert one.task == "needle-80"
        assert one.right(f"It is {one.answer}.")
        assert not one.right("It is 17.")


def test_a_text_without_room() -> None:
    with pytest.raises(InputError, match="a text of 15 tokens has no room for a sentence beside the needle"):
        questions([15], [0.5], 1, words)
