"""What a command says of what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def refused(result: Any, *parts: str, folder: Path | None = None) -> None:
    """It ends with 2, says why in one line without a traceback, and has written nothing; parts: of what it says."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    message = " ".join(result.stderr.split())
    for part in parts:
        assert part in message, message
    assert not list((folder or Path.cwd()).iterdir()), "something was written"
