"""Docstrings are plain prose; the findings that are left may only become fewer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests import prose

LEFT = {"opening": 762, "sentence": 132, "over 25 words": 360, "empty word": 283}
"""Findings over dgraph and models, by rule. A commit that removes some lowers the number."""


def test_findings_only_become_fewer() -> None:
    found = Counter(each.rule for path in prose.files() for each in prose.findings(path))
    assert {rule: count for rule, count in found.items() if count > LEFT.get(rule, 0)} == {}, (
        "new docstrings break a rule of tests/prose.py; `python -m tests.prose FILE` lists where"
    )


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
