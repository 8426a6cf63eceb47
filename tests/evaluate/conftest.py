"""A checkpoint folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.folders import write_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small")
