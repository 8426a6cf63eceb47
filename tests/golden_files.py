"""Golden files; `DGRAPH_UPDATE_GOLDEN=1 python -m pytest tests/text` writes them anew: read what changed."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
UPDATE = "DGRAPH_UPDATE_GOLDEN"


def check_golden(name: str, text: str) -> None:
    """Compare a text with tests/golden/<name>, or write that file if asked to."""
    path = FOLDER / name
    if os.environ.get(UPDATE) == "1":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path.name} does not exist; run with {UPDATE}=1 to write it"
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; if it should, run with {UPDATE}=1"
