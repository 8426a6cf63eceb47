"""Tests of the capture do capture: none takes a graph that an earlier test kept."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGRAPH_CACHE", str(tmp_path / "artifacts"))
