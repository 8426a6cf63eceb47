"""Docstrings are plain prose."""

from __future__ import annotations

from pathlib import Path

from tests import prose


def test_docstrings_are_plain() -> None:
    found = [str(each) for path in prose.files() for each in prose.findings(path)]
    assert found == [], "see the rules of tests/prose.py"


def test_the_linter_finds_what_it_says(tmp_path: Path) -> None:
    text = '''"""What it is."""

def good(x):
    """Add rows.

    The sum of a row and its neighbour. Rows of padding stay.

    Args:
        x: f32[N, d], what is added.
    """

def bad(x):
    """Whether rows are there. Of these, nobody knows so many.

        Of code no rule speaks.

    Args:
        x: one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
            eighteen nineteen twenty twenty-one twenty-two twenty-three twenty-four twenty-five twenty-six.
    """
'''
    path = tmp_path / "module.py"
    path.write_text(text)
    assert [(each.line, each.rule) for each in prose.findings(path)] == [
        (1, "opening"),
        (13, "opening"),
        (13, "empty word"),
        (13, "empty word"),
        (13, "sentence"),
        (13, "over 25 words"),
    ]
