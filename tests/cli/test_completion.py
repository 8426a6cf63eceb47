"""Completion by the Tab key: commands, names and folders, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dgraph.cli.completion import completing


def completed(line: str) -> list[str]:
    """Words that bash is offered for the last word of a line, in a process of its own that may not import torch."""
    words = line.split(" ")
    forbid = "import sys; sys.modules['torch'] = None; from dgraph.cli import main; main()"
    asked = {"_DGRAPH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", forbid], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "among"),
    [
        ("dgraph ch", {"chat"}),
        ("dgraph generate tiny_", {"tiny_sdar", "tiny_llada"}),
        ("dgraph generate tiny_sdar -r dy", {"dyllm"}),
        ("dgraph chat tiny_sdar --policy dream_e", {"dream_entropy"}),
        ("dgraph generate tiny_sdar --str", {"--stream"}),
        ("dgraph cache ver", {"verify"}),
    ],
)
def test_names_are_completed_without_torch(line: str, among: set[str]) -> None:
    found = completed(line)
    assert among <= set(found)
    assert all(word.startswith(line.rpartition(" ")[2]) for word in found)


def test_folders_are_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")
    (tmp_path / ".hidden").mkdir()
    models = completing("models")
    assert ("models/", "") in models("m")
    assert models("models/") == [("models/mine", "a checkpoint")]
    assert models("no/such/place") == []
    assert ".hidden/" not in [name for name, _ in models("")]
